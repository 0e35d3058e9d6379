"""`headrace compare`: the same arrivals against both architectures at equal devices. Nothing heavy is loaded here.

    command     what the command line registers
    options     those that only this command has
    beginning   from options to what is to run, and to the report; loads the rest
    arms        which processes an arm is; pure
    energy      of the machine, where it is counted
    link        two network namespaces with a shaped link between them
    gateway_log what a gateway says of each request
    running     an arm while it runs: its processes, its log, what they hold
    course      which runs, in which order, at which rates; pure
    asking      runs of one arm
    comparing   the comparison as it goes on, and goes on again: writes its directory
    progress    what a person sees meanwhile

What is measured of records, the verdict and the report are `headrace.bench`'s.
"""
