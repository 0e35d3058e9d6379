"""`headrace chaos`: faults x states of a request, made in a running deployment under load, and what came of each.

command    options -> matrix (a run) -> cell (one fault in one state) -> report
asks       catalogue (requests and their right answers), asking (a client), load (an open loop), judge (pure)
looks      sight (an operator's view: which request is in which state), evidence (what is left over)
harms      faults (the table): process_acts, link_acts, client_acts at a scene; sockets, memory of other processes
"""
