"""A gateway's control socket that answers operators as a test says, on a thread of its own."""

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
import zmq

from headrace.protocol.control import Limits, Role, Status, encode_control
from headrace.protocol.operator import (
    Deployment,
    GatewayFacts,
    InstanceFacts,
    OperatorAnswer,
    OperatorMessage,
    RequestFacts,
    decode_at_gateway,
)

GATEWAY = "a" * 32


def instance(number: int, role: Role, name: str, **changes: object) -> InstanceFacts:
    uuid = f"{number:032x}"
    status = Status(
        sender=uuid,
        num_free_pages=1234,
        num_running=3,
        num_waiting=0,
        num_queued_tokens=0,
        num_interactive_tokens=0,
        prefilling=None,
        decoding=None,
        is_draining=False,
        gauges={},
        counters={},
    )
    facts = InstanceFacts(
        uuid=uuid,
        name=name,
        role=role,
        standing="serving",
        refusal="",
        silent_s=0.1,
        host="here",
        pid=40 + number,
        started=1,
        fabric_address=b"",
        limits=Limits(max_model_len=512, pool_tokens=1024, page_size=16, max_running=64),
        tp=1,
        dp=1,
        status=status,
    )
    return msgspec.structs.replace(facts, **changes)


def deployment(*instances: InstanceFacts, requests: tuple[RequestFacts, ...] = ()) -> Deployment:
    return Deployment(
        sender=GATEWAY,
        gateway=GatewayFacts(uuid=GATEWAY, name="gateway", model="tiny", url="http://127.0.0.1:8000", pid=39),
        instances=instances,
        requests=requests,
        num_requests=len(requests),
    )


class AnsweringGateway:
    """`answer` returning None: it keeps silent. `heard` keeps what was asked."""

    def __init__(self, folder: Path, answer: Callable[[OperatorMessage], OperatorAnswer | None]) -> None:
        self.control = f"ipc://{folder}/control.sock"
        self.heard: list[OperatorMessage] = []
        self._answer = answer
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(self.control)
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over = True
        self._thread.join()
        self._context.destroy(linger=0)

    _is_over = False

    def _run(self) -> None:
        while not self._is_over:
            if self._socket.poll(20):
                with suppress(zmq.Again):
                    identity, wire = self._socket.recv_multipart(zmq.NOBLOCK)
                    message = decode_at_gateway(wire)
                    self.heard.append(message)  # type: ignore[arg-type]
                    answer = self._answer(message)  # type: ignore[arg-type]
                    if answer is not None:
                        self._socket.send_multipart([identity, encode_control(answer)])
