"""What was measured of a machine: what its steps take, its gateway, its link; and the scenarios that follow from it.

Values and their file, JSON. Who measures is `headrace profile`; a simulation of these scenarios is of the arms that
`headrace compare` runs on the same machine.
"""

import re
from pathlib import Path

import msgspec

from headrace.engine.cost import StepCost
from headrace.errors import InputError
from headrace.planner.scenario import Instance, KvModel, LinearSteps, LinkModel, Network, Role, Scenario

FORMAT = 1


class StepProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of one role. Seconds as in StepCost, from the begin of a step to the next one's. The errors are relative, of
    steps that the coefficients were not fitted to."""

    step_s: float
    row_s: float
    token_s: float
    key_s: float
    pair_s: float
    num_steps: int
    error_p50: float
    error_p90: float
    chunk_tokens: int
    max_running: int
    num_pages: int

    @property
    def cost(self) -> StepCost:
        return StepCost(
            step_s=self.step_s, row_s=self.row_s, token_s=self.token_s, key_s=self.key_s, pair_s=self.pair_s
        )


class LinkProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """As in LinkModel."""

    bytes_s: float
    latency_s: float
    message_s: float

    @property
    def model(self) -> LinkModel:
        return LinkModel(bytes_s=self.bytes_s, latency_s=self.latency_s, message_s=self.message_s)


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`page_bytes`, `page_messages` as in KvModel, `gateway_s`, `hand_over_s` as in Scenario."""

    format: int = FORMAT
    headrace: str
    measured: str  # ISO 8601, UTC
    machine: str
    model: str
    dtype: str
    page_size: int
    num_layers: int
    page_bytes: int
    page_messages: int
    steps: dict[Role, StepProfile]
    gateway_s: float
    hand_over_s: float
    link: LinkProfile


# ---- the file --------------------------------------------------------------------------------------------------


class _Version(msgspec.Struct):
    format: int


def write_profile(file: Path, profile: Profile) -> None:
    """Whole or not at all."""
    part = file.with_name(f"{file.name}.part")
    part.write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n")
    part.replace(file)


def read_profile(file: Path) -> Profile:
    """Raises InputError that names the file, and the field where one is wrong."""
    try:
        told = file.read_bytes()
    except OSError as error:
        raise InputError(str(file), f"must be a profile that can be read: {error.strerror}") from error
    try:
        version = msgspec.json.decode(told, type=_Version).format
        if version != FORMAT:
            raise InputError(f"{file}: format", f"must be {FORMAT}, which this headrace reads, is {version}")
        profile = msgspec.json.decode(told, type=Profile)
    except msgspec.DecodeError as error:
        raise _wrong(file, str(error)) from error
    try:
        _require_possible(profile)
    except InputError as error:
        raise InputError(f"{file}: {error.field}", str(error).removeprefix(f"{error.field}: ")) from error
    return profile


def _wrong(file: Path, said: str) -> InputError:
    found = re.fullmatch(r"(.*) - at `\$\.?(.*)`", said)
    if found is None:
        return InputError(str(file), f"must be a profile: {said}")
    return InputError(f"{file}: {found[2]}", f"must be as in a profile: {found[1]}")


def _require_possible(profile: Profile) -> None:
    """Raises InputError with the field."""
    for role in profile.steps:
        _instance(profile, role, 0, chunk_tokens=None, prefills=False)
    kv_of(profile)
    _ = profile.link.model
    for name in ("gateway_s", "hand_over_s"):
        if getattr(profile, name) < 0:
            raise InputError(name, f"must be a number of seconds, at least 0, is {getattr(profile, name)}")


# ---- what is simulated of it -----------------------------------------------------------------------------------


def steps_of(profile: Profile, role: Role) -> LinearSteps:
    return LinearSteps(_steps(profile, role).cost)


def scenario_of(
    profile: Profile,
    *,
    colocated: int = 0,
    prefillers: int = 0,
    decoders: int = 0,
    chunk_tokens: int | None = None,
    prefills: bool = False,
) -> Scenario:
    """An arm of a comparison on the same machine: so many instances of each role, without budgets. `chunk_tokens` None:
    those of the profile. `prefills`: decoders compute prompts where that is cheaper, once they have measured what a
    chunk takes, which without budgets they do with the first that they must compute. Raises InputError for a role that
    was not measured."""
    numbers: dict[Role, int] = {"colocated": colocated, "prefiller": prefillers, "decoder": decoders}
    instances = [
        _instance(profile, role, nth, chunk_tokens=chunk_tokens, prefills=prefills and role == "decoder")
        for role, number in numbers.items()
        for nth in range(number)
    ]
    return Scenario(
        instances=instances,
        kv=kv_of(profile),
        network=Network(routed=profile.link.model),
        gateway_s=profile.gateway_s,
        hand_over_s=profile.hand_over_s,
    )


def _instance(profile: Profile, role: Role, nth: int, *, chunk_tokens: int | None, prefills: bool) -> Instance:
    steps = _steps(profile, role)
    return Instance(
        name=f"{role}-{nth}",
        role=role,
        steps=steps_of(profile, role),
        num_pages=steps.num_pages,
        page_size=profile.page_size,
        chunk_tokens=steps.chunk_tokens if chunk_tokens is None else chunk_tokens,
        max_running=steps.max_running,
        prefills=prefills,
        knows_chunks=prefills,
    )


def kv_of(profile: Profile) -> KvModel:
    return KvModel(num_layers=profile.num_layers, page_bytes=profile.page_bytes, page_messages=profile.page_messages)


def _steps(profile: Profile, role: Role) -> StepProfile:
    if role not in profile.steps:
        raise InputError("steps", f"must be of a {role} too, are of {', '.join(profile.steps) or 'nobody'}")
    return profile.steps[role]
