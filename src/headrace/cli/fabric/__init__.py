"""`headrace fabric`: a look at the link. Each command has a file of its own; `app` puts them together.

topology          devices, the NICs nearest to each, and the CPUs near those
topology_report   its tables and its JSON; pure
selftest          the link beside the limits of its machines, with a verdict
bench             the same measurements, chosen one by one
serve             lends another machine this one's side of them
measure           what the two have in common; `measure_options` and `measure_report` are all pure
"""
