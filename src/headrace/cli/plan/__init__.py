"""`headrace plan`: a deployment for machines that are not here, or not yet measured in pairs.

    command          what the command line registers
    options          those that only this command has
    planning         the question, from what was said; then the answer, and what is made of it
    report           what is shown of the answer
    deployment_file  a deployment as `headrace serve --deployment` takes it

Loads neither torch nor a native module.
"""
