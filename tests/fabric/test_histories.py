"""Conformance: random lives of many transfers at once, held against what must be true of any of them.

Each transfer owns some pages of the reader. Whatever is gated, closed, failed or revoked, and in whatever order it is
delivered: one result each, its count is the count that close or fail told, that many writes arrive unless the access
was revoked, each of them whole at its own place, and nothing else changes.
"""

import random
from dataclasses import dataclass

import numpy as np
import pytest
from fabric_world import EVERY_DAY, Link, LoopbackWorld, World, fill, link, page_writes, poisoned

from headrace.fabric.interface import LAYERS_PER_STEP, Imm, PageWrites, Surplus, TransferId

PAGE = 256
NUM_LAYERS = 3
LAYER_STRIDE = 64 * 1024
PAGES_EACH = 8


@dataclass(slots=True)
class Life:
    transfer: TransferId
    imm: int
    src: list[int]
    dst: list[int]
    told: int | None = None  # num_posted as close or fail said


def writes_of(life: Life, begin: int, end: int) -> PageWrites:
    place = (0, LAYER_STRIDE, PAGE)
    pages = slice(begin, end)
    positions = list(range(begin, end))
    return page_writes(
        life.src[pages], life.dst[pages], layers=(0, NUM_LAYERS), length=PAGE, src=place, dst=place, positions=positions
    )


def play(pair: Link, rng: random.Random, *, first_imm: int, revoke: bool) -> list[Life]:
    """Some steps over some transfers, with ends of every kind in between."""
    fabric, pages = pair.writer.fabric, list(range(LAYER_STRIDE // PAGE))
    sources = rng.sample(pages, 6 * PAGES_EACH)
    places = rng.sample(pages, 6 * PAGES_EACH)
    lives = []

    def lives_on(life: Life) -> bool:
        """Its end may have been told already, once the access was taken away: then its id is over."""
        return pair.writer.done(life.transfer) is None

    for i in range(6):
        chosen = slice(i * PAGES_EACH, (i + 1) * PAGES_EACH)
        imm = first_imm + i
        lives.append(Life(pair.open(imm, num_pages=PAGES_EACH), imm, sources[chosen], places[chosen]))
        pair.reader.fabric.arm(Imm(imm), PAGES_EACH * NUM_LAYERS)
    for step in range(1, 5):
        members = [life for life in lives if life.told is None and rng.random() < 0.8 and lives_on(life)]
        quarter = slice((step - 1) * 2, step * 2)
        fabric.submit_program(step, [(life.transfer, writes_of(life, quarter.start, quarter.stop)) for life in members])
        for layer in range(1, NUM_LAYERS + 1):
            pair.world.pause(rng.randrange(40))
            if rng.random() < 0.1:
                for transfer, num_posted in fabric.fail_step(step).items():
                    next(life for life in lives if life.transfer == transfer).told = num_posted
            fabric.raise_layers(step * LAYERS_PER_STEP + layer)
        closed = rng.choice(lives)
        if closed.told is None and rng.random() < 0.4 and lives_on(closed):
            pair.world.pause(rng.randrange(20))
            closed.told = fabric.close_transfer(closed.transfer)
        if revoke and step == 3:
            pair.revoke()
            pair.reader.memory[:] = poisoned(pair.reader)
    for life in lives:
        if life.told is None and lives_on(life):
            fabric.submit_last(life.transfer)
    return lives


def check(pair: Link, lives: list[Life], *, revoke: bool) -> None:
    expected = poisoned(pair.reader)
    for life in lives:
        done = pair.wait_done(life.transfer)
        assert life.told in (None, done.num_posted)
    pair.world.settle()
    num_whole = 0
    for life in lives:
        done = pair.wait_done(life.transfer)
        whole = 0
        for src, dst in zip(life.src, life.dst, strict=True):
            for layer in range(NUM_LAYERS):
                here, there = layer * LAYER_STRIDE + src * PAGE, layer * LAYER_STRIDE + dst * PAGE
                source = pair.writer.memory[here : here + PAGE]
                if not revoke and (pair.reader.memory[there : there + PAGE] == source).all():
                    expected[there : there + PAGE] = source
                    whole += 1
        assert revoke or whole == done.num_posted
        num_whole += whole
        is_full = not revoke and done.num_posted == PAGES_EACH * NUM_LAYERS
        assert pair.reader.reached(life.imm) == ([PAGES_EACH * NUM_LAYERS] if is_full else []) or revoke
    np.testing.assert_array_equal(pair.reader.memory, expected)
    statistics = pair.reader.fabric.statistics()
    assert revoke or statistics.num_arrivals == num_whole
    assert not [told for told in pair.reader.told(Surplus) if not told.armed]
    assert pair.writer.fabric.statistics().num_transfers_now == 0


@pytest.mark.parametrize("revoke", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_a_random_life_of_transfers_keeps_every_promise(world: World, seed: int, revoke: bool) -> None:
    rng = random.Random(seed)
    pair = link(world)
    fill(pair.writer)
    check(pair, play(pair, rng, first_imm=10, revoke=revoke), revoke=revoke)


@pytest.mark.parametrize("revoke", [False, True])
def test_two_hundred_random_lives_on_the_loopback(revoke: bool) -> None:
    for seed in range(100):
        pair = link(LoopbackWorld(seed, EVERY_DAY))
        fill(pair.writer)
        check(pair, play(pair, random.Random(seed), first_imm=4096 * 7, revoke=revoke), revoke=revoke)
