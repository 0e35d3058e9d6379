"""A real decoder and a prefiller made by hand, greeted: what the tests of the decoder's messenger begin with."""

from dataclasses import replace
from typing import Any

from kv_world import KV, DecoderProcess, LoopbackSite, Request, pool_layout
from puppet import PuppetPrefiller

from headrace.fabric.interface import MessageReceived, PeerId
from headrace.messenger.entries import DecoderOptions, DecoderStatistics
from headrace.messenger.landings import TicketRequest
from headrace.messenger.outcomes import LinkSuspected, PeerSuspected, Ready, TicketFailed
from headrace.protocol.messages import CancelAck, Failed, Hello, Prefill, Refused, TicketClosed, encode
from headrace.testing import Revocation

LAYERS, PAGE = KV.num_layers, KV.page_size
PROMPT = tuple(range(100, 114))  # 13 tokens to prefill: three whole pages and a tail page
NUM_PAGES, EXPECTED = 4, 4 * LAYERS + 1
LOST_S, PATIENCE_S, REPEAT_S = DecoderOptions().lost_write_s, DecoderOptions().patience_s, DecoderOptions().repeat_s


class Pair:
    """A real decoder and a puppet prefiller, greeted."""

    def __init__(
        self,
        *,
        num_pages: int = 24,
        num_aux_slots: int = 8,
        options: DecoderOptions = DecoderOptions(),
        revocation: Revocation = "at once",
        silence_s: float | None = None,
    ) -> None:
        self.site = LoopbackSite(seed=1, revocation=revocation, silence_s=silence_s)
        layout = pool_layout(num_pages, num_aux_slots=num_aux_slots)
        self.decoder = DecoderProcess(self.site, layout, options=options)
        self.prefiller, self.peer = self.another_prefiller()

    def another_prefiller(self) -> tuple[PuppetPrefiller, PeerId]:
        made = PuppetPrefiller(self.site, pool_layout(40))
        peer = self.decoder.messenger.greet(made.fabric.address, self.site.now)
        self.deliver()
        made.answer()
        self.deliver()
        assert self.decoder.messenger.is_ready(peer)
        return made, peer

    def deliver(self) -> None:
        for _ in range(3):  # what a turn asks of its own fabric is told at once, and calls for another turn
            self.decoder.turn()
            while self.site.network.step():
                self.decoder.turn()

    def pass_time(self, seconds: float) -> None:
        self.site.network.advance(seconds)
        self.deliver()

    def open(
        self, token_ids: tuple[int, ...] = PROMPT, *, name: str = "a", remaining_s: float = 30.0
    ) -> tuple[Request, Prefill]:
        """-> the request, and its Prefill as the prefiller got it."""
        request = self.decoder.reserve(name, token_ids)
        assert request is not None
        assert self.decoder.open(request, self.peer, "lease", remaining_s=remaining_s) is not None
        self.deliver()
        return request, self.prefiller.heard(Prefill)[-1]

    def say(self, kind: type[Any], prefill: Prefill, *, sender: str | None = None, **fields: Any) -> None:
        """Any message about the ticket, true or not."""
        self.prefiller.say(self.prefiller.peer, self.message(kind, prefill, sender=sender, **fields))
        self.deliver()

    def tell_the_messenger(self, kind: type[Any], prefill: Prefill, **fields: Any) -> None:
        """The same, but what the messenger asks of the fabric at that is not told yet."""
        received = MessageReceived(message=encode(self.message(kind, prefill, **fields)))
        self.decoder.messenger.handle([received], self.site.now)

    def message(self, kind: type[Any], prefill: Prefill, *, sender: str | None = None, **fields: Any) -> Any:
        defaults: dict[type[Any], dict[str, Any]] = {
            Refused: {"reason": "no_room", "text": "full", "retry_after_s": 0.5},
            Failed: {"num_unknown": 0, "reason": "the step failed"},
            CancelAck: {"num_unknown": 0},
            TicketClosed: {},
        }
        ticket = fields.pop("ticket", prefill.ticket)
        return kind(sender=sender or self.prefiller.identity.uuid, ticket=ticket, **(defaults[kind] | fields))

    def write(self, prefill: Prefill, num_writes: int) -> None:
        self.prefiller.write(prefill, num_writes)
        self.deliver()

    def write_all(self, prefill: Prefill, **lies: Any) -> None:
        self.prefiller.write_all(prefill, **lies)
        self.deliver()

    @property
    def statistics(self) -> DecoderStatistics:
        return self.decoder.messenger.statistics()

    @property
    def num_quarantined(self) -> int:
        self.decoder.messenger.check()
        assert self.decoder.pool.statistics().num_quarantined == self.statistics.num_quarantined_pages
        assert self.decoder.pool.capacity == self.decoder.pool.num_pages - self.statistics.num_quarantined_pages
        return self.statistics.num_quarantined_pages

    @property
    def suspected(self) -> list[PeerSuspected]:
        return [outcome for outcome in self.decoder.outcomes if isinstance(outcome, PeerSuspected)]

    @property
    def suspected_links(self) -> list[LinkSuspected]:
        return [outcome for outcome in self.decoder.outcomes if isinstance(outcome, LinkSuspected)]

    def answer_of(self, request: Request) -> TicketFailed:
        [answer] = request.answers
        assert isinstance(answer, TicketFailed), answer
        return answer

    def everything_is_back(self) -> None:
        for request in list(self.decoder.requests.values()):
            assert len(request.answers) == 1, f"{request.request_id} was answered {request.answers}"
            self.decoder.finish(request)
        self.decoder.pool.look()
        self.decoder.messenger.check()
        pages = self.decoder.pool.statistics()
        assert (self.statistics.num_open, pages.num_held, pages.num_quarantined) == (0, 0, 0)
        assert self.decoder.fabric.statistics().num_counters_now == 0

    def next_epoch_works(self) -> None:
        """The prefiller answers its new Hello, and a ticket is served under it."""
        assert not self.decoder.messenger.is_ready(self.peer)
        self.prefiller.answer()
        self.deliver()
        assert self.decoder.messenger.is_ready(self.peer)
        request, prefill = self.open(tuple(range(50, 60)), name="of the next epoch")
        assert prefill.ticket.epoch == self.prefiller.heard(Hello)[-1].epoch > 1
        self.write_all(prefill)
        assert isinstance(request.answers[0], Ready)


def ticket_request(pair: Pair, **changes: Any) -> TicketRequest:
    right = TicketRequest(
        request_id="a",
        prefiller=pair.peer,
        lease="lease",
        token_ids=PROMPT,
        cached_len=0,
        group=0,
        pages=(0, 1, 2, 3),
        hashes=(),
        remaining_s=30.0,
    )
    return replace(right, **changes)
