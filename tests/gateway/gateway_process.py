"""A gateway's whole process with a dispatch side that is told how to behave. Run as a program:

MODEL_DIRECTORY DIRECTORY BEHAVIOUR -> serves on a free port, which it writes to DIRECTORY/port.
"""

import asyncio
import logging
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from types import TracebackType
from typing import Self

from scripted_dispatch import ScriptedDispatch

from headrace.gateway import server
from headrace.gateway.dispatch.metrics import GatewayMetrics
from headrace.gateway.generation import Generation, Progress
from headrace.gateway.options import GatewayOptions

MODEL = "mill"


class EndlessDispatch(ScriptedDispatch):
    """A token every 10 ms and no end; `floods`: as fast as the connection takes them; `fails` after the first."""

    def __init__(self, options: GatewayOptions) -> None:
        super().__init__(lambda _: ())
        self.metrics = GatewayMetrics()
        self._failed = asyncio.Event()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert not self.running, "the gateway left with requests under way"

    async def wait_failed(self) -> None:
        await self._failed.wait()
        raise RuntimeError("the dispatch side has failed")

    async def generate(self, generation: Generation) -> AsyncGenerator[Progress, None]:
        self.running.add(generation.request_id)
        try:
            while True:
                yield Progress(token_ids=(50,) * (1000 if BEHAVIOUR == "floods" else 1))
                await asyncio.sleep(0 if BEHAVIOUR == "floods" else 0.01)
                if BEHAVIOUR == "fails":
                    self._failed.set()
        finally:
            self.running.discard(generation.request_id)


if __name__ == "__main__":
    model_directory, directory, BEHAVIOUR = sys.argv[1:]
    logging.basicConfig(level=logging.INFO)
    if BEHAVIOUR != "real":
        server.Dispatcher = EndlessDispatch  # type: ignore
    url_of = server.url_of

    def tell_port(listener: server.socket.socket) -> str:
        (Path(directory) / "port.new").write_text(str(listener.getsockname()[1]))
        (Path(directory) / "port.new").rename(Path(directory) / "port")
        return url_of(listener)

    server.url_of = tell_port
    server.run_gateway(
        GatewayOptions(port=0, control=f"ipc://{directory}/control", tokenizer=Path(model_directory), model=MODEL)
    )
