"""A gateway as instances see it: a real ROUTER socket that says what a test tells it, and keeps what it hears."""

import asyncio
import itertools
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import zmq
import zmq.asyncio

from headrace.protocol.control import (
    Abort,
    Accepted,
    Announce,
    Beat,
    Finished,
    GatewayMessage,
    Generate,
    Goodbye,
    Granted,
    InstanceMessage,
    NeedPrefill,
    NoRoom,
    PrefillerAddress,
    Prefillers,
    PrefillFrom,
    Rejected,
    Reserve,
    Sampling,
    Status,
    Tokens,
    UsePrefiller,
    decode_from_instance,
    encode_control,
)
from headrace.protocol.messages import Tier

Heard = TypeVar("Heard", bound=InstanceMessage)
BEAT_S = 0.1
GREEDY = Sampling()

_numbers = itertools.count()


async def until(holds: Callable[[], bool], what: str, within_s: float = 8.0) -> None:
    end = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < end, f"not within {within_s} s: {what}"
        await asyncio.sleep(0.002)


@dataclass
class Asked:
    """One Generate, and all that was said about it."""

    gateway: "ScriptedGateway"
    decoder: str
    request_id: str
    heard: list[InstanceMessage] = field(default_factory=list)

    def of(self, kind: type[Heard]) -> list[Heard]:
        return [message for message in self.heard if isinstance(message, kind)]

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Each Tokens begins where the one before it ended."""
        token_ids: tuple[int, ...] = ()
        for tokens in self.of(Tokens):
            assert tokens.index == len(token_ids)
            token_ids += tokens.token_ids
        return token_ids

    async def wait(self, kind: type[Heard], count: int = 1) -> Heard:
        await until(lambda: len(self.of(kind)) >= count, f"{count} {kind.__name__} for {self.request_id}: {self.heard}")
        return self.of(kind)[count - 1]

    async def finished(self) -> Finished:
        """The last word, and the only one."""
        finished = await self.wait(Finished)
        assert self.heard[-1] is finished
        return finished

    async def text(self) -> tuple[int, ...]:
        finished = await self.finished()
        assert finished.reason == "length", finished
        assert finished.num_tokens == len(self.token_ids)
        return self.token_ids

    def abort(self) -> None:
        self.gateway.say(self.decoder, Abort(sender=self.gateway.uuid, request_id=self.request_id))

    def use(self, prefill: PrefillFrom | None) -> None:
        """The answer to NeedPrefill."""
        answer = UsePrefiller(sender=self.gateway.uuid, request_id=self.request_id, prefill=prefill)
        self.gateway.say(self.decoder, answer)


class ScriptedGateway:
    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.uuid = secrets.token_hex(16)
        self.heard: list[InstanceMessage] = []
        self.announced: dict[str, Announce] = {}
        self.status: dict[str, Status] = {}
        self.said_goodbye: set[str] = set()
        self.is_silent = False
        self._of_request: dict[str, list[InstanceMessage]] = defaultdict(list)
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.bind(endpoint)
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._beat())]

    async def close(self) -> None:
        """Idempotent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.close(0)
        self._context.term()

    async def _listen(self) -> None:
        while True:
            identity, wire = await self._socket.recv_multipart()
            message = decode_from_instance(wire)
            assert identity.decode() == message.sender
            self.heard.append(message)
            match message:
                case Announce():
                    self.announced[message.sender] = message
                    self.say(message.sender, Beat(sender=self.uuid))
                case Status():
                    self.status[message.sender] = message
                    if message.sender not in self.announced:  # it knows another gateway, before this one, here
                        self.say(message.sender, Beat(sender=self.uuid))
                case Goodbye():
                    self.said_goodbye.add(message.sender)
                case _:
                    self._of_request[message.request_id].append(message)

    async def _beat(self) -> None:
        while True:
            if not self.is_silent:
                for uuid in self.announced:
                    self.say(uuid, Beat(sender=self.uuid))
            await asyncio.sleep(BEAT_S)

    def say(self, uuid: str, message: GatewayMessage) -> None:
        self.say_bytes(uuid, encode_control(message))

    def say_bytes(self, uuid: str, wire: bytes) -> None:
        self._socket.send_multipart([uuid.encode(), wire])

    # ---- what it says ------------------------------------------------------------------------------------------

    def name_prefillers(self, decoder: str, *prefillers: str, addresses: Sequence[bytes] | None = None) -> None:
        """Those that have announced themselves, or at any address."""
        found = addresses or [self.announced[uuid].fabric_address for uuid in prefillers]
        named = tuple(
            PrefillerAddress(uuid=uuid, fabric_address=address) for uuid, address in zip(prefillers, found, strict=True)
        )
        self.say(decoder, Prefillers(sender=self.uuid, prefillers=named))

    async def lease(self, prefiller: str, request_id: str, num_tokens: int, tier: Tier = "interactive") -> PrefillFrom:
        reserve = Reserve(sender=self.uuid, request_id=request_id, num_tokens=num_tokens, tier=tier, remaining_s=30.0)
        answers = self._of_request[request_id]
        while True:
            self.say(prefiller, reserve)
            await until(lambda: bool(answers), f"an answer about a lease for {request_id}")
            answer = answers.pop()
            if isinstance(answer, Granted):
                return PrefillFrom(prefiller=prefiller, lease=answer.lease)
            await asyncio.sleep(0.02)

    def generate(
        self,
        decoder: str,
        token_ids: Sequence[int],
        max_tokens: int,
        *,
        request_id: str | None = None,
        prefill: PrefillFrom | None = None,
        sampling: Sampling = GREEDY,
        tier: Tier = "interactive",
        remaining_s: float = 60.0,
        stop_token_ids: tuple[int, ...] = (),
    ) -> Asked:
        request_id = request_id or f"request-{next(_numbers)}"
        message = Generate(
            sender=self.uuid,
            request_id=request_id,
            token_ids=tuple(token_ids),
            num_prompt_tokens=len(token_ids),
            max_tokens=max_tokens,
            sampling=sampling,
            stop_token_ids=stop_token_ids,
            prefill=prefill,
            tier=tier,
            remaining_s=remaining_s,
        )
        self.say(decoder, message)
        return Asked(self, decoder, request_id, self._of_request[request_id])

    async def generate_remotely(
        self, decoder: str, prefiller: str, token_ids: Sequence[int], max_tokens: int, sampling: Sampling = GREEDY
    ) -> Asked:
        request_id = f"request-{next(_numbers)}"
        lease = await self.lease(prefiller, request_id, len(token_ids))
        return self.generate(decoder, token_ids, max_tokens, request_id=request_id, prefill=lease, sampling=sampling)

    async def accepted(self, asked: Asked, count: int = 1) -> bool:
        """-> whether its lease is used."""
        await until(
            lambda: len(asked.of(Accepted)) >= count or bool(asked.of(NoRoom)) or bool(asked.of(Rejected)), "an answer"
        )
        assert len(asked.of(Accepted)) == count, asked.heard
        return asked.of(Accepted)[-1].uses_lease

    async def parked(self, asked: Asked, count: int = 1) -> NeedPrefill:
        return await asked.wait(NeedPrefill, count)
