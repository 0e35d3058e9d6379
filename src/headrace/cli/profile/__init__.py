"""`headrace profile`: what a simulation must know of this machine, measured. Nothing heavy is loaded here.

    command     what the command line registers
    options     those that only this command has
    beginning   from options to what is measured, and to the file
    calibrating the arms while they run: what is asked of them, and what came of it
    load        what is asked, from how long a request takes alone; pure
    step_log    what an instance's log says of its steps; pure
    fitting     from steps to coefficients, from requests to gateway, hand-over and link; pure
    report      one screen of it; pure

Arms are started as `headrace compare` starts them (`cli.compare.running`), only that instances log their steps.
"""
