"""Requests that come all the while at a deployment, each compared with what it is to write; nothing may go wrong."""

import asyncio
import random
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from served import Completion, Served, as_completion

Prompt = tuple[int, ...]


class Load:
    """`at_once` requests at any time, for any of `right`: prompts and their texts. Ends with the `with`, which raises
    what went wrong."""

    def __init__(self, served: Served, right: dict[Prompt, Sequence[int]], *, at_once: int) -> None:
        self.num_done = 0
        self.wrong: list[str] = []
        self._served = served
        self._right = right
        self._at_once = at_once
        self._is_over = False
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over = True
        self._thread.join(60)
        assert not self._thread.is_alive(), "requests do not end"
        assert kind is not None or self.wrong == [], self.wrong[:3]

    async def _run(self) -> None:
        async with self._served.async_client() as client:
            rng = random.Random(7)

            async def one_after_the_other() -> None:
                while not self._is_over:
                    prompt = rng.choice(list(self._right))
                    expected = self._right[prompt]
                    try:
                        request = self._served.request(prompt, len(expected))
                        told = as_completion(await client.completions.create(**request))
                    except Exception as error:  # noqa: BLE001 (whatever it is, it is what went wrong)
                        self.wrong.append(repr(error))
                        return
                    if told.token_ids != tuple(expected):
                        self.wrong.append(f"{told.token_ids} and not {tuple(expected)}")
                    self.num_done += 1

            await asyncio.gather(*(one_after_the_other() for _ in range(self._at_once)))

    def wait_for_more(self, number: int, holds: Callable[[], bool] = lambda: True) -> None:
        """So many more are answered, and then `holds`."""
        enough = self.num_done + number
        self._served.wait_until(lambda: bool(self.wrong) or (self.num_done >= enough and holds()), "answers come", 30)
        assert self.wrong == []


def right_texts(served: Served, prompts: Sequence[Prompt], num_tokens: int) -> dict[Prompt, Sequence[int]]:
    """As the deployment writes them when it is asked for one at a time."""
    texts: list[Completion] = served.complete_all(prompts, num_tokens, at_once=1)
    return {prompt: text.token_ids for prompt, text in zip(prompts, texts, strict=True)}
