"""What a plan stands on: devices that a roofline tells of, or instances that were measured here."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.bench.metrics import Slo
from headrace.errors import InputError
from headrace.kvcache.layout import KVDtype
from headrace.model.shape import ModelShape
from headrace.planner.costs.hardware import Hardware
from headrace.planner.profile import Profile
from headrace.planner.scenario import LinkModel
from headrace.planner.search.candidate import Candidate, Surroundings
from headrace.planner.search.profiled import ProfiledSite
from headrace.planner.search.site import USABLE, Lengths, Site

GATEWAY_S, HAND_OVER_S = 0.002, 0.002
"""As measured on CPUs (docs/measurements.md): both are of the host, whatever computes."""
ROOFLINE_ERROR = 0.08
HOST_SHARE = 0.8
"""Of the fabric inside a host, what copies between two devices reach."""
HOST_LATENCY_S = 5e-6
CORE = "cpu-core"
"""The device of an instance that was profiled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """`error` of step times, relative, and where that is from; `dtype` of KV. `device_and_link`: lines of a deployment
    file; `page_bytes`: of a page in all layers, where such a file has to say how much memory is for KV."""

    colocated: Sequence[Candidate]
    split: Sequence[Candidate]
    model: str
    dtype: str
    devices: str
    link: str
    error: float
    error_source: str
    assumed: tuple[str, ...]
    device_and_link: tuple[str, ...]
    page_bytes: int | None = None


def on_devices(
    hardware: Hardware,
    *,
    model: str,
    shape: ModelShape,
    device: str,
    decode_device: str,
    link: str,
    lengths: Lengths,
    slo: Slo,
) -> Ground:
    """Raises InputError for names that are not known, and where no host holds the model."""
    prefill, decode = hardware.device(device), hardware.device(decode_device)
    dtype: KVDtype = "bf16"
    site = Site(
        shape=shape,
        dtype=dtype,
        prefill=prefill,
        decode=decode,
        around=Surroundings(
            routed=hardware.link(link),
            same_host=LinkModel(
                bytes_s=HOST_SHARE * min(prefill.fabric_bytes_s, decode.fabric_bytes_s), latency_s=HOST_LATENCY_S
            ),
            gateway_s=GATEWAY_S,
            hand_over_s=HAND_OVER_S,
        ),
        lengths=lengths,
        slo=slo,
    )
    colocated, split = list(site.colocated()), list(site.split())
    names = " and ".join(dict.fromkeys((device, decode_device)))
    if not colocated and not split:
        raise InputError(
            "device",
            f"must hold {model} and {lengths.longest:,} tokens on one host, with steps of at most "
            f"{1e3 * slo.tpot_s:g} ms (--tpot-ms); {names} does not",
        )
    return Ground(
        colocated=colocated,
        split=split,
        model=model,
        dtype=dtype,
        devices=names,
        link=link,
        error=ROOFLINE_ERROR,
        error_source=(
            "what a roofline told of published profiles that were left out of its fit, 6 % on average, 13 % for one in "
            "ten (docs/measurements.md); software and mixtures of experts less certain"
        ),
        assumed=(
            "headrace computes on CPUs so far: no engine of its has run on such a device. Step times are a roofline's, "
            "at shares of the peaks that are fitted to published profiles, with an engine that replays decode steps as "
            "graphs (hardware.toml says which numbers are fitted and which assumed).",
            "Prices and watts are round figures: give your own with --hardware.",
            f"Gateway {1e3 * GATEWAY_S:g} ms, hand-over {1e3 * HAND_OVER_S:g} ms; {USABLE:.0%} of a device's memory "
            f"for weights and KV; answers of the stated lengths, one token a step.",
            "Groups of a data-parallel decoder are simulated as instances that do not wait for each other.",
        ),
        device_and_link=(
            *("", "[device]", 'kind = "cuda"', f"memory = {prefill.memory_bytes}", f"per_host = {prefill.per_host}"),
            *("", "[link]", 'transports = ["efa", "verbs"]', "nics = 1"),
            f"nic_gbps = {hardware.link(link).bytes_s * 8 / 1e9:g}  # what is reached of {link}",
            f"latency_us = {1e6 * hardware.link(link).latency_s:g}",
        ),
    )


def as_profiled(profile: Profile, file: Path, hardware: Hardware, *, lengths: Lengths, slo: Slo) -> Ground:
    """Raises InputError where nothing that was profiled has room."""
    site = ProfiledSite(profile=profile, device=hardware.device(CORE), lengths=lengths, slo=slo)
    colocated, split = list(site.colocated()), list(site.split())
    if not colocated and not split:
        raise InputError(
            "profile",
            f"must be of instances with room for {lengths.longest:,} tokens, whose steps take at most "
            f"{1e3 * slo.tpot_s:g} ms (--tpot-ms); {file} is not",
        )
    return Ground(
        colocated=colocated,
        split=split,
        model=profile.model,
        dtype=profile.dtype,
        devices=f"{profile.machine}, one core each",
        link=f"as profiled, {8e-9 * profile.link.bytes_s:.3g} Gbit/s",
        error=max(told.error_p50 for told in profile.steps.values()),
        error_source=(
            "the median error of steps of the profile that were held out of its fit; whole simulations against "
            "measured comparisons: docs/measurements.md"
        ),
        assumed=(
            f"Steps, gateway and link were measured: {file}, {profile.measured}.",
            "More instances than were profiled are as fast as those: of cores that share caches and memory they are "
            "not.",
            "Prices and watts of a core are round figures: give your own with --hardware.",
        ),
        device_and_link=(
            *("", "[device]", 'kind = "cpu"', f"memory = {os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')}"),
            *("", "[link]", 'transports = ["mapped", "tcp"]', "nics = 1"),
            f"nic_gbps = {8e-9 * profile.link.bytes_s:g}",
            f"latency_us = {max(1.0, 1e6 * profile.link.latency_s):g}",
        ),
        page_bytes=profile.page_bytes,
    )
