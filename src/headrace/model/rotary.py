"""The angles of rotary positions: by the default formula, or scaled. Owns nothing.

In fp32 and by the formulas of training, in their order of operations: the angles of far positions carry its rounding.
"""

import math
from dataclasses import dataclass

import torch

from headrace.model.batch import Batch
from headrace.model.rope import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """`frequencies` `[D / 2] fp32`: angles per position; `scale` multiplies their cos and sin."""

    frequencies: torch.Tensor
    scale: float = 1.0


def rotary(theta: float, head_dim: int, scaling: RopeScaling | None = None) -> Rotary:
    steps = theta ** (torch.arange(0, head_dim, 2).float() / head_dim)  # positions per radian
    match scaling:
        case None:
            return Rotary(frequencies=1.0 / steps)
        case LinearScaling():
            return Rotary(frequencies=1.0 / steps / scaling.factor)
        case Llama3Scaling():
            return Rotary(frequencies=_llama3(1.0 / steps, scaling))
        case YarnScaling():
            kept = _kept_by_yarn(theta, head_dim, scaling)
            frequencies = 1.0 / (scaling.factor * steps) * (1 - kept) + 1.0 / steps * kept
            return Rotary(frequencies=frequencies, scale=scaling.attention_factor)


def _llama3(frequencies: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    turns = scaling.original_len / (2 * math.pi / frequencies)
    kept = ((turns - scaling.low_turns) / (scaling.high_turns - scaling.low_turns)).clamp(0, 1)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies


def _kept_by_yarn(theta: float, head_dim: int, scaling: YarnScaling) -> torch.Tensor:
    """How much of each frequency stays as it is, `[D / 2]`: a ramp from 1 down to 0 between two dimensions."""

    def dimension(turns: float) -> float:
        """That goes round so often in the original length."""
        return head_dim * math.log(scaling.original_len / (turns * 2 * math.pi)) / (2 * math.log(theta))

    begin, end = dimension(scaling.fast_turns), dimension(scaling.slow_turns)
    if scaling.truncated:
        begin, end = math.floor(begin), math.ceil(end)
    begin, end = max(begin, 0), min(end, head_dim - 1)
    if begin == end:
        end += 0.001  # a step, where a ramp would divide by zero
    return 1 - ((torch.arange(head_dim // 2).float() - begin) / (end - begin)).clamp(0, 1)


def rotation(batch: Batch, rotary: Rotary) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of each token's angles, times the scale, `[T, D / 2] fp32`."""
    angles = torch.from_numpy(batch.positions).float()[:, None] * rotary.frequencies
    return angles.cos() * rotary.scale, angles.sin() * rotary.scale
