"""The open-loop client: it asks when the arrival list says so, whatever became of the requests before.

stream     one streamed completion, on a connection of its own
offering   all of a list, each at its time
process    the same as a process of its own, so that nobody else's work delays it
judging    what is wrong with a run itself; pure
"""
