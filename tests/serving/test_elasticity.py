"""A deployment that changes under load: instances leave, join, and change their role, and no request notices.

A tiny Qwen3, whose texts are short of nothing but time; each text is compared with what was written when all was quiet.
"""

import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import httpx2
import openai
import pytest
from load import Load, Prompt, right_texts
from served import Served, as_completion
from tiny_qwen import write_qwen

from headrace.protocol.control import BEAT_S, SILENCE_S

pytestmark = [pytest.mark.serving, pytest.mark.timeout(300)]

OPTIONS = ("--dtype", "fp32", "--chunk-tokens", "32", "--kv-memory", "16MiB", "--page-size", "8", "--max-running", "8")


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    rng = random.Random(61)
    return [tuple(rng.choices(range(256), k=length)) for length in (5, 20, 33, 47, 60)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen(tmp_path_factory.mktemp("tiny-qwen"))


def standings(served: Served) -> dict[str, str]:
    """By the names of instances."""
    told = json.loads(served.operate("status", "--json"))
    return {facts["name"]: facts["standing"] for facts in told["instances"]}


@contextmanager
def by_hand(served: Served, model: Path, name: str) -> Iterator[subprocess.Popen[bytes]]:
    """A decoder that a person starts beside it."""
    words = ["decoder", "--name", name, "--gateway", served.control, "--model", str(model), "--served-name", "served"]
    with subprocess.Popen([sys.executable, "-m", "headrace", *words, *OPTIONS]) as process:
        try:
            yield process
        finally:
            process.kill()


def test_instances_leave_change_their_role_and_join_under_load_and_nothing_is_lost(
    prompts: list[Prompt], model: Path, transport: str
) -> None:
    options = (*OPTIONS, "--decoders", "2", "--require-provider", transport)
    with Served(model, *options) as served, ExitStack() as exits:
        with Load(served, right_texts(served, prompts, 40), at_once=3) as load:
            assert served.operate("role", "decoder-1", "prefiller") == "decoder-1 serves as prefiller-1\n"
            load.wait_for_more(10, lambda: served.gauges().get(("prefiller-1", "prefill_tokens_total"), 0) > 0)
            assert served.operate("drain", "prefiller-0") == "prefiller-0 has left\n"
            load.wait_for_more(10)
            joined = exits.enter_context(by_hand(served, model, "decoder-9"))
            served.wait_until(lambda: "decoder decoder-9 is here" in served.log(), "it is ready", 60)
            used = partial(has_decoded, served, "decoder-9")
            served.wait_until(used, "it is used", 1.0 + BEAT_S)  # and has said so
            assert served.operate("drain", "decoder-0") == "decoder-0 has left\n"
            load.wait_for_more(10)
        assert standings(served) == {"prefiller-1": "serving", "decoder-9": "serving"}
        assert set(served.pids()) == {"gateway", "prefiller-1"}, "who was drained is not started again"
        # None had to be resumed; but for a machine so busy that somebody was silent for two seconds.
        assert served.num_events("lost") == 0 or re.search(r"is gone|silent for", served.log())
        served.wait_idle()
        assert served.operate("drain", "decoder-9", "--force") == "decoder-9 has left\n"
        assert joined.wait(10) == 0


def has_decoded(served: Served, name: str) -> bool:
    return served.gauges().get((name, "decode_tokens_total"), 0) > 0


def test_of_two_gateways_one_is_killed_and_the_other_notices_nothing(smollm2: Path, licence_ids: list[int]) -> None:
    prompt, number = licence_ids[:100], 60
    with (
        Served(smollm2, "--gateways", "2", "--colocated", "--kv-memory", "128MiB") as served,
        ThreadPoolExecutor() as threads,
    ):
        (other_url,) = re.findall(r"Another gateway to the same: (\S+)", served.greeting)
        right = served.complete(prompt, number).token_ids
        with client_of(other_url) as other:
            request = served.request(licence_ids[200:260], 2000)
            streams = [other.completions.create(**request, stream=True) for _ in range(2)]
            for stream in streams:
                next(iter(stream))
            mine = threads.submit(served.complete, prompt, number)
            served.wait_until(lambda: num_running(served) == 3, "requests of both run side by side")
            os.kill(served.pids()["gateway-1"], signal.SIGKILL)
            for stream in streams:
                with pytest.raises(openai.APIConnectionError):
                    list(stream)
            bound_s = SILENCE_S + 2 * BEAT_S + 1.0  # noticed at a beat, told in a Status, looked for here
            served.wait_until(lambda: num_running(served) <= 1, "what nobody hears is aborted", bound_s)
        retried = served.complete(prompt, number)
        assert retried.token_ids == mine.result(60).token_ids == right
        served.wait_until(lambda: is_healthy(other_url), "it is back at its address, and so are the instances", 60)
        with client_of(other_url) as other:
            again = as_completion(other.completions.create(**served.request(prompt, number)))
        assert again.token_ids == right
        served.wait_idle()


def num_running(served: Served) -> float:
    return served.gauges()["colocated-0", "running"]


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)


def is_healthy(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/health").status_code == 200
    except httpx2.HTTPError:
        return False
