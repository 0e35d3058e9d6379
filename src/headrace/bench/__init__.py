"""Measuring servers of language models, ours and others: what is asked, what came of it, what follows.

workload   arrival lists: when which request comes; pure
records    what came of a request, of a run, of a comparison, as it is kept in files
metrics    figures of records, one definition of each; pure, and the planner's too
"""
