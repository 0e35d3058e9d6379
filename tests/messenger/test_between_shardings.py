"""Tickets between instances of any two shardings: real messengers, plans and bytes, over a network in memory.

Prompts are computed on the prefiller's ranks, each its heads, and land on the decoder's; every page is compared with
the pattern on all ranks, with what the prefiller had, and every byte that is no part of the ticket with what it was.
"""

import random
from dataclasses import replace
from itertools import product

import pytest
from kv_world import (
    MAX_MODEL_LEN,
    NATIVE_TRANSPORTS,
    DecoderProcess,
    LoopbackSite,
    NativeSite,
    PrefillerProcess,
    Site,
    greet,
    run_prompts,
)
from test_delivery import CALM, CORRUPTIONS, EVERY_DAY, everything_is_back, serve, tokens

from headrace.fabric.native import Transport
from headrace.kvcache.layout import KVLayout, PoolLayout
from headrace.kvcache.prefix import page_hashes
from headrace.kvcache.sharding import Sharding
from headrace.messenger.aux import aux_slot_bytes
from headrace.messenger.outcomes import TicketFailed
from headrace.testing import Faults

GQA = KVLayout(num_layers=2, num_kv_heads=4, page_size=4, head_dim=2, dtype="fp32")
MLA = KVLayout(num_layers=2, num_kv_heads=1, page_size=4, head_dim=9, dtype="bf16", kind="mla")
DRAFT = KVLayout(num_layers=3, num_kv_heads=2, page_size=4, head_dim=7, dtype="bf16")
PAIRS = {
    **{
        f"{heads} heads, tp {src} to tp {dst}": (
            Sharding(kv=replace(GQA, num_kv_heads=heads), tp=src),
            Sharding(kv=replace(GQA, num_kv_heads=heads), tp=dst),
        )
        for heads, src, dst in product((4, 2, 1), (1, 2, 4), (1, 2, 4))
    },
    **{
        f"mla, tp {src} to dp {dp} of tp {dst}": (Sharding(kv=MLA, tp=src), Sharding(kv=MLA, tp=dst, dp=dp))
        for src, dp, dst in product((1, 2, 4), (1, 2), (1, 2))
    },
    "12 heads, tp 4 to dp 2 of tp 6": (
        Sharding(kv=replace(GQA, num_kv_heads=12), tp=4),
        Sharding(kv=replace(GQA, num_kv_heads=12), tp=6, dp=2),
    ),
    "a draft model, tp 2 to tp 4": (
        Sharding(kv=GQA, further=(DRAFT, MLA), tp=2),
        Sharding(kv=GQA, further=(DRAFT, MLA), tp=4),
    ),
}
OVER_NATIVE = (
    "4 heads, tp 4 to tp 2",
    "2 heads, tp 1 to tp 4",
    "mla, tp 2 to dp 2 of tp 1",
    "a draft model, tp 2 to tp 4",
)


def pool_of(sharding: Sharding, num_pages: int) -> PoolLayout:
    slot_bytes = aux_slot_bytes(MAX_MODEL_LEN, sharding.kv.page_size)
    return sharding.pool(num_pages=num_pages, num_aux_slots=4, aux_slot_bytes=slot_bytes)


class Two:
    """A prefiller and a decoder, greeted."""

    def __init__(self, src: Sharding, dst: Sharding, site: Site) -> None:
        self.src, self.dst = src, dst
        self.prefiller = PrefillerProcess(site, pool_of(src, 24), sharding=src)
        self.decoder = DecoderProcess(site, pool_of(dst, 19), sharding=dst)
        self.peer = greet(self.decoder, self.prefiller)

    def serve(self, name: str, prompt: tuple[int, ...], group: int) -> None:
        serve(self.decoder, self.prefiller, self.peer, name, prompt, group=group)
        hashes = page_hashes(prompt[:-1], self.src.kv.page_size, self.decoder.salt)
        was, came = self.prefiller.pool.prefix.lookup(hashes), self.decoder.pools[group].prefix.lookup(hashes)
        assert len(was) == len(came) == len(hashes) > 0
        for layer in range(self.prefiller.model.layout.num_layers):
            sources = self.prefiller.model.full_copies(self.prefiller.memory, layer, was)
            landed = self.decoder.models[group].full_copies(self.decoder.memory, layer, came)
            assert all((copy == source).all() for copy in landed for source in sources)

    def serve_every_group(self) -> int:
        """-> how many pages were sent."""
        for group in range(self.dst.dp):
            self.serve(f"a{group}", tokens(14, seed=1 + group), group)
            # Two of its pages are hits on both sides.
            self.serve(f"b{group}", tokens(9, seed=1 + group) + tokens(13, seed=9), group)
        everything_is_back(self.prefiller, self.decoder)
        return self.dst.dp * (4 + 4)

    @property
    def num_bytes_sent(self) -> tuple[int, ...]:
        return self.prefiller.messenger.statistics().num_bytes_sent


@pytest.mark.parametrize("faults", [CALM, EVERY_DAY], ids=["calm", "reordered"])
@pytest.mark.parametrize("which", PAIRS)
def test_every_rank_gets_its_heads_of_every_page_and_no_other_byte_is_touched(which: str, faults: Faults) -> None:
    src, dst = PAIRS[which]
    two = Two(src, dst, LoopbackSite(len(which), faults))
    num_pages = two.serve_every_group()
    both = list(zip(src.groups, dst.groups, strict=True))
    page_bytes = sum(of.kv.num_layers * of.kv.page_bytes * wanted.num_replicas for of, wanted in both)
    assert sum(two.num_bytes_sent) == num_pages * page_bytes
    if all(wanted.num_replicas % of.num_replicas == 0 for of, wanted in both):
        assert len(set(two.num_bytes_sent)) == 1, "every rank sends as much in every request"


@pytest.mark.parametrize("transport", NATIVE_TRANSPORTS)
@pytest.mark.parametrize("which", OVER_NATIVE)
def test_they_do_over_each_transport(which: str, transport: Transport) -> None:
    site = NativeSite(transport)
    try:
        Two(*PAIRS[which], site).serve_every_group()
    finally:
        site.close()


def test_a_prefill_says_by_its_seed_who_sends_and_over_many_all_do() -> None:
    two = Two(Sharding(kv=MLA, tp=4), Sharding(kv=MLA, dp=2), LoopbackSite(0))
    senders: list[int] = []
    for number in range(24):
        before = two.num_bytes_sent
        two.serve(f"{number}", tokens(6, seed=number), number % 2)
        [sender] = [rank for rank, (then, now) in enumerate(zip(before, two.num_bytes_sent, strict=True)) if now > then]
        senders.append(sender)
    assert set(senders) == {0, 1, 2, 3}
    assert len({senders[i] for i in range(0, 24, 2)}) > 1, "of one group, too"


@pytest.mark.parametrize("what", CORRUPTIONS)
@pytest.mark.parametrize("which", ["4 heads, tp 4 to tp 2", "4 heads, tp 2 to tp 4", "mla, tp 2 to dp 2 of tp 2"])
def test_wrong_bytes_on_any_rank_are_caught(which: str, what: str) -> None:
    src, dst = PAIRS[which]
    rng = random.Random(which)
    for seed in range(4):
        site = LoopbackSite(seed)
        two = Two(src, dst, site)
        request = two.decoder.reserve("a", tokens(14))
        lease = two.prefiller.lease("a", 14)
        assert request is not None and lease is not None
        two.decoder.open(request, two.peer, lease)
        site.settle(two.prefiller, two.decoder)
        two.prefiller.begin_step()
        two.prefiller.compute_layer()
        for _ in range(rng.randrange(4)):
            site.network.step()
        site.network.faults = CORRUPTIONS[what]
        site.network.step()
        site.network.step()
        site.network.faults = CALM
        while two.prefiller.compute_layer():
            pass
        two.prefiller.end_step()
        run_prompts(two.prefiller, two.decoder)
        [answer] = request.answers
        assert isinstance(answer, TicketFailed), f"seed {seed}: {answer}"
        assert answer.reason == "corrupt"
        two.decoder.finish(request)
        everything_is_back(two.prefiller, two.decoder)
