"""HTTP and text. Knows instances and leases by `generation` alone.

in          app (paths), connection (body), intake: openai_requests, openai_fields, chat, vocabulary -> token ids
out         choices (text: stop strings) -> answers: whole or events (openai_answers, openai_errors)
"""
