"""A command of this user at a gateway's control socket: one question, one answer. Owns its socket; blocks.

Whatever does not answer in time is one error that says where it was looked for.
"""

import time
import uuid
from types import TracebackType
from typing import Self, TypeVar

import zmq

from headrace.errors import HeadraceError, InputError
from headrace.protocol.control import CONTROL_VERSION, MAX_MESSAGE_BYTES, encode_control
from headrace.protocol.messages import FabricRole, Uuid
from headrace.protocol.operator import (
    Deployment,
    Dismiss,
    Inspect,
    Leaves,
    OperatorAnswer,
    OperatorMessage,
    Refused,
    decode_at_operator,
)

ANSWER_WITHIN_S = 1.8
"""With the start of the command, two seconds until a person knows."""

Wanted = TypeVar("Wanted", bound=OperatorAnswer)


class NoAnswer(HeadraceError):
    """No gateway answers there."""


class Operator:
    """Of the gateway whose control socket is `endpoint`."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self.uuid = uuid.uuid4().hex
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.ROUTING_ID, self.uuid.encode())
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IPV6, 1)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise InputError("control", f"must be a ZeroMQ endpoint, is {endpoint!r} ({error})") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._context.destroy()

    def inspect(self) -> Deployment:
        """Raises NoAnswer, InputError (another version)."""
        return self.ask(Inspect(sender=self.uuid, version=CONTROL_VERSION), Deployment)

    def dismiss(
        self,
        instance: Uuid,
        role: FabricRole | None,
        *,
        tpot_s: float | None,
        max_stall_s: float | None,
        is_forced: bool,
    ) -> Leaves:
        """Have it leave, or (`role`) come back as another. Raises NoAnswer, and InputError where it is refused."""
        message = Dismiss(
            sender=self.uuid,
            instance=instance,
            role=role,
            tpot_s=tpot_s,
            max_stall_s=max_stall_s,
            is_forced=is_forced,
        )
        return self.ask(message, Leaves)

    def ask(self, message: OperatorMessage, kind: type[Wanted]) -> Wanted:
        """-> the answer. Raises NoAnswer, and InputError where it is refused."""
        deadline = time.monotonic() + ANSWER_WITHIN_S
        self._wait(zmq.POLLOUT, deadline)
        self._socket.send(encode_control(message))
        self._wait(zmq.POLLIN, deadline)
        answer = decode_at_operator(self._socket.recv())
        if isinstance(answer, Refused):
            raise InputError(answer.field, answer.text)
        assert isinstance(answer, kind), f"{message!r} was answered with a {type(answer).__name__}"
        return answer

    def _wait(self, event: int, deadline: float) -> None:
        if not self._socket.poll(int(max(0.0, deadline - time.monotonic()) * 1e3), event):
            raise NoAnswer(f"no gateway answers at {self._endpoint}")

    def __repr__(self) -> str:
        return f"Operator({self._endpoint})"
