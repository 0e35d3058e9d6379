"""A prefiller that dies or hangs while it sends: the stream goes on, with the right tokens, and the pair heals.

The real model in fp32. The right tokens are the oracle's.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from oracle import Oracle
from served import Completion, Served

pytestmark = [pytest.mark.serving, pytest.mark.timeout(300)]

LONG, SHORT, NUM_TOKENS = 1500, 400, 24
OPTIONS = ("--chunk-tokens", "128", "--kv-memory", "256MiB", "--dtype", "fp32")


@pytest.fixture(scope="module")
def prompts(licence_ids: list[int]) -> list[list[int]]:
    """None begins like another: what one test leaves in a prefix index is of no use to the next."""
    return [[5 + place, *licence_ids[begin : begin + LONG]] for place, begin in enumerate(range(0, 7 * 100, 100))]


@pytest.fixture(scope="module")
def served(smollm2: Path, transport: str) -> Iterator[Served]:
    with Served(smollm2, *OPTIONS, "--require-provider", transport, log_level="debug") as running:
        yield running


class Asking(threading.Thread):
    """One request under way."""

    def __init__(self, served: Served, prompt: Sequence[int]) -> None:
        super().__init__()
        self._served = served
        self._prompt = prompt
        self.answer: Completion | None = None
        self.start()

    def run(self) -> None:
        self.answer = self._served.complete(self._prompt, NUM_TOKENS)

    def result(self) -> Completion:
        self.join(90)
        assert self.answer is not None, "no answer"
        return self.answer


def wait_until_it_sends(served: Served) -> None:
    """Bytes are on their way, and not all of them are there."""
    sent = served.gauges()["prefiller-0", "fabric_writes_total"]

    def is_sending() -> bool:
        gauges = served.gauges()
        return gauges["prefiller-0", "fabric_writes_total"] > sent and gauges["decoder-0", "tickets_open"] == 1

    served.wait_until(is_sending, "it sends", within_s=20)


def wrong(oracle: Oracle, prompts: Sequence[Sequence[int]], texts: Sequence[Completion]) -> list[int]:
    """Places of the prompts whose texts are not the model's. All have wide margins."""
    outputs = [text.token_ids for text in texts]
    assert {len(output) for output in outputs} == {NUM_TOKENS}
    return [place for place, judged in enumerate(oracle.judge_all(prompts, outputs)) if not judged.is_right]


def test_a_prefiller_killed_while_it_sends_costs_nothing_but_time(
    served: Served, prompts: list[list[int]], oracle: Oracle
) -> None:
    prompts = [prompts[0], prompts[1][:SHORT], prompts[2][:SHORT]]
    prefiller = served.pids()["prefiller-0"]
    asking = Asking(served, prompts[0])
    wait_until_it_sends(served)
    num_met = served.log().count("is ready")
    os.kill(prefiller, signal.SIGKILL)
    texts = [asking.result()]
    assert served.gauges()["decoder-0", "prefill_tokens_total"] >= LONG - 1, "the decoder prefilled by itself"
    texts.append(served.complete(prompts[1], NUM_TOKENS))  # with or without the new prefiller
    served.wait_until(lambda: served.pids().get("prefiller-0", prefiller) != prefiller, "it is started anew", 20)
    served.wait_until(lambda: ("prefiller-0", "pages") in served.gauges(), "the new one has announced itself", 30)
    served.wait_until(lambda: served.log().count("is ready") > num_met, "the decoder has met it", 20)
    ready = served.gauges()["decoder-0", "tickets_ready_total"]
    texts.append(served.complete(prompts[2], NUM_TOKENS))
    served.wait_until(lambda: served.gauges()["decoder-0", "tickets_ready_total"] == ready + 1, "it was fetched", 5)
    served.wait_idle()
    assert wrong(oracle, prompts, texts) == []


def test_a_prefiller_stopped_while_it_sends_is_given_up_and_taken_back(
    served: Served, prompts: list[list[int]], oracle: Oracle
) -> None:
    prompts = prompts[3:]
    prefiller, num_times = served.pids()["prefiller-0"], served.log().count("prefiller-0 is here")
    asking = Asking(served, prompts[0])
    wait_until_it_sends(served)
    os.kill(prefiller, signal.SIGSTOP)
    try:
        texts = [asking.result(), served.complete(prompts[1], NUM_TOKENS)]  # the second all the while it is stopped
    finally:
        os.kill(prefiller, signal.SIGCONT)
    served.wait_until(lambda: served.log().count("prefiller-0 is here") > num_times, "it is back", 20)
    time.sleep(1.0)  # whatever it still had to write has come by now, into nobody's page
    texts += [served.complete(prompt, NUM_TOKENS) for prompt in prompts[2:]]
    served.wait_idle()
    assert served.gauges()["decoder-0", "wrong_bytes_total"] == 0
    assert wrong(oracle, prompts, texts) == []
