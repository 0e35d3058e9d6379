"""For which lengths of prompts and answers a device does more colocated, and for which split. Pure, in closed form.

What holds in the long run at a steady rate, for many devices; nothing is simulated. Of a colocated instance, with a
mean step of T seconds, rate r, and `n` chunks a prompt (short ones share):

    rows b = r * output * T      share of steps with a chunk f = min(1, r * n * T)      T = (1 - f) d(b) + f m(b)

where d is a step without and m one with a chunk. T is the mean pace of a row; in its life r * output * T prompts come,
by chance (Poisson) more or fewer, each with n chunks: nine of ten rows keep T + Z sqrt(that) n (m - d) / output. What
simulations of one instance say is up to half of it: prompts that wait for each other come in a row.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import sqrt

from headrace.bench.metrics import Slo
from headrace.engine.cost import StepSize
from headrace.planner.search.candidate import Candidate, Kind
from headrace.planner.search.least import decode_s, prefill_s
from headrace.planner.search.site import MOST_RUNNING, Lengths, most_rows

PROMPTS = tuple(64 * 2**step for step in range(10))
OUTPUTS = tuple(16 * 2**step for step in range(8))
BUSY = 0.8
"""Of what chunks hold, and of a prefiller's time, the share that prompts take at most: the rest keeps their queue
short."""
Z = 1.28
"""Standard deviations of a normal distribution that nine of ten stay below."""
HALVINGS, ROUNDS = 12, 40


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionPoint:
    """Requests a second and device; 0: a budget is not kept at any rate."""

    prompt_tokens: int
    output_tokens: int
    colocated: float
    split: float


def region(colocated: Sequence[Candidate], split: Sequence[Candidate], slo: Slo) -> Iterator[RegionPoint]:
    """Each point with the sharding, chunk size and ratio that suit it."""
    kinds = [shape.pools[0].kind for shape in colocated]
    for prompt in PROMPTS:
        for output in OUTPUTS:
            lengths = Lengths(mean_prompt=prompt, mean_output=output, p90_prompt=prompt, longest=prompt + output)
            yield RegionPoint(
                prompt_tokens=prompt,
                output_tokens=output,
                colocated=max((colocated_rate(kind, lengths, slo) / kind.num_devices for kind in kinds), default=0.0),
                split=max((split_rate(shape, lengths, slo) for shape in split), default=0.0),
            )


def colocated_rate(kind: Kind, lengths: Lengths, slo: Slo) -> float:
    """Of an instance. Bisected: a higher rate makes longer steps."""
    low, high = 0.0, kind.sharding.dp / max(prefill_s(kind, lengths), 1e-9)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if _keeps(kind, middle / kind.sharding.dp, lengths, slo) else (low, middle)
    return low


def _keeps(kind: Kind, rate: float, lengths: Lengths, slo: Slo) -> bool:
    """Of a group."""
    most = min(MOST_RUNNING, kind.num_pages * kind.page_size / (lengths.mean_prompt + lengths.mean_output))
    step_s = 0.0
    for _ in range(ROUNDS):
        tokens, num_chunks = _chunks(kind, rate * step_s, lengths)
        rows, share = rate * lengths.mean_output * step_s, min(1.0, rate * num_chunks * step_s)
        if rows > most or rate * lengths.mean_prompt * step_s > BUSY * kind.chunk_tokens:
            return False
        plain, mixed = _steps_s(kind, rows, tokens, lengths)
        longer = (1 - share) * plain + share * mixed
        if longer > slo.tpot_s:
            return False
        if longer - step_s < 1e-4 * longer:
            spread_s = Z * sqrt(rows) * num_chunks * (mixed - plain) / lengths.mean_output
            return longer + spread_s <= slo.tpot_s and max(1.0, num_chunks) * mixed <= slo.ttft_s
        step_s = longer
    return True


def _chunks(kind: Kind, num_coming: float, lengths: Lengths) -> tuple[int, float]:
    """-> tokens of a chunk, and how many chunks a prompt takes: short ones that come during a step share the next."""
    each = lengths.mean_prompt / kind.chunk_tokens
    if each >= 1:
        return kind.chunk_tokens, each
    sharing = max(1.0, min(num_coming, 1 / each))
    return int(lengths.mean_prompt * sharing), 1 / sharing


def _steps_s(kind: Kind, rows: float, tokens: int, lengths: Lengths) -> tuple[float, float]:
    """Without and with a chunk from the middle of a prompt, beside so many rows."""
    num = max(1, round(rows))
    plain = StepSize(rows=num, keys=int(num * lengths.mean_keys))
    begin = int(max(0.0, (lengths.mean_prompt - tokens) / 2))
    return kind.steps.step_s(plain), kind.steps.step_s(plain.with_chunk(begin, begin + tokens))


def split_rate(split: Candidate, lengths: Lengths, slo: Slo) -> float:
    """A device, at the ratio at which neither pool waits for the other."""
    prefiller, decoder = (pool.kind for pool in split.pools)
    decoder = replace(decoder, max_running=most_rows(decoder.steps, lengths, slo.tpot_s, most=MOST_RUNNING))
    # Layers leave while others are computed: the slower of the two keeps the prefiller.
    prompt_s = max(prefill_s(prefiller, lengths), split.transfer_s(int(lengths.mean_prompt)))
    if not decoder.max_running or prompt_s > slo.ttft_s:
        return 0.0
    devices = prompt_s / BUSY * prefiller.num_devices
    devices += decode_s(decoder, lengths) / decoder.sharding.dp * decoder.num_devices
    return 1 / devices
