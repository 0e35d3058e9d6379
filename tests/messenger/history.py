"""One random history of a small site: a few prefillers and decoders, small pools, and everything that goes wrong.

A seed gives the sizes, the faults, when pages travel, how access ends, and every move. The gateway is played here: it
asks for leases, sends a failed request to another prefiller, at last to a local prefill. At the end what hangs wakes
(or stays hung, in some histories), faults stop, time passes, and `check` says what must hold then.
"""

import random
from dataclasses import dataclass

from kv_world import DecoderProcess, LoopbackSite, PrefillerProcess, Request, pool_layout

from headrace.fabric.interface import PeerId
from headrace.messenger.entries import DecoderOptions
from headrace.messenger.jobs import PrefillerOptions, Transfer
from headrace.messenger.outcomes import Ready, TicketFailed
from headrace.testing import Faults

MOST_TICKETS = 3
CORRUPT = 0.02


def random_faults(rng: random.Random) -> Faults:
    """Each kind is off in half of the histories, so that faults meet alone as well as together."""

    def maybe(probability: float) -> float:
        return probability if rng.random() < 0.5 else 0.0

    corrupts = rng.random() < 0.3
    return Faults(
        delay_s=(0.0, rng.choice([0.0, 0.002, 0.05])),
        late_s=(0.0, rng.choice([0.1, 1.0, 5.0])),
        reorder=rng.random() < 0.8,
        early_completion=maybe(0.4),
        late_completion=maybe(0.2),
        late_write=maybe(0.1),
        split_write=maybe(0.3),
        late_imm=maybe(0.1),
        duplicate_completion=maybe(0.2),
        full_queue=maybe(0.1),
        lose_write=maybe(0.01),
        lose_write_with_error=maybe(0.01),
        fail_landed_write=maybe(0.01),
        lose_message=maybe(0.05),
        fail_message=maybe(0.05),
        duplicate_message=maybe(0.2),
        reorder_messages=rng.random() < 0.5,
        flip_bit=CORRUPT if corrupts else 0.0,
        swap_pages=CORRUPT if corrupts else 0.0,
        skip_bytes=CORRUPT if corrupts else 0.0,
    )


@dataclass(slots=True)
class _Client:
    """One request as the client sees it: exactly one answer."""

    name: str
    token_ids: tuple[int, ...]
    decoder: DecoderProcess
    num_tickets: int = 0
    request: Request | None = None  # the ticket or the decoding that is under way
    decodes_until: float | None = None
    answers: int = 0


class History:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        rng = self.rng
        self.site = LoopbackSite(seed, random_faults(rng), "when let go" if seed // 4 % 2 else "at once")
        self.network = self.site.network
        self.prefiller_options = PrefillerOptions(lease_tokens=rng.choice([24, 64, 200]), reserve_tokens=8)
        self.transfer: Transfer = "whole" if seed % 4 == 3 else "layers"
        self.decoder_options = DecoderOptions(patience_s=rng.choice([0.5, 2.0]), repeat_s=rng.choice([0.3, 1.0, 100.0]))
        self.prefillers: list[PrefillerProcess] = []
        self.decoders: list[DecoderProcess] = []
        self.peers: dict[tuple[DecoderProcess, PrefillerProcess], PeerId] = {}
        self.exits: list[tuple[float, PrefillerProcess | DecoderProcess]] = []
        self.clients: list[_Client] = []
        for _ in range(rng.choice([1, 1, 2])):
            self.start_prefiller()
        for _ in range(rng.choice([1, 1, 2, 3])):
            self.start_decoder()

    def start_prefiller(self) -> None:
        layout = pool_layout(self.rng.choice([8, 16, 40]), num_aux_slots=4)
        started = PrefillerProcess(self.site, layout, options=self.prefiller_options, transfer=self.transfer)
        self.prefillers.append(started)
        for decoder in self.decoders:
            if not decoder.dead:
                self.greet(decoder, started)

    def start_decoder(self) -> None:
        layout = pool_layout(self.rng.choice([10, 16, 40]), num_aux_slots=3)
        started = DecoderProcess(self.site, layout, options=self.decoder_options)
        self.decoders.append(started)
        for prefiller in self.prefillers:
            if not prefiller.dead:
                self.greet(started, prefiller)

    def greet(self, decoder: DecoderProcess, prefiller: PrefillerProcess) -> None:
        self.peers[decoder, prefiller] = decoder.messenger.greet(prefiller.fabric.address, self.network.now)

    # ---- moves -------------------------------------------------------------------------------------------------

    def run(self, num_moves: int) -> None:
        moves = (
            (self.deliver, 40),
            (self.turn_one, 20),
            (self.compute, 16),
            (self.arrive, 4),
            (self.pass_time, 2),
            (self.cancel, 0.4),
            (self.disturb, 0.5),
        )
        acts, weights = zip(*moves, strict=True)
        for act in self.rng.choices(acts, weights, k=num_moves):
            act()
        self.come_to_rest()

    def deliver(self) -> None:
        for _ in range(self.rng.randrange(1, 12)):
            if not self.network.step():
                due = self.network.next_due()
                if due is None:
                    break
                self.network.advance(max(0.0, due - self.network.now))

    def pass_time(self) -> None:
        self.network.advance(self.rng.choice([0.001, 0.02, 0.2, 1.0]))

    def turn_one(self) -> None:
        process = self.rng.choice([*self.prefillers, *self.decoders])
        self.turn(process)

    def turn(self, process: PrefillerProcess | DecoderProcess) -> None:
        for due, gone in list(self.exits):
            if due <= self.network.now:
                self.tell_exit(gone)
                self.exits.remove((due, gone))
        if isinstance(process, PrefillerProcess):
            process.turn()
            return
        answered = {request.request_id for request in process.turn()}
        for client in self.clients:
            if client.request is not None and client.request.request_id in answered and client.decoder is process:
                self.on_answer(client)
        self.end_decoding(process)

    def compute(self) -> None:
        """Some of a step at some prefiller; it may fail in the middle."""
        prefiller = self.rng.choice(self.prefillers)
        if not prefiller.runs:
            return
        if prefiller.running is None:
            prefiller.turn()
            if not prefiller.begin_step():
                return
        if self.rng.random() < 0.02:
            prefiller.end_step(fail=True)
        elif not prefiller.compute_layer():
            prefiller.end_step()

    def arrive(self) -> None:
        live = [decoder for decoder in self.decoders if decoder.runs]
        waiting = sum(client.request is not None for client in self.clients)
        if not live or waiting > 6:
            return
        stem = tuple(self.rng.randrange(3) * 100 + i for i in range(self.rng.choice([0, 4, 8, 12])))
        own = tuple(self.rng.randrange(1000) for _ in range(self.rng.randrange(1, 22)))
        client = _Client(f"r{len(self.clients)}", stem + own, self.rng.choice(live))
        self.clients.append(client)
        self.dispatch(client)

    def dispatch(self, client: _Client) -> None:
        """To a prefiller with a lease; where there is none, the prompt is computed here (and that is the answer)."""
        decoder = client.decoder
        client.request = None
        client.num_tickets += 1
        request = decoder.reserve(f"{client.name}.{client.num_tickets}", client.token_ids)
        if request is None:
            client.answers += 1  # no room: the gateway's turn, not the messenger's
            return
        client.request = request
        if not decoder.needs_prefill(request):
            self.start_decoding(client)
            return
        order = self.rng.sample(self.prefillers, len(self.prefillers))
        for prefiller in order if client.num_tickets <= MOST_TICKETS else ():
            lease = prefiller.lease(request.request_id, len(client.token_ids)) if prefiller.runs else None
            if lease is None:
                continue
            peer = self.peers[decoder, prefiller]
            if decoder.open(request, peer, lease, remaining_s=self.rng.choice([0.5, 10.0, 30.0, 30.0])) is not None:
                return
            prefiller.messenger.return_lease(lease)
        self.prefill_locally(client)

    def prefill_locally(self, client: _Client) -> None:
        request = client.request
        assert request is not None
        decoder, begin = client.decoder, request.reservation.cached_len
        keys = decoder.keys(request)[begin:]
        for layer in range(decoder.model.layout.kv.num_layers):
            decoder.model.compute_layer(decoder.memory, layer, keys, request.reservation.pages, begin)
        self.start_decoding(client)

    def on_answer(self, client: _Client) -> None:
        request = client.request
        assert request is not None
        answer = request.answers[0]
        if isinstance(answer, Ready):
            assert client.decoder.index_is_sane(request)
            self.start_decoding(client)
            return
        assert isinstance(answer, TicketFailed)
        assert answer.reason != "fault", f"an honest prefiller is accused: {answer}"
        if answer.reason == "corrupt":
            assert self.network.faults.flip_bit > 0, f"corrupt without a fault: {answer}"
        client.decoder.finish(request)
        if answer.reason in ("cancelled", "deadline"):
            client.request = None
            client.answers += 1
        else:
            self.dispatch(client)

    def start_decoding(self, client: _Client) -> None:
        client.decodes_until = self.network.now + self.rng.choice([0.0, 0.1, 2.0])
        client.answers += 1

    def end_decoding(self, decoder: DecoderProcess) -> None:
        """What was promised ready is looked at when it is given back: nothing may have landed in it since."""
        for client in self.clients:
            until = client.decodes_until
            if client.decoder is decoder and until is not None and until <= self.network.now:
                assert client.request is not None
                wrong = decoder.wrong_bytes(client.request)
                assert not wrong, f"{client.name}: {wrong[:3]}"
                decoder.finish(client.request)
                client.request, client.decodes_until = None, None

    def cancel(self) -> None:
        open_now = [c for c in self.clients if c.request is not None and c.decodes_until is None and c.decoder.runs]
        if open_now:
            client = self.rng.choice(open_now)
            assert client.request is not None
            assert client.request.imm is not None
            client.decoder.messenger.cancel(client.request.imm, self.network.now)

    def disturb(self) -> None:
        process = self.rng.choice([*self.prefillers, *self.decoders])
        if process.dead:
            return
        match self.rng.choice(["hang", "wake", "wake", "kill", "cut", "suspect"]):
            case "hang":
                process.hung = True
                self.network.hang(process.fabric)
            case "wake":
                process.hung = False
                self.network.wake(process.fabric)
            case "kill":
                self.kill(process)
            case "cut":
                other = self.rng.choice([*self.prefillers, *self.decoders])
                if other is not process:
                    self.network.cut(process.fabric, other.fabric)
            case "suspect":
                self.suspect()

    def suspect(self) -> None:
        """A heartbeat was missed, rightly or not."""
        (decoder, _), peer = self.rng.choice(list(self.peers.items()))
        if decoder.runs:
            decoder.messenger.peer_hung(peer, self.network.now)

    def kill(self, process: PrefillerProcess | DecoderProcess) -> None:
        """kill -9. Who watches its pid is told, at once or a little later; its clients are another decoder's. Another
        process may be started in its place."""
        process.dead = True
        self.network.kill(process.fabric)
        self.exits.append((self.network.now + self.rng.choice([0.0, 0.01, 3.0]), process))
        for client in self.clients:
            if client.decoder is process and client.request is not None:
                if client.decodes_until is None:
                    client.answers += 1  # by another decoder
                client.request, client.decodes_until = None, None
        if self.rng.random() < 0.5:
            (self.start_decoder if isinstance(process, DecoderProcess) else self.start_prefiller)()

    def tell_exit(self, gone: PrefillerProcess | DecoderProcess) -> None:
        if isinstance(gone, DecoderProcess):
            for prefiller in self.prefillers:
                peer = prefiller.decoders.get(gone.identity.uuid)
                if peer is not None and not prefiller.dead:
                    prefiller.messenger.peer_exited(peer, self.network.now)
            return
        for decoder in self.decoders:
            if not decoder.dead and (decoder, gone) in self.peers:
                decoder.messenger.peer_exited(self.peers[decoder, gone], self.network.now)

    # ---- the end -----------------------------------------------------------------------------------------------

    def come_to_rest(self) -> None:
        """Faults stop, cuts heal, most of what hangs wakes, and time passes until nothing moves."""
        stays_hung = self.rng.random() < 0.2
        self.network.faults = Faults(flip_bit=self.network.faults.flip_bit and 1e-12)
        everybody = [*self.prefillers, *self.decoders]
        for first in everybody:
            for second in everybody:
                if first is not second:
                    self.network.heal(first.fabric, second.fabric)
            if not stays_hung:
                first.hung = False
                self.network.wake(first.fabric)
        for _ in range(40):  # beyond every deadline and patience
            self.network.run(deadline=self.network.now + 1.0)
            for process in everybody:
                self.turn(process)
            for prefiller in self.prefillers:
                self.finish_steps(prefiller)

    def finish_steps(self, prefiller: PrefillerProcess) -> None:
        prefiller.turn()
        while prefiller.runs and (prefiller.running is not None or prefiller.begin_step()):
            while prefiller.compute_layer():
                self.network.step()
            prefiller.end_step()

    def check(self) -> None:
        for client in self.clients:
            if not client.decoder.hung:
                assert client.answers == 1, f"{client.name} was answered {client.answers} times: {client}"
                assert client.request is None, f"{client.name} never ended: {client.decoder.messenger!r}"
        for decoder in self.decoders:
            if decoder.runs:
                self.check_decoder(decoder)
        for prefiller in self.prefillers:
            if prefiller.runs:
                self.check_prefiller(prefiller)

    def check_decoder(self, decoder: DecoderProcess) -> None:
        """Pages are back, but for those that a prefiller which still hangs may yet write."""
        decoder.messenger.check()
        decoder.pool.look()
        pages, statistics = decoder.pool.statistics(), decoder.messenger.statistics()
        lingers = self.network.revocation == "when let go"
        if not lingers or not any(prefiller.hung and not prefiller.dead for prefiller in self.prefillers):
            assert statistics.num_revoking == 0, f"access leaks: {decoder.messenger!r}"
        assert statistics.num_open == statistics.num_revoking, f"open tickets: {decoder.messenger!r}"
        quarantined = statistics.num_quarantined_pages
        assert (pages.num_held, pages.num_quarantined) == (0, quarantined), f"pages leak: {pages}"
        assert bool(quarantined) == bool(statistics.num_revoking), f"pages leak: {decoder.messenger!r}"

    def check_prefiller(self, prefiller: PrefillerProcess) -> None:
        """Source pages are back, but for those that a decoder which still hangs may yet read."""
        prefiller.messenger.check()
        prefiller.pool.look()
        statistics = prefiller.messenger.statistics()
        if not any(decoder.hung for decoder in self.decoders):
            assert statistics.num_tickets == 0, f"tickets leak: {prefiller.messenger!r}"
            assert prefiller.pool.statistics().num_held == 0, f"pages leak: {prefiller.pool!r}"
        assert statistics.num_leased_tokens == 0, f"leases leak: {prefiller.messenger!r}"


def run_history(seed: int, num_moves: int = 250) -> History:
    history = History(seed)
    history.run(num_moves)
    history.check()
    return history
