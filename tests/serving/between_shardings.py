"""A deployment whose prefiller and decoder have degrees of their own: transformers judges what it writes, and what each
source rank sent is held against the plan's rule.

fp32 all along: text then differs only where something is wrong, or the margin of a place is not clear.
"""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from oracle import Oracle
from served import Served

from headrace.kvcache.sharding import Sharding
from headrace.messenger.plan import PromptPages
from headrace.model.checkpoint import read_shape

PAGE_SIZE = 8
CHUNK_TOKENS = 64
OPTIONS = (
    "--dtype",
    "fp32",
    "--chunk-tokens",
    f"{CHUNK_TOKENS}",
    "--kv-memory",
    "16MiB",
    "--page-size",
    f"{PAGE_SIZE}",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees:
    prefiller_tp: int = 1
    decoder_tp: int = 1
    decoder_dp: int = 1

    @property
    def options(self) -> tuple[str, ...]:
        prefiller = ("--prefiller-tp", f"{self.prefiller_tp}")
        return (*prefiller, "--decoder-tp", f"{self.decoder_tp}", "--decoder-dp", f"{self.decoder_dp}")

    def __str__(self) -> str:
        decoder = f"tp {self.decoder_tp}" if self.decoder_dp == 1 else f"dp {self.decoder_dp} of tp {self.decoder_tp}"
        return f"tp {self.prefiller_tp} to {decoder}"


class TinyModel:
    """A checkpoint, what it keeps of a page, and what transformers says of texts."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.kv = read_shape(directory).kv_layout(PAGE_SIZE, "fp32")
        self.oracle = Oracle(directory)

    def replicas(self, tp: int) -> int:
        """Replica sets of `tp` ranks."""
        return Sharding(kv=self.kv, tp=tp).num_replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What a deployment did with its prompts, when everything that must hold held."""

    num_clear: int
    num_right: int  # of those that are clear: all
    bytes_by_rank: tuple[int, ...]
    seconds: float  # with its start and its end


def random_prompts(lengths: Sequence[int]) -> list[list[int]]:
    """No two of them begin alike, so nothing is a hit."""
    return [random.Random(number).choices(range(256), k=length) for number, length in enumerate(lengths)]


def show_same_text(
    model: TinyModel, degrees: Degrees, transport: str, prompts: Sequence[Sequence[int]], num_tokens: int
) -> Shown:
    """Serves the prompts at once, then the last again. Fails where a clear text is wrong, a prompt was not prefilled
    over there, bytes are wrong or too many or unevenly spread, or something stays behind."""
    began = time.monotonic()
    to_send = _bytes_to_send(model, degrees, prompts)
    with Served(model.directory, *OPTIONS, *degrees.options, "--require-provider", transport) as served:
        texts = served.complete_all(prompts, num_tokens, at_once=len(prompts))
        _wait_until_told(served, len(prompts))
        served.wait_until(lambda: sum(_bytes_by_rank(served, degrees)) >= to_send, f"{to_send} bytes were sent")
        sent = _bytes_by_rank(served, degrees)
        again = served.complete(prompts[-1], num_tokens)
        _wait_until_told(served, len(prompts) + 1)
        served.wait_idle()
        gauges = served.gauges()
    seconds = time.monotonic() - began
    judged = model.oracle.judge_all(prompts, [text.token_ids for text in texts])
    wrong = [len(prompts[i]) for i, each in enumerate(judged) if each.is_clear and not each.is_right]
    assert not wrong, f"not transformers' text for prompts of {wrong} tokens"
    assert again.token_ids == texts[-1].token_ids, "another text for the same prompt"
    assert gauges["decoder-0", "prefill_tokens_total"] == 0, f"prefilled where it is decoded: {gauges}"
    assert gauges["decoder-0", "tickets_ready_total"] >= len(prompts), f"not all KV has travelled: {gauges}"
    assert gauges["decoder-0", "wrong_bytes_total"] == 0, f"wrong bytes: {gauges}"
    assert sum(sent) == to_send, f"{sent} bytes were sent, must be {to_send} in all"
    _require_even(sent, model, degrees)
    num_clear = sum(each.is_clear for each in judged)
    return Shown(
        num_clear=num_clear,
        num_right=sum(each.is_clear and each.is_right for each in judged),
        bytes_by_rank=sent,
        seconds=seconds,
    )


def _wait_until_told(served: Served, num_finished: int) -> None:
    """What an instance tells of itself is half a second old."""
    finished = ("decoder-0", "requests_finished_total")
    served.wait_until(lambda: served.gauges()[finished] == num_finished, f"{num_finished} requests are counted")


def _bytes_by_rank(served: Served, degrees: Degrees) -> tuple[int, ...]:
    gauges = served.gauges()
    return tuple(int(gauges["prefiller-0", f"kv_bytes_sent_rank{r}_total"]) for r in range(degrees.prefiller_tp))


def _bytes_to_send(model: TinyModel, degrees: Degrees, prompts: Sequence[Sequence[int]]) -> int:
    """Each page of each prompt once to every replica set of the group that takes it."""
    of_prompts = (PromptPages(num_tokens=len(prompt), cached_len=0, page_size=PAGE_SIZE) for prompt in prompts)
    num_pages = sum(pages.num_sent for pages in of_prompts)
    return num_pages * model.kv.num_layers * model.kv.page_bytes * model.replicas(degrees.decoder_tp)


def _require_even(sent: Sequence[int], model: TinyModel, degrees: Degrees) -> None:
    """The ranks of a replica set always send alike; all of them, where every set is read as often in each request."""
    num_sets = model.replicas(degrees.prefiller_tp)
    for replica in range(num_sets):
        assert len(set(sent[replica::num_sets])) == 1, f"ranks of replica set {replica} sent {sent}"
    if model.replicas(degrees.decoder_tp) % num_sets == 0:
        assert len(set(sent)) == 1, f"ranks sent {sent}"
