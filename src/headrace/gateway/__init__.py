"""The OpenAI-compatible front: text to token ids and back, leases, routing. Loads neither torch nor native code.

process     server: starts (options, listening), serves, ends; all on one asyncio loop, long prompts in threads
in          app (paths), connection (body), intake: openai_requests, openai_fields, chat, vocabulary -> token ids
out         choices (text: stop strings) -> answers: whole or events (openai_answers, openai_errors)
between     generation: all that HTTP side and dispatch side say to each other
dispatch    its loop over the control socket; exchange: instances, the line of who waits, attempts under way
operators   operator_desk: how the deployment stands, what is to change in it
routing     route, of what instances tell and of what is observed of them (affinity: who has which prefix)
budgets     budgets: of tier, key, headers; forecast, of route and of streams (who is at which decoder); admit
a request   life: door (admit), placing (patience), attempt after attempt (each an errand); figures, metrics
"""
