"""The prompts of an arrival list, token id for token id. Pure: whoever has the list can make them again."""

import random

from headrace.bench.workload import ArrivalList

VOCABULARY = (300, 49_000)
"""Token ids that stand for ordinary text, in the models that are measured here."""


def vocabulary_of(vocab_size: int) -> tuple[int, int]:
    """As much of VOCABULARY as a model has."""
    return min(VOCABULARY[0], vocab_size // 2), min(VOCABULARY[1], vocab_size)


def prompt_ids(arrivals: ArrivalList, index: int, vocabulary: tuple[int, int] = VOCABULARY) -> list[int]:
    """[prompt_tokens], of the arrival at `index`. A leading block's tokens follow from its name alone, all others from
    the index: prompts have in common what their blocks say, and nothing else."""
    arrival, size = arrivals.arrivals[index], arrivals.block_tokens
    ids: list[int] = []
    for block in arrival.blocks[: arrival.prompt_tokens // size]:
        ids += _drawn(f"{arrivals.seed}, block {block}", size, vocabulary)
    return ids + _drawn(f"{arrivals.seed}, request {index}", arrival.prompt_tokens - len(ids), vocabulary)


def _drawn(key: str, num_tokens: int, vocabulary: tuple[int, int]) -> list[int]:
    # Seeded by a string, which Python hashes with SHA-512: no two keys draw alike.
    return random.Random(key).choices(range(*vocabulary), k=num_tokens)
