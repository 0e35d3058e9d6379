"""The angles of rotary positions, by the default formula. Owns nothing."""

import torch

from headrace.model.batch import Batch


def rotary_frequencies(theta: float, head_dim: int) -> torch.Tensor:
    """`[D / 2] fp32`. In fp32 and by this formula, as in training: the angles of far positions carry its rounding."""
    return 1.0 / theta ** (torch.arange(0, head_dim, 2).float() / head_dim)


def rotation(batch: Batch, frequencies: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of each token's angles, `[T, D / 2] fp32`."""
    angles = torch.from_numpy(batch.positions).float()[:, None] * frequencies
    return angles.cos(), angles.sin()
