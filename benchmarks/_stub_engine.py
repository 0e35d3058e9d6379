"""A prefiller and a decoder that compute nothing: they speak the control protocol, and answer at once.

Both run on the loop of whoever starts them, over plain ZeroMQ sockets, as cheaply as Python can: what is measured is
the gateway. The decoder sends what an engine sends: a Tokens message for each request and step.
"""

import asyncio
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import zmq

from headrace.protocol.control import (
    BEAT_S,
    CONTROL_VERSION,
    Accepted,
    Announce,
    Decoding,
    Finished,
    GatewayMessage,
    Generate,
    Goodbye,
    Granted,
    InstanceMessage,
    Limits,
    Prefilled,
    Prefilling,
    Reserve,
    Role,
    Status,
    Tokens,
    Waterfall,
    decode_from_gateway,
    encode_control,
)

LIMITS = Limits(max_model_len=4096, pool_tokens=2**22, page_size=16, max_running=4096)
PREFILLING = Prefilling(step_s=0.001, rate=1e6)
DECODING = Decoding(step_s=0.001, row_s=0.0, key_s=0.0, num_rows=0, num_keys=0, num_interactive=0)
TOLD = Waterfall(fetch_s=0.002, hand_over_s=0.0005, first_step_s=0.001)
ORDINARY = (300, 49_000)  # ids of the built-in model that stand for ordinary text
PREFILLER, DECODER = "a" * 32, "b" * 32


class StubInstance:
    """One of them: announces itself, beats, hands what it hears to `hear`."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", control: str, role: Role, uuid: str) -> None:
        self.uuid = uuid
        self.hear: Callable[[GatewayMessage], None] = lambda message: None
        self._role = role
        self._model = ""
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.ROUTING_ID, uuid.encode())
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.connect(control)

    def start(self, model: str) -> None:
        self._model = model
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self.drain)
        self.announce()
        self._beat()

    def stop(self) -> None:
        self.say(Goodbye(sender=self.uuid))
        self._beating.cancel()
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._socket.close(linger=200)

    def say(self, message: InstanceMessage) -> None:
        self._socket.send(encode_control(message))

    def drain(self) -> None:
        """Whatever is there. Due after whatever was sent, too: ZeroMQ's descriptor tells news once, to any call."""
        while self._socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            self.hear(decode_from_gateway(self._socket.recv()))

    def announce(self) -> None:
        self.say(
            Announce(
                sender=self.uuid,
                role=self._role,
                version=CONTROL_VERSION,
                name=self._role,
                model=self._model,
                fingerprint="stub",
                limits=LIMITS,
                tp=1,
                dp=1,
                fabric_address=b"nowhere" if self._role == "prefiller" else b"",
                host="here",
                pid=1,
                started=0,
            )
        )

    def _beat(self) -> None:
        self.say(
            Status(
                sender=self.uuid,
                num_free_pages=LIMITS.pool_tokens // LIMITS.page_size,
                num_running=0,
                num_waiting=0,
                num_queued_tokens=0,
                num_interactive_tokens=0,
                prefilling=PREFILLING if self._role == "prefiller" else None,
                decoding=DECODING if self._role == "decoder" else None,
                is_draining=False,
                gauges={},
                counters={},
            )
        )
        self._beating = asyncio.get_running_loop().call_later(BEAT_S, self._beat)
        self.drain()


@dataclass(slots=True)
class Running:
    """What the decoder still owes."""

    request_id: str
    num_tokens: int
    max_tokens: int


class StubEngine:
    """`with StubEngine(control, model) as engine:`, on a running loop. `step_s` is the time of a step; 0: all of a
    request's tokens at once."""

    def __init__(self, control: str, model: str) -> None:
        self.step_s = 0.0
        self._model = model
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._prefiller = StubInstance(self._context, control, "prefiller", PREFILLER)
        self._decoder = StubInstance(self._context, control, "decoder", DECODER)
        self._prefiller.hear, self._decoder.hear = self._reserve, self._generate
        self._leases = itertools.count()
        self._running: list[Running] = []
        self._next_step: asyncio.TimerHandle | None = None
        draw = random.Random(7)
        self._ids = [draw.randrange(*ORDINARY) for _ in range(4096)]

    def __enter__(self) -> Self:
        self._prefiller.start(self._model)
        self._decoder.start(self._model)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._next_step is not None:
            self._next_step.cancel()
        self._prefiller.stop()
        self._decoder.stop()
        self._context.term()

    def _reserve(self, message: GatewayMessage) -> None:
        if isinstance(message, Reserve):
            lease = str(next(self._leases))
            self._prefiller.say(Granted(sender=PREFILLER, request_id=message.request_id, lease=lease))

    def _generate(self, message: GatewayMessage) -> None:
        if not isinstance(message, Generate):
            return
        request_id, uses_lease = message.request_id, message.prefill is not None
        self._decoder.say(Accepted(sender=DECODER, request_id=request_id, uses_lease=uses_lease, cached_tokens=0))
        if uses_lease:
            num_computed = len(message.token_ids)
            self._prefiller.say(
                Prefilled(
                    sender=PREFILLER,
                    request_id=request_id,
                    num_computed=num_computed,
                    queue_s=0.0005,
                    prefill_s=0.001,
                )
            )
            self._prefiller.drain()
        running = Running(request_id, 0, message.max_tokens)
        if self.step_s:
            self._running.append(running)
            self._await_step()
        else:
            while self._next_token(running):
                pass

    def _await_step(self) -> None:
        if self._next_step is None:
            loop = asyncio.get_running_loop()
            self._next_step = loop.call_at(loop.time() + self.step_s, self._step, loop.time() + self.step_s)

    def _step(self, due: float) -> None:
        self._running = [one for one in self._running if self._next_token(one)]
        self._next_step = None
        if self._running:
            due += self.step_s
            self._next_step = asyncio.get_running_loop().call_at(due, self._step, due)
        self._decoder.drain()

    def _next_token(self, running: Running) -> bool:
        """False: that was the last."""
        index = running.num_tokens
        token_id = self._ids[(hash(running.request_id) + index) % len(self._ids)]
        self._decoder.say(
            Tokens(sender=DECODER, request_id=running.request_id, index=index, token_ids=(token_id,), cached_tokens=0)
        )
        running.num_tokens += 1
        if running.num_tokens < running.max_tokens:
            return True
        self._decoder.say(
            Finished(
                sender=DECODER,
                request_id=running.request_id,
                reason="length",
                text="",
                num_tokens=running.num_tokens,
                cached_tokens=0,
                waterfall=TOLD,
            )
        )
        return False
