"""The configurations of public models, for a check where no model is: facts only, those fields that matter.

Owns which names they go by. Where they come from stands in `models/README.md`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.errors import InputError

MODELS = Path(__file__).parent / "models"

_NAMES: Mapping[str, tuple[str, ...]] = {
    "deepseek-v3": tuple(f"deepseek-ai/DeepSeek-{name}" for name in ("V3", "V3-0324", "R1", "R1-0528")),
    "qwen3-235b-a22b": ("Qwen/Qwen3-235B-A22B",),
    "qwen3-coder-480b-a35b": ("Qwen/Qwen3-Coder-480B-A35B-Instruct",),
    "qwen3-coder-480b-a35b-fp8": ("Qwen/Qwen3-Coder-480B-A35B-Instruct-FP8",),
    "llama-3.1-8b": ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B-Instruct"),
    "llama-3.1-70b": ("meta-llama/Llama-3.1-70B", "meta-llama/Llama-3.1-70B-Instruct"),
    "smollm2-135m": ("smollm2-135m-instruct", "HuggingFaceTB/SmolLM2-135M", "HuggingFaceTB/SmolLM2-135M-Instruct"),
}
"""By their file."""

FILE_OF: Mapping[str, str] = {name: file for file, names in _NAMES.items() for name in names}


def known_config(name: str) -> Mapping[str, Any]:
    """A config.json's fields. Raises InputError where none is known by this name."""
    if name not in FILE_OF:
        known = ", ".join(FILE_OF)
        raise InputError("model", f"must be a directory or, without --config, one of {known}; is {name!r}")
    config: dict[str, Any] = json.loads((MODELS / f"{FILE_OF[name]}.json").read_text())
    return config
