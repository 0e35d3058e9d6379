"""`headrace profile-step`: where the time of a decode step goes. Nothing heavy is loaded before all options are right.

    command    what the command line registers
    options    those that only this command has
    plan       what is to run, and what is wrong with it
    run        a colocated role in this process, a gateway and a client as others, until the steps are there
    stopwatch  around public calls of other rooms
    steps      what the stopwatches say of each step
    client     the process that asks, over HTTP
    report     the numbers, and the table of them; pure

Only `run` and `steps` load a role, and torch with it.
"""
