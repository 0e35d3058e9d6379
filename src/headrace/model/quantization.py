"""How a config.json says that weights are stored in few bits: blocks of FP8 with a scale each, nothing else. Pure.

Owns the refusal of every other way. Which tensors are stored so, each says by its dtype: lists of modules that are not
only repeat it, and are not read. Knows no tensors: `block_fp8` does.
"""

from collections.abc import Mapping

from headrace.errors import InputError
from headrace.model.config_fields import Config, require_known, said

_FIELD = "quantization_config"

_KNOWN_VALUES: Mapping[str, tuple[object, ...]] = {
    f"{_FIELD}.fmt": ("e4m3",),
    f"{_FIELD}.activation_scheme": ("dynamic",),  # static ones come with scales of inputs, for products in FP8
}


def weight_block_size(config: Config) -> tuple[int, int] | None:
    """Rows and columns that share a scale; None where nothing is quantised. Raises InputError, naming the field."""
    quantization = config.get(_FIELD)
    if quantization is None:
        return None
    if not isinstance(quantization, Mapping):
        raise InputError(_FIELD, f"must be an object in config.json, is {quantization!r}")
    method = quantization.get("quant_method")
    if method != "fp8":
        right = "'fp8' (blocks with a scale each) in config.json, the only that is known"
        raise InputError(f"{_FIELD}.quant_method", f"must be {right}, {said(method)}")
    require_known({f"{_FIELD}.{name}": value for name, value in quantization.items()}, _KNOWN_VALUES)
    return _block_size(quantization.get("weight_block_size"))


def _block_size(value: object) -> tuple[int, int]:
    if not isinstance(value, list | tuple) or len(value) != 2 or not all(type(n) is int and n >= 1 for n in value):
        right = "a list of the rows and columns that share a scale, as [128, 128], in config.json"
        raise InputError(f"{_FIELD}.weight_block_size", f"must be {right}, {said(value)}")
    rows, columns = value
    return rows, columns
