"""Deployments as files: which model, on which devices, shared how, over which link.

    file       a deployment, read strictly from TOML; `fields` and `sizes` read its values
    known      the configuration of a model that is not here, of the public ones
    weights    bytes of weights that each rank holds

Pure but for the reading of files: no device, no weights, no torch, no clock.
"""
