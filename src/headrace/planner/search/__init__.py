"""Which deployment holds what is wanted at the least cost: candidates, how many of each, and what is said of the best.

    candidate    instances of a kind, so many; a deployment that could be built, as a scenario
    site         what there is to build with: a model, devices or measured steps, a link
    wanted       budgets, for which share of the requests, at which rate; whether a candidate holds them
    least        of one shape the least numbers of instances that hold
    answer       the best of both architectures, and the verdict
    sensitivity  what remains when the traffic, the link or an instance is not as was thought
    frontier     throughput per device over the TPOT budget, and lengths for which colocated is better

Pure: all of it is simulated.
"""
