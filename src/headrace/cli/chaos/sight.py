"""How a deployment stands, as its gateway tells an operator, looked at often.

Owns the operator's connection and the one thread that waits at it, so that the loop that asks and reads goes on. A
gateway that is dead or stopped is not seen: None.
"""

import asyncio
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

from headrace.cli.chaos.memory import Landings
from headrace.cli.chaos.states import Search, Sighting, State
from headrace.cli.operator import NoAnswer, Operator
from headrace.protocol.messages import FabricRole, Uuid
from headrace.protocol.operator import Deployment

LOOK_EVERY_S = 0.003


class Sight:
    """Of the gateway at that control socket."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._thread = ThreadPoolExecutor(1, "sight")
        self._operator: Operator | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.submit(self._close).result()
        self._thread.shutdown()

    async def look(self) -> Deployment | None:
        """None: the gateway does not answer."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._look)

    async def watch(self, state: State, lengths: Collection[int], within_s: float) -> Sighting | None:
        """The first request with a prompt of one of these lengths that is seen in that state. None: none was, before
        they had gone further or in that time."""
        with Landings() as landings:
            search, until = Search(state, lengths, landings.has_landed), time.monotonic() + within_s
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._search, search, until)

    async def change_role(self, instance: Uuid, role: FabricRole) -> str:
        """Have it drained, and come back as that. -> the name that it comes back with. Raises InputError, NoAnswer."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._change_role, instance, role)

    # ---- on the thread -----------------------------------------------------------------------------------------

    def _look(self) -> Deployment | None:
        if self._operator is None:
            self._operator = Operator(self._endpoint)
        try:
            return self._operator.inspect()
        except NoAnswer:
            self._close()  # whatever it still answers is no answer to the next question
            return None

    def _change_role(self, instance: Uuid, role: FabricRole) -> str:
        if self._operator is None:
            self._operator = Operator(self._endpoint)
        leaves = self._operator.dismiss(instance, role, tpot_s=None, max_stall_s=None, is_forced=False)
        assert leaves.successor is not None, "one that changes its role comes back"
        return leaves.successor

    def _search(self, search: Search, until: float) -> Sighting | None:
        while time.monotonic() < until and not search.is_vain:
            deployment = self._look()
            found = None if deployment is None else search.found_in(deployment, time.monotonic())
            if found is not None:
                return found
            time.sleep(LOOK_EVERY_S)
        return None

    def _close(self) -> None:
        if self._operator is not None:
            self._operator.close()
            self._operator = None
