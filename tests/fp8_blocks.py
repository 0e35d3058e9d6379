"""A checkpoint quantised to blocks of FP8 as published ones are, block by block, and its twin of the same values."""

import json
import shutil
from pathlib import Path

import torch
from aligned_file import save_aligned
from safetensors.torch import load_file

WHOLE = "model.safetensors"


def quantization(block_size: tuple[int, int] = (128, 128)) -> dict[str, object]:
    return {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": ["lm_head"],
        "quant_method": "fp8",
        "weight_block_size": list(block_size),
    }


def quantise(
    directory: Path, twin: Path, block_size: tuple[int, int] = (128, 128), scale_dtype: torch.dtype = torch.float32
) -> None:
    """All projections of `directory`, in place; the values, in fp32, go to `twin`, beside the same configuration."""
    stored, values = {}, {}
    for name, tensor in load_file(directory / WHOLE).items():
        stored[name], values[name] = tensor, tensor.float()
        if name.endswith("proj.weight"):
            stored[name], stored[f"{name}_scale_inv"] = in_blocks(tensor.float(), block_size, scale_dtype)
            values[name] = out_of_blocks(stored[name], stored[f"{name}_scale_inv"], block_size)
    twin.mkdir(exist_ok=True)
    shutil.copy(directory / "config.json", twin)
    save_aligned(values, twin / WHOLE)
    (directory / WHOLE).unlink()
    save_aligned(stored, directory / WHOLE)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": quantization(block_size)}))


def in_blocks(
    values: torch.Tensor, block_size: tuple[int, int], scale_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """-> weight and scales."""
    weight = torch.empty(values.shape, dtype=torch.float8_e4m3fn)
    num_rows, num_columns = (-(-size // step) for size, step in zip(values.shape, block_size, strict=True))
    scales = torch.empty(num_rows, num_columns, dtype=scale_dtype)
    for row in range(num_rows):
        for column in range(num_columns):
            block = block_of(values, row, column, block_size)
            scales[row, column] = block.abs().max() / 400  # e4m3 ends at 448, and a scale in bf16 may be rounded down
            scaled = (block / scales[row, column].float()).to(weight.dtype)
            block_of(weight, row, column, block_size).copy_(scaled)
    return weight, scales


def out_of_blocks(weight: torch.Tensor, scales: torch.Tensor, block_size: tuple[int, int]) -> torch.Tensor:
    values = weight.float()
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            block_of(values, row, column, block_size).mul_(scales[row, column].float())
    return values


def block_of(matrix: torch.Tensor, row: int, column: int, block_size: tuple[int, int]) -> torch.Tensor:
    """A view; cut off at the edges."""
    rows, columns = block_size
    return matrix[row * rows : (row + 1) * rows, column * columns : (column + 1) * columns]
