"""Recorded workloads: files of others, each format read by one reader, recognised by its first line.

    reading    which reader a file is for; what they share
    azure      Azure's 2023 and 2024 traces
    burstgpt   BurstGPT
    mooncake   Mooncake's, with the hashes of shared prefixes
    servegen   ServeGen's clients: rates and burstiness by ten minutes, lengths drawn
    vidur      lengths alone, no arrivals

No trace is part of this repository: each has its own licence, and its own home.
"""
