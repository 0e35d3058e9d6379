"""The OpenAI-compatible front: text to token ids and back, leases, routing. Loads neither torch nor native code.

process     server: starts (options, listening), serves, ends; all on one asyncio loop, long prompts in threads
front       HTTP and text: a request becomes token ids, and tokens an answer
between     generation: all that the two sides say to each other
dispatch    instances, the line of who waits, attempts under way, operators
decisions   route, forecast, admit, budgets: pure, so that the planner asks the same
"""
