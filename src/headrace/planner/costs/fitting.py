"""How much of their peaks devices reach: found in measured steps by least squares, and how wrong it is for a group that
was left out. Pure.

What is fitted are logarithms of a few shares and overheads, common to all hardware, and each hardware's deviation from
them, which is held small: so hardware of which little was measured is told from what is known of others. A model may
have kernels of its own: one factor each for its launches and products is fitted beside, and not kept.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from headrace.bench.metrics import percentile
from headrace.planner.costs.published import WORKS, Group, Measured, Phase
from headrace.planner.costs.roofline import Device, Efficiency, RooflineSteps, Sharding

Doubles = NDArray[np.float64]

START: Mapping[str, float] = {
    "memory": 0.6,
    "compute": 0.75,
    "fabric": 0.3,
    "large_message": 1.0,
    "launch_s": 450e-6,
    "chunk_launch": 1.5,
    "layer_s": 150e-6,
    "row_s": 200e-6,
    "late_row_s": 300e-6,
}
DEVIATIONS: Mapping[str, float] = {
    "memory": 0.1,
    "compute": 0.2,
    "fabric": 0.2,
    "large_message": 0.3,
    "launch_s": 0.3,
    "chunk_launch": 0.15,
    "layer_s": 0.3,
    "row_s": 0.3,
    "late_row_s": 0.3,
}
"""Of one hardware from another, as logarithms: what is expected before anything is measured."""
START_SPREAD = 1.0
MODEL_SPREAD = 0.15
NOISE = 0.06
"""Of a measured time, relative. Larger errors count less (soft L1): a few settings do what no model does."""

PLAIN = "llama2-70b"
"""The model whose kernels' factors are 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """By hardware, and by model its factors of launches and of products."""

    efficiencies: Mapping[str, Efficiency]
    launches: Mapping[str, float]
    products: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """Relative errors of a group that the fit had not seen, predicted by measured less 1. `is_inside`: the fit had
    seen the same model on the same hardware at smaller and at larger degrees of sharding."""

    group: Group
    phase: Phase
    errors: tuple[float, ...]
    is_inside: bool

    @property
    def mean(self) -> float:
        return fmean(abs(each) for each in self.errors)


class _Layout:
    """Where each parameter lies in the vector that is fitted: shared ones, deviations by hardware, factors by model."""

    def __init__(self, measured: Iterable[Measured]) -> None:
        groups = {one.group for one in measured}
        self.hardware = sorted({group.hardware for group in groups})
        self.models = sorted({group.model for group in groups} - {PLAIN})
        self._num = len(START)

    @property
    def begin(self) -> Doubles:
        return np.concatenate([np.log(list(START.values())), np.zeros(self.num_deviations + 2 * len(self.models))])

    @property
    def num_deviations(self) -> int:
        return self._num * len(self.hardware)

    def efficiency(self, vector: Doubles, hardware: str) -> Efficiency:
        """Of hardware that was not measured, what all have in common."""
        shared = vector[: self._num]
        if hardware in self.hardware:
            begin = self._num * (1 + self.hardware.index(hardware))
            shared = shared + vector[begin : begin + self._num]
        return Efficiency(**dict(zip(START, np.exp(shared).tolist(), strict=True)))

    def factors(self, vector: Doubles, model: str) -> tuple[float, float]:
        """-> of launches, of products."""
        if model not in self.models:
            return 1.0, 1.0
        place = self._num + self.num_deviations + 2 * self.models.index(model)
        launches, products = np.exp(vector[place : place + 2]).tolist()
        return launches, products

    def surprise(self, vector: Doubles) -> Doubles:
        """How far everything is from what was expected, in units of that."""
        begin = self._num + self.num_deviations
        return np.concatenate(
            [
                (vector[: self._num] - self.begin[: self._num]) / START_SPREAD,
                vector[self._num : begin] / np.tile(list(DEVIATIONS.values()), len(self.hardware)),
                vector[begin:] / MODEL_SPREAD,
            ]
        )


def fit(measured: Sequence[Measured], devices: Mapping[str, Device]) -> Fit:
    """`devices`: by name of the hardware; their peaks count, not their efficiencies."""
    layout = _Layout(measured)
    seen = np.log([one.seconds for one in measured])

    def residuals(vector: Doubles) -> Doubles:
        told = _predicted(layout, vector, measured, devices)
        return np.concatenate([(np.log(told) - seen) / NOISE, layout.surprise(vector)])

    found = np.asarray(least_squares(residuals, layout.begin, loss="soft_l1").x, dtype=np.float64)
    factors = {model: layout.factors(found, model) for model in (PLAIN, *layout.models)}
    return Fit(
        efficiencies={name: layout.efficiency(found, name) for name in devices},
        launches={model: launches for model, (launches, _) in factors.items()},
        products={model: products for model, (_, products) in factors.items()},
    )


def _predicted(
    layout: _Layout, vector: Doubles, measured: Sequence[Measured], devices: Mapping[str, Device]
) -> list[float]:
    by_group: dict[Group, RooflineSteps] = {}
    for group in {one.group for one in measured}:
        efficiency = layout.efficiency(vector, group.hardware)
        by_group[group] = steps_of(group, devices[group.hardware], efficiency, *layout.factors(vector, group.model))
    return [by_group[one.group].step_s(one.size) for one in measured]


def steps_of(
    group: Group, device: Device, efficiency: Efficiency, launches: float = 1.0, products: float = 1.0
) -> RooflineSteps:
    own = replace(efficiency, launch_s=efficiency.launch_s * launches, compute=efficiency.compute / products)
    return RooflineSteps(
        work=WORKS[group.model], device=replace(device, efficiency=own), sharding=Sharding(tp=group.tp)
    )


def predicted(fitted: Fit, one: Measured, devices: Mapping[str, Device]) -> float:
    """Seconds."""
    group = one.group
    steps = steps_of(
        group,
        devices[group.hardware],
        fitted.efficiencies[group.hardware],
        fitted.launches.get(group.model, 1.0),
        fitted.products.get(group.model, 1.0),
    )
    return steps.step_s(one.size)


def leave_out(measured: Sequence[Measured], devices: Mapping[str, Device]) -> list[LeftOut]:
    """Each group in turn, told from all others."""
    groups = sorted({one.group for one in measured}, key=str)
    found: list[LeftOut] = []
    for group in groups:
        fitted = fit([one for one in measured if one.group != group], devices)
        for phase in ("prefill", "decode"):
            own = [one for one in measured if one.group == group and one.phase == phase]
            errors = tuple(predicted(fitted, one, devices) / one.seconds - 1 for one in own)
            found.append(
                LeftOut(
                    group=group,
                    phase="prefill" if phase == "prefill" else "decode",
                    errors=errors,
                    is_inside=_is_inside(group, groups),
                )
            )
    return found


def _is_inside(group: Group, groups: Sequence[Group]) -> bool:
    degrees = [one.tp for one in groups if (one.model, one.hardware) == (group.model, group.hardware) and one != group]
    return bool(degrees) and min(degrees) < group.tp < max(degrees)


def told_errors(left_out: Sequence[LeftOut]) -> tuple[float, float]:
    """Mean and p90 of all relative errors, whatever their sign."""
    errors = [abs(error) for one in left_out for error in one.errors]
    return fmean(errors), percentile(errors, 0.9)
