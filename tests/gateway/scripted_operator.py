"""An operator at the control socket of a dispatcher, on the test's loop."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import zmq
import zmq.asyncio
from gateway_fleet import Fleet

from headrace.protocol.control import CONTROL_VERSION, encode_control
from headrace.protocol.messages import FabricRole
from headrace.protocol.operator import (
    Deployment,
    Dismiss,
    Inspect,
    OperatorAnswer,
    OperatorMessage,
    Standing,
    decode_at_operator,
)

OPERATOR = "f" * 32


@dataclass(frozen=True)
class ScriptedOperator:
    socket: zmq.asyncio.Socket

    async def ask(self, message: OperatorMessage) -> OperatorAnswer:
        await self.socket.send(encode_control(message))
        return decode_at_operator(await asyncio.wait_for(self.socket.recv(), 2.0))

    async def deployment(self) -> Deployment:
        answer = await self.ask(Inspect(sender=OPERATOR, version=CONTROL_VERSION))
        assert isinstance(answer, Deployment)
        return answer

    async def standings(self) -> dict[str, Standing]:
        return {facts.uuid: facts.standing for facts in (await self.deployment()).instances}

    async def dismiss(
        self, instance: str, role: FabricRole | None = None, *, tpot_s: float | None = None, is_forced: bool = False
    ) -> OperatorAnswer:
        message = Dismiss(
            sender=OPERATOR, instance=instance, role=role, tpot_s=tpot_s, max_stall_s=None, is_forced=is_forced
        )
        return await self.ask(message)


@asynccontextmanager
async def operator_of(around: Fleet) -> AsyncIterator[ScriptedOperator]:
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.ROUTING_ID, OPERATOR.encode())
    socket.connect(around.dispatcher.endpoint)
    try:
        yield ScriptedOperator(socket)
    finally:
        context.destroy(linger=0)
