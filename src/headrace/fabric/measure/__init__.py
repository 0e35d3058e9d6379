"""The fabric beside the physical limits: the same pages by the engine and by bare loops, in turn.

    plan         what is measured; pure
    run          memories, sides, and every transport of the plan
    compare      the engine and its limits in turns
    limits       which bare loops stand beside which transport; `link`: the engine as one that takes turns with them
    ratios       medians, spread, and how sure a ratio is; pure
    records      what comes out; `verdict` says whether it is good enough; pure
    engine       one fabric, joined with one other, and what is timed of it; `inbox`: its events
    side         the process that an engine lives in; asked in `questions`, by `sides`
    marked       its memory, filled so that wrong bytes are seen
    greeting     how another machine is entered: a token, proved before anything else
    server       `headrace fabric serve`: lends this machine's side to one client at a time
    session      the client's end of that

The bare loops are those of `headrace.fabric.limits`, over the same memory. `plan`, `records`, `verdict` and `session`
are for whoever shows it: they load nothing heavy.
"""
