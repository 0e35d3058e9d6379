"""What a profile says, on one screen. Pure."""

from collections.abc import Iterator
from pathlib import Path

from headrace.cli.tables import aligned
from headrace.engine.cost import StepSize, chunk_sizes
from headrace.planner.profile import Profile, StepProfile
from headrace.planner.scenario import Role

KEYS_EACH = 500
CHUNK_TOKENS = 256
PROMPT_TOKENS = 1024
DISTURBED = 0.12
"""A median error: on a machine with nothing else to do it is a twentieth."""
UNLIMITED_BYTES_S = 5e10
"""Faster than that, no transfer showed a limit."""


def rendered(profile: Profile, file: Path) -> str:
    lines = [
        f"{profile.model}, {profile.dtype}, on {profile.machine}",
        "",
        *aligned(list(_rows(profile))),
        "",
        f"rows of {KEYS_EACH} keys each, prefill of a prompt of {PROMPT_TOKENS} tokens; errors are relative, of steps",
        "that no coefficient was fitted to: the median, and what nine of ten stay below",
        "",
        f"gateway    {profile.gateway_s * 1e3:.2f} ms, each way",
        f"hand-over  {profile.hand_over_s * 1e3:.2f} ms, with lease and ticket",
        f"link       {_link(profile)}",
        "",
        *_disturbed(profile),
        f"written to {file}",
    ]
    return "\n".join(lines) + "\n"


def _disturbed(profile: Profile) -> Iterator[str]:
    roles = [role for role, steps in profile.steps.items() if steps.error_p50 > DISTURBED]
    if roles:
        yield f"steps of {', '.join(roles)} differed much from each other: was the machine busy with something else?"


def _rows(profile: Profile) -> Iterator[list[str]]:
    yield ["role", "1 row", "8 rows", f"chunk of {CHUNK_TOKENS}", "prefill", "steps", "error p50", "p90"]
    for role, steps in profile.steps.items():
        yield _row(role, steps)


def _row(role: Role, steps: StepProfile) -> list[str]:
    cost = steps.cost
    rows = ["-", "-"]
    if role != "prefiller":
        rows = [_ms(cost.predict(StepSize(rows=num, keys=num * KEYS_EACH))) for num in (1, 8)]
    return [
        role,
        *rows,
        _ms(cost.predict(StepSize().with_chunk(0, CHUNK_TOKENS))),
        f"{PROMPT_TOKENS / _prefill_s(steps):,.0f} tokens/s",
        f"{steps.num_steps:,}",
        f"{steps.error_p50:.1%}",
        f"{steps.error_p90:.1%}",
    ]


def _prefill_s(steps: StepProfile) -> float:
    sizes = chunk_sizes(PROMPT_TOKENS, steps.chunk_tokens)
    return max(1e-9, sum(steps.cost.predict(size) for size in sizes))


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def _link(profile: Profile) -> str:
    link = profile.link
    speed = "no limit seen" if link.bytes_s >= UNLIMITED_BYTES_S else f"{link.bytes_s / 1e9:.3g} GB/s"
    return f"{speed}, {link.latency_s * 1e3:.2f} ms until what is sent last is there"
