"""A profile of two cores that nobody measured, for tests of what is planned with it."""

from headrace.planner.profile import LinkProfile, Profile, StepProfile
from headrace.planner.scenario import Role

ROLES: tuple[Role, ...] = ("prefiller", "decoder", "colocated")


def steps_profiled(**more: float) -> StepProfile:
    values: dict[str, float] = {
        "step_s": 0.008,
        "row_s": 0.001,
        "token_s": 0.0005,
        "key_s": 1e-8,
        "pair_s": 1e-8,
        "num_steps": 100,
        "error_p50": 0.05,
        "error_p90": 0.2,
        "chunk_tokens": 256,
        "max_running": 32,
        "num_pages": 2000,
    }
    return StepProfile(**{**values, **more})  # type: ignore[arg-type]


def profiled(model: str, **roles: StepProfile) -> Profile:
    """Instances of all roles, alike but for those that are given."""
    return Profile(
        headrace="0",
        measured="2026-01-01T00:00:00+00:00",
        machine="two cores",
        model=model,
        dtype="bf16",
        page_size=16,
        num_layers=30,
        page_bytes=368_640,
        page_messages=30,
        steps={**{role: steps_profiled() for role in ROLES}, **roles},
        gateway_s=0.001,
        hand_over_s=0.002,
        link=LinkProfile(bytes_s=5e9, latency_s=1e-5, message_s=1e-6),
    )
