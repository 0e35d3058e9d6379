"""A real prefiller and a decoder made by hand, greeted: what the tests of the prefiller's messenger begin with."""

from typing import Any

from kv_world import KV, LoopbackSite, PrefillerProcess, pool_layout
from puppet import PuppetDecoder

from headrace.messenger.jobs import PrefillerOptions, Transfer
from headrace.protocol.messages import Prefill
from headrace.testing import Faults

LAYERS, PAGE = KV.num_layers, KV.page_size
LATE = Faults(late_completion=1.0, late_s=(5.0, 5.0))
PROMPT = tuple(range(100, 114))  # 13 tokens to prefill: three whole pages and a tail page, two steps of at most 8
NUM_PAGES, EXPECTED = 4, 4 * LAYERS + 1


class Pair:
    """A real prefiller and a puppet decoder, greeted."""

    def __init__(
        self,
        *,
        num_pages: int = 24,
        num_aux_slots: int = 8,
        decoder_pages: int = 100,
        transfer: Transfer = "layers",
    ) -> None:
        self.transfer = transfer
        self.site = LoopbackSite(seed=1)
        layout = pool_layout(num_pages, num_aux_slots=num_aux_slots)
        options = PrefillerOptions(lease_tokens=64, reserve_tokens=16, retry_after_s=0.5)
        self.prefiller = PrefillerProcess(self.site, layout, options=options, transfer=transfer)
        self.decoder = self.another_decoder(decoder_pages)

    def another_decoder(self, num_pages: int = 100) -> PuppetDecoder:
        made = PuppetDecoder(self.site, pool_layout(num_pages), self.prefiller.fabric.address)
        made.greet()
        self.deliver()
        return made

    def deliver(self) -> None:
        """All that is due now; the clock stands still, so late completions stay outstanding."""
        self.prefiller.turn()
        while self.site.network.step():
            self.prefiller.turn()

    def settle(self) -> None:
        """Until nothing moves any more, late completions and all."""
        for _ in range(2):  # what the last turn sent arrives, too
            self.site.settle(self.prefiller)

    def ask(self, token_ids: tuple[int, ...] = PROMPT, *, request_id: str = "a", **changes: Any) -> Prefill:
        lease = self.prefiller.lease(request_id, max(1, len(token_ids)))
        assert lease is not None
        message = self.decoder.prefill(token_ids, **{"lease": lease, "request_id": request_id, **changes})
        self.decoder.say(self.decoder.peer, message)
        self.deliver()
        return message

    def step(self, layers: int = LAYERS, *, end: bool = True) -> None:
        assert self.prefiller.begin_step()
        for _ in range(layers):
            self.prefiller.compute_layer()
            self.deliver()
        if end:
            self.prefiller.end_step()
            self.deliver()

    def compute_everything(self) -> None:
        self.deliver()
        if self.prefiller.running is not None:
            while self.prefiller.compute_layer():
                self.deliver()
            self.prefiller.end_step()
        while self.prefiller.begin_step():
            while self.prefiller.compute_layer():
                self.deliver()
            self.prefiller.end_step()
            self.deliver()

    @property
    def num_accepted(self) -> int:
        return self.prefiller.messenger.statistics().num_accepted

    @property
    def num_held(self) -> int:
        return self.prefiller.pool.statistics().num_held

    def everything_is_back(self) -> None:
        statistics = self.prefiller.messenger.statistics()
        assert (statistics.num_tickets, statistics.num_leased_tokens, statistics.num_held_pages) == (0, 0, 0)
        assert self.num_held == 0
        self.prefiller.messenger.check()
        assert self.prefiller.fabric.statistics().num_transfers_now == 0
