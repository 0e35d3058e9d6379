"""A dispatch side that does as it is told: every Generation is answered by the steps of a script."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable

from headrace.gateway.generation import FinishReason, Generation, Progress
from headrace.protocol.control import Limits

Step = Progress | Exception | asyncio.Event  # given, raised, waited for
Script = Callable[[Generation], Iterable[Step]]

LIMITS = Limits(max_model_len=512, pool_tokens=4096, page_size=16, max_running=8)


def tokens(token_ids: Iterable[int], reason: FinishReason = "stop", *, cached_tokens: int = 0) -> list[Step]:
    """One by one, then the end. A stop token is counted, and is not among them."""
    ids = list(token_ids)
    num_tokens = len(ids) + (reason == "stop")
    end = Progress(token_ids=(), finish_reason=reason, num_tokens=num_tokens, cached_tokens=cached_tokens)
    return [*(Progress(token_ids=(token_id,), cached_tokens=cached_tokens) for token_id in ids), end]


class ScriptedDispatch:
    """`asked` keeps every Generation, `running` those under way, `aborted` those that were closed before their end."""

    def __init__(self, script: Script, limits: Limits | None = LIMITS, *, ready: bool = True) -> None:
        self.script = script
        self.told_limits = limits
        self.ready = ready
        self.asked: list[Generation] = []
        self.running: set[str] = set()
        self.aborted: list[str] = []
        self._streams: list[AsyncGenerator[Progress, None]] = []  # kept: nobody's garbage collection closes them

    def limits(self) -> Limits | None:
        return self.told_limits

    def is_ready(self) -> bool:
        return self.ready

    def generate(self, generation: Generation) -> AsyncGenerator[Progress, None]:
        self._streams.append(self._follow_script(generation))
        return self._streams[-1]

    async def _follow_script(self, generation: Generation) -> AsyncGenerator[Progress, None]:
        self.asked.append(generation)
        self.running.add(generation.request_id)
        aborted = True
        try:
            for step in self.script(generation):
                if isinstance(step, Exception):
                    aborted = False
                    raise step
                if isinstance(step, asyncio.Event):
                    await step.wait()
                else:
                    # The end of the script is the end of the life: closing it later is no abort.
                    aborted = step.finish_reason is None
                    yield step
        finally:
            self.running.discard(generation.request_id)
            if aborted:
                self.aborted.append(generation.request_id)
