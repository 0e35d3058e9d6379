"""What a rank reads is what the lead wrote, through a descriptor of its own."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import fields

import numpy as np
import pytest

from headrace.engine.requests import SamplingParams
from headrace.engine.step import Draw
from headrace.engine.step_memory import StepLimits, StepMemory
from headrace.model.batch import Batch, Row

PAGE, NUM_PAGES, LONGEST = 4, 64, 40
LIMITS = StepLimits.of(chunk_tokens=5, max_running=3, max_model_len=LONGEST, page_size=PAGE)
Sides = tuple[StepMemory, StepMemory]


@pytest.fixture
def sides() -> Iterator[Sides]:
    """The lead's memory of two groups, and another process's."""
    with ExitStack() as exits:
        lead = exits.enter_context(closing(StepMemory(LIMITS, 2)))
        yield lead, exits.enter_context(closing(StepMemory(LIMITS, 2, os.dup(lead.fd))))


def batch(*rows: Row) -> Batch:
    return Batch.of(rows, page_size=PAGE, num_pages=NUM_PAGES, vocab_size=100)


def row(token_ids: range, begin: int, *, wants_logits: bool = True) -> Row:
    table = range(NUM_PAGES - 10, NUM_PAGES)
    return Row(token_ids=token_ids, begin=begin, page_table=table, wants_logits=wants_logits)


def require_equal(one: Batch, other: Batch) -> None:
    for field in fields(Batch):
        assert np.array_equal(getattr(one, field.name), getattr(other, field.name)), field.name


def test_each_group_has_its_batch_and_its_draws(sides: Sides) -> None:
    lead, rank = sides
    odd = SamplingParams(temperature=0.7, top_k=9, top_p=0.95, seed=2**63 - 1, choice=2**32 - 1)
    first, draws = batch(row(range(5), 3, wants_logits=False), row(range(1), 20)), [Draw(sampling=odd, position=21)]
    second = batch(row(range(2), 0, wants_logits=False))
    lead.write(0, first, draws)
    lead.write(1, second, [])
    for group, written, drawn in ((0, first, draws), (1, second, [])):
        found, found_draws = rank.read(group)
        require_equal(found, written)
        assert found_draws == drawn


def test_a_smaller_step_leaves_nothing_of_the_one_before(sides: Sides) -> None:
    lead, rank = sides
    greedy = Draw(sampling=SamplingParams(), position=4)
    lead.write(0, batch(*(row(range(1), at) for at in range(3))), [greedy] * 3)
    lead.write(0, batch(row(range(1), 7)), [greedy])
    found, draws = rank.read(0)
    require_equal(found, batch(row(range(1), 7)))
    assert draws == [greedy]


def test_tokens_go_the_other_way(sides: Sides) -> None:
    lead, rank = sides
    rank.write_tokens(1, [5, 2**31])
    rank.write_tokens(0, [])
    assert (lead.read_tokens(0), lead.read_tokens(1)) == ([], [5, 2**31])


def test_the_largest_step_fits(sides: Sides) -> None:
    """As many rows as can be, each of the longest request, all drawn."""
    lead, rank = sides
    rows = [row(range(1), LONGEST - 1) for _ in range(LIMITS.num_rows)]
    draws = [Draw(sampling=SamplingParams(seed=seed), position=LONGEST) for seed in range(LIMITS.num_rows)]
    for group in range(2):
        lead.write(group, batch(*rows), draws)
        rank.write_tokens(group, range(LIMITS.num_rows))
    for group in range(2):
        found, found_draws = rank.read(group)
        require_equal(found, batch(*rows))
        assert found_draws == draws
        assert lead.read_tokens(group) == list(range(LIMITS.num_rows))
