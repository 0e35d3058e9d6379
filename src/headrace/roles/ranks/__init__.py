"""The ranks of an instance: their processes, what the lead and they say to each other, and how they end together.

lead    processes (starts and ends them), watch (who lives), runner (one step on all of them)
rank    rank (a process of its own)
both    messages, model (the part of the model that a rank computes)
"""
