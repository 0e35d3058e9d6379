"""Prefillers and decoders that follow a script: control messages over real ZeroMQ sockets, no model, no fabric.

They run as tasks of the test's loop. A script's faults are attributes, so that a test may change them on the way.
Tokens are a function of their position, so that a stream that was resumed elsewhere must read like one that was not.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import wraps
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar

import zmq
import zmq.asyncio

from headrace.protocol.control import (
    CONTROL_VERSION,
    Abort,
    Accepted,
    Announce,
    Beat,
    Decoding,
    Drain,
    Finished,
    FinishReason,
    GatewayMessage,
    Generate,
    Goodbye,
    Granted,
    InstanceMessage,
    Limits,
    NeedPrefill,
    NoRoom,
    Prefilled,
    PrefillFrom,
    Prefilling,
    Rejected,
    Reserve,
    ReturnLease,
    Role,
    Status,
    Tokens,
    UsePrefiller,
    Wait,
    Waterfall,
    decode_from_gateway,
    encode_control,
)

MODEL = "tiny"
LIMITS = Limits(max_model_len=512, pool_tokens=1024, page_size=16, max_running=64)

Arguments = ParamSpec("Arguments")
Heard = TypeVar("Heard", bound=GatewayMessage)

_serial = itertools.count(1)


def on_loop(test: Callable[Arguments, Coroutine[Any, Any, None]]) -> Callable[Arguments, None]:
    """The test runs on a loop of its own, and not for ever."""

    @wraps(test)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 30))

    return run


def token_at(position: int) -> int:
    return 1000 + position


def tokens_after(num_prompt_tokens: int, num_tokens: int) -> list[int]:
    return [token_at(num_prompt_tokens + nth) for nth in range(num_tokens)]


def announce(role: Role, uuid: str, **changes: object) -> Announce:
    told: dict[str, object] = {
        "sender": uuid,
        "role": role,
        "version": CONTROL_VERSION,
        "name": f"{role}-{uuid[-4:]}",
        "model": MODEL,
        "fingerprint": "f",
        "limits": LIMITS,
        "tp": 1,
        "dp": 1,
        "fabric_address": b"fabric" if role == "prefiller" else b"",
        "host": "here",
        "pid": 1,
        "started": 0,
    }
    return Announce(**(told | changes))  # type: ignore[arg-type]


def status(
    uuid: str,
    *,
    num_free_pages: int = 64,
    num_running: int = 0,
    num_queued_tokens: int = 0,
    num_background_tokens: int = 0,
    prefill_rate: float | None = None,
    decoding: Decoding | None = None,
    is_draining: bool = False,
) -> Status:
    return Status(
        sender=uuid,
        num_free_pages=num_free_pages,
        num_running=num_running,
        num_waiting=0,
        num_queued_tokens=num_queued_tokens,
        num_interactive_tokens=num_queued_tokens - num_background_tokens,
        prefilling=None if prefill_rate is None else Prefilling(step_s=0.0, rate=prefill_rate, chunk_tokens=64),
        decoding=decoding,
        is_draining=is_draining,
        gauges={"pages.held": 3.0},
        counters={"steps_total": 7.0},
    )


class ScriptedInstance:
    """Announces itself (again to a gateway that it did not know), beats, and notes what it hears."""

    def __init__(self, endpoint: str, role: Role, *, status_s: float = 0.05, **changes: object) -> None:
        self.uuid = f"{next(_serial):032x}"
        self.announce = announce(role, self.uuid, **changes)
        self.heard: list[GatewayMessage] = []
        self.is_hung = False  # reads nothing, says nothing
        self.prefill_rate: float | None = None  # at which it prefills, it says
        self.num_queued_tokens = 0  # to be prefilled, it says
        self.is_draining = False
        self.num_background_tokens = 0  # those of them that are flex
        self._status_s = status_s
        self._gateways: set[str] = set()
        self._endpoint = endpoint
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.ROUTING_ID, self.uuid.encode())
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 20)
        self._socket.connect(self._endpoint)
        self.say(self.announce)
        self.start(self._receive())
        self.start(self._beat())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.die()

    async def die(self) -> None:
        """As by a signal: no word, the connection breaks. What a task of it raised is raised here."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        self._context.destroy(linger=0)
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def leave(self) -> None:
        self.say(Goodbye(sender=self.uuid))
        await asyncio.sleep(0.02)
        await self.die()

    def start(self, coroutine: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        return task

    def say(self, message: InstanceMessage) -> None:
        self.say_bytes(encode_control(message))

    def say_bytes(self, wire: bytes) -> None:
        # Sent at once, or (the gateway is gone) never: what a test says afterwards goes to nobody.
        with suppress(zmq.Again):
            sent = self._socket.send(wire, zmq.DONTWAIT)
            assert isinstance(sent, asyncio.Future)
            sent.result()

    def all_heard(self, kind: type[Heard]) -> list[Heard]:
        return [message for message in self.heard if isinstance(message, kind)]

    async def hears(self, kind: type[Heard], count: int = 1) -> Heard:
        """-> the count-th message of this kind, once it came."""
        await until(lambda: len(self.all_heard(kind)) >= count, f"{self.announce.name} hears {kind.__name__}")
        return self.all_heard(kind)[count - 1]

    def status(self) -> Status:
        return status(
            self.uuid,
            num_queued_tokens=self.num_queued_tokens,
            num_background_tokens=self.num_background_tokens,
            prefill_rate=self.prefill_rate,
            is_draining=self.is_draining,
        )

    def drain(self) -> None:
        """From now on nothing new, it says; what is asked all the same is refused."""
        self.is_draining = True
        self.say(self.status())

    def hear(self, message: GatewayMessage) -> None:
        """What a subclass answers."""

    async def _receive(self) -> None:
        while True:
            message = decode_from_gateway(await self._socket.recv())
            while self.is_hung:
                await asyncio.sleep(0.01)
            if message.sender not in self._gateways:
                self._gateways.add(message.sender)
                self.say(self.announce)
            if not isinstance(message, Beat) or not self.all_heard(Beat):
                self.heard.append(message)
            if isinstance(message, Drain):
                self.drain()
            self.hear(message)

    async def _beat(self) -> None:
        while True:
            if not self.is_hung:
                self.say(self.status())
            await asyncio.sleep(self._status_s)


class ScriptedPrefiller(ScriptedInstance):
    """Grants what it is asked for, and keeps the books: every lease ends used, returned or expired."""

    def __init__(self, endpoint: str, *, max_leases: int = 1000, status_s: float = 0.05, **changes: object) -> None:
        super().__init__(endpoint, "prefiller", status_s=status_s, **changes)
        self.max_leases = max_leases  # out and not used, at a time
        self.num_waits = 0  # says Wait so often first
        self.is_mute = False  # beats, and answers nothing
        self.tells_prefilled = True
        self.grant_delay_s = 0.0
        self.granted: dict[str, str] = {}  # lease -> request
        self.returned: list[str] = []
        self.used: list[str] = []

    @property
    def open_leases(self) -> set[str]:
        return self.granted.keys() - set(self.returned) - set(self.used)

    def hear(self, message: GatewayMessage) -> None:
        match message:
            case Reserve() if not self.is_mute:
                self.start(self._answer(message))
            case ReturnLease():
                assert message.lease in self.granted, "a lease came back that was never granted"
                self.returned.append(message.lease)

    async def _answer(self, reserve: Reserve) -> None:
        if self.grant_delay_s:
            await asyncio.sleep(self.grant_delay_s)
        if self.is_draining or self.num_waits > 0 or len(self.open_leases) >= self.max_leases:
            self.num_waits -= 1
            self.say(Wait(sender=self.uuid, request_id=reserve.request_id, num_queued_tokens=0))
            return
        lease = f"{len(self.granted) + 1}"
        self.granted[lease] = reserve.request_id
        self.say(Granted(sender=self.uuid, request_id=reserve.request_id, lease=lease))

    def use(self, lease: str, request_id: str) -> bool:
        """A decoder's Prefill. False where the lease has ended: returned, or never granted."""
        if lease not in self.open_leases:
            return False
        assert self.granted[lease] == request_id, "a lease of another request"
        self.used.append(lease)
        if self.tells_prefilled:
            self.say_prefilled(request_id)
        return True

    def say_prefilled(self, request_id: str) -> None:
        self.say(Prefilled(sender=self.uuid, request_id=request_id, num_computed=1, queue_s=0.001, prefill_s=0.002))


class ScriptedDecoder(ScriptedInstance):
    """Runs what it is given, `max_running` at a time. `prefillers` are asked for the KV, by their uuids."""

    def __init__(
        self,
        endpoint: str,
        *prefillers: ScriptedPrefiller,
        role: Role = "decoder",
        status_s: float = 0.05,
        **changes: object,
    ) -> None:
        super().__init__(endpoint, role, status_s=status_s, **changes)
        self.prefillers = {prefiller.uuid: prefiller for prefiller in prefillers}
        self.max_running = 64
        self.num_no_rooms = 0  # says NoRoom so often first
        self.hit_tokens = 0  # of any prompt, it says
        self.is_mute = False  # beats, and answers nothing
        self.is_stalled = False  # accepts, then says nothing
        self.accept_delay_s = 0.0
        self.token_s = 0.0  # between two tokens
        self.row_s: float | None = None  # of a decode step, it says
        self.rejects: tuple[str, str] | None = None
        self.uses_leases = True
        self.num_failing_tickets = 0
        self.fails_by_faults = False
        self.repeats = False  # says all Tokens twice, and the first ones again with every one
        self.skips: int | None = None  # the index of a token that is never sent
        self.stops_after: int | None = None  # with a stop token
        self.ends_with: tuple[FinishReason, str] | None = None
        self.before_token: Callable[[Generate, int], None] = lambda generate, index: None
        self.running: dict[str, asyncio.Task[None]] = {}
        self.counts: Counter[str] = Counter()

    def status(self) -> Status:
        return status(
            self.uuid,
            num_free_pages=64 - len(self.running),
            num_running=len(self.running),
            num_queued_tokens=self.num_queued_tokens,
            num_background_tokens=self.num_background_tokens,
            prefill_rate=self.prefill_rate,
            is_draining=self.is_draining,
            decoding=self.decoding(),
        )

    def decoding(self) -> Decoding | None:
        """What it says of its decode steps: `row_s` for each that runs."""
        if self.row_s is None:
            return None
        generates = [generate for generate in self.all_heard(Generate) if generate.request_id in self.running]
        return Decoding(
            step_s=0.0,
            row_s=self.row_s,
            key_s=0.0,
            num_rows=len(generates),
            num_keys=sum(len(generate.token_ids) for generate in generates),
            num_interactive=sum(generate.tier == "interactive" for generate in generates),
        )

    def hear(self, message: GatewayMessage) -> None:
        match message:
            case Generate() if not self.is_mute:
                self._on_generate(message)
            case Abort():
                task = self.running.pop(message.request_id, None)
                if task is not None:
                    task.cancel()
                    self.counts["aborted"] += 1
                    self._finish(message.request_id, "abort", 0)

    def _on_generate(self, generate: Generate) -> None:
        request_id = generate.request_id
        assert request_id not in self.running, "the same request twice"
        if self.rejects is not None:
            field, text = self.rejects
            self.say(Rejected(sender=self.uuid, request_id=request_id, field=field, text=text))
        elif self.is_draining or self.num_no_rooms > 0 or len(self.running) >= self.max_running:
            self.num_no_rooms -= 1
            self.say(NoRoom(sender=self.uuid, request_id=request_id, num_free_pages=0))
        else:
            self.counts["accepted"] += 1
            self.running[request_id] = self.start(self._run(generate))

    async def _run(self, generate: Generate) -> None:
        if self.accept_delay_s:
            await asyncio.sleep(self.accept_delay_s)
        uses_lease = self._use(generate.prefill, generate.request_id)
        self.say(
            Accepted(
                sender=self.uuid,
                request_id=generate.request_id,
                uses_lease=uses_lease,
                cached_tokens=self.hit_tokens,
            )
        )
        while self.num_failing_tickets > 0 and generate.prefill is not None:
            self.num_failing_tickets -= 1
            await self._need_prefill(generate)
        while self.is_stalled:
            await asyncio.sleep(0.01)
        await self._generate(generate)
        self.running.pop(generate.request_id, None)

    def _use(self, prefill: PrefillFrom | None, request_id: str) -> bool:
        if prefill is None or not self.uses_leases:
            return False
        prefiller = self.prefillers.get(prefill.prefiller)
        return prefiller is not None and prefiller.use(prefill.lease, request_id)

    async def _need_prefill(self, generate: Generate) -> None:
        assert generate.prefill is not None
        before = len(self.answers(generate.request_id))
        need = NeedPrefill(
            sender=self.uuid,
            request_id=generate.request_id,
            prefiller=generate.prefill.prefiller,
            reason="scripted",
            is_fault=self.fails_by_faults,
        )
        self.say(need)
        deadline = asyncio.get_running_loop().time() + 0.2
        while len(self.answers(generate.request_id)) == before and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.005)
        answers = self.answers(generate.request_id)[before:]
        self.counts["need answered" if answers else "need unanswered"] += 1
        if answers and answers[0].prefill is not None:
            uses_lease = self._use(answers[0].prefill, generate.request_id)
            self.say(
                Accepted(
                    sender=self.uuid,
                    request_id=generate.request_id,
                    uses_lease=uses_lease,
                    cached_tokens=self.hit_tokens,
                )
            )

    def answers(self, request_id: str) -> list[UsePrefiller]:
        return [answer for answer in self.all_heard(UsePrefiller) if answer.request_id == request_id]

    async def _generate(self, generate: Generate) -> None:
        begin = len(generate.token_ids)
        num_tokens = generate.max_tokens
        if self.stops_after is not None:
            num_tokens = min(num_tokens, max(0, self.stops_after - (begin - generate.num_prompt_tokens)))
        for index in range(num_tokens):
            self.before_token(generate, index)
            if self.token_s:
                await asyncio.sleep(self.token_s)
            if index != self.skips:
                self._say_tokens(generate.request_id, begin, index)
        if self.ends_with is not None:
            self._finish(generate.request_id, self.ends_with[0], num_tokens, self.ends_with[1])
        elif num_tokens < generate.max_tokens:
            self._finish(generate.request_id, "stop", num_tokens + 1)
        else:
            self._finish(generate.request_id, "length", num_tokens)

    def _say_tokens(self, request_id: str, begin: int, index: int) -> None:
        tokens = Tokens(
            sender=self.uuid, request_id=request_id, index=index, token_ids=(token_at(begin + index),), cached_tokens=2
        )
        self.say(tokens)
        if self.repeats:
            self.say(tokens)
            all_of_them = tuple(tokens_after(begin, index + 1))
            self.say(Tokens(sender=self.uuid, request_id=request_id, index=0, token_ids=all_of_them, cached_tokens=2))

    def _finish(self, request_id: str, reason: FinishReason, num_tokens: int, text: str = "") -> None:
        waterfall = Waterfall(fetch_s=0.005, hand_over_s=0.001, first_step_s=0.01)
        finished = Finished(
            sender=self.uuid,
            request_id=request_id,
            reason=reason,
            text=text,
            num_tokens=num_tokens,
            cached_tokens=2,
            waterfall=waterfall,
        )
        self.say(finished)


async def until(condition: Callable[[], bool], what: str = "", *, within_s: float = 5.0) -> None:
    """Looks at it every few milliseconds."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within_s
    while not condition():
        assert loop.time() < deadline, f"not within {within_s} s: {what}"
        await asyncio.sleep(0.003)
