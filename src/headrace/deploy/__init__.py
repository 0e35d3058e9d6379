"""Deployments as files: which model, on which devices, shared how, over which link; and what comes of it.

    file       a deployment, read strictly from TOML; `fields` and `sizes` read its values
    known      the configuration of a model that is not here, of the public ones
    weights    bytes of weights that each rank holds
    memory     what is left for KV: pages, tokens, the longest context
    transfer   what a request's KV costs: writes and bytes, who sends to whom, how long the link takes
    check      all of these together, or the number that breaks it

Pure but for the reading of files: no device, no weights, no torch, no clock.
"""
