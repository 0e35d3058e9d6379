"""Devices and links by name, from hardware.toml and a file of the user's own. Reads files; the rest is pure."""

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from headrace.errors import InputError
from headrace.planner.costs.roofline import Device, Efficiency
from headrace.planner.scenario import LinkModel

SECTIONS = ("devices", "efficiencies", "links")
GB = 1e9
T = TypeVar("T")
_SIZES = {"GB": 1e9, "TB": 1e12}


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """`links`: between hosts; of a device's own NICs, one direction."""

    devices: Mapping[str, Device]
    links: Mapping[str, LinkModel]

    def device(self, name: str) -> Device:
        """Raises InputError."""
        return _found(self.devices, name, "device")

    def link(self, name: str) -> LinkModel:
        return _found(self.links, name, "link")


def read_hardware(own: Path | None = None) -> Hardware:
    """What is known, and what `own` adds or replaces. Raises InputError, naming file, table and key."""
    tables = _tables(tomllib.loads(resources.files(__package__).joinpath("hardware.toml").read_text()), "hardware.toml")
    if own is not None:
        try:
            values = tomllib.loads(own.read_text())
        except OSError as error:
            raise InputError(str(own), f"must be a file that can be read: {error.strerror or error}") from error
        except ValueError as error:  # no TOML, or no UTF-8
            raise InputError(str(own), f"must be TOML, is not: {error}") from error
        for section, named in _tables(values, str(own)).items():
            for name, fields in named.items():
                tables[section][name] = tables[section].get(name, {}) | fields
    efficiencies = {name: _efficiency(name, fields) for name, fields in tables["efficiencies"].items()}
    return Hardware(
        devices={name: _device(name, fields, efficiencies) for name, fields in tables["devices"].items()},
        links={name: _link(name, fields) for name, fields in tables["links"].items()},
    )


def _tables(values: Mapping[str, Any], file: str) -> dict[str, dict[str, dict[str, Any]]]:
    found: dict[str, dict[str, dict[str, Any]]] = {section: {} for section in SECTIONS}
    for section, named in values.items():
        if section not in SECTIONS:
            raise InputError(f"{file}: {section}", f"must be one of {', '.join(SECTIONS)}")
        for name, fields in named.items() if isinstance(named, dict) else ():
            if not isinstance(fields, dict):
                raise InputError(f"{file}: {section}.{name}", f"must be a table, is {fields!r}")
            found[section][name] = dict(fields)
    return found


def _device(name: str, fields: Mapping[str, Any], efficiencies: Mapping[str, Efficiency]) -> Device:
    read = _Fields(f"devices.{name}", fields)
    flops = read.number("flops")
    return read.finished(
        Device(
            name=name,
            flops=flops,
            fp8_flops=read.number("fp8_flops", flops),
            memory_bytes=read.size("memory"),
            memory_bytes_s=read.number("memory_gbs") * GB,
            fabric_bytes_s=read.number("fabric_gbs") * GB,
            per_host=int(read.number("per_host")),
            price_hour=read.number("price_hour"),
            watts=read.number("watts"),
            efficiency=_found(efficiencies, read.text("efficiency"), f"devices.{name}.efficiency"),
        )
    )


def _efficiency(name: str, fields: Mapping[str, Any]) -> Efficiency:
    read = _Fields(f"efficiencies.{name}", fields)
    return read.finished(
        Efficiency(
            memory=read.number("memory", most=1),
            compute=read.number("compute", most=1),
            fabric=read.number("fabric", most=1),
            experts=read.number("experts", 1.0, most=1),
            large_message=read.number("large_message", least=0),
            launch_s=read.number("launch_us", least=0) / 1e6,
            chunk_launch=read.number("chunk_launch", least=0),
            layer_s=read.number("layer_us", least=0) / 1e6,
            row_s=read.number("row_us", least=0) / 1e6,
            late_row_s=read.number("late_row_us", least=0) / 1e6,
        )
    )


def _link(name: str, fields: Mapping[str, Any]) -> LinkModel:
    read = _Fields(f"links.{name}", fields)
    return read.finished(
        LinkModel(
            bytes_s=read.number("gbps") * read.number("reached", 0.9, most=1) * GB / 8,
            latency_s=read.number("latency_us", least=0) / 1e6,
            message_s=read.number("message_us", 0.0, least=0) / 1e6,
        )
    )


class _Fields:
    """Of one table; each is asked for by its name, and nothing else may be there."""

    def __init__(self, where: str, fields: Mapping[str, Any]) -> None:
        self._where = where
        self._fields = fields
        self._asked: list[str] = []

    def number(self, key: str, default: float | None = None, *, least: float = 1e-9, most: float = 1e18) -> float:
        value = self._take(key, default)
        if type(value) not in (int, float) or not (math.isfinite(value) and least <= value <= most):
            raise self._wrong(key, f"a number from {least:g} to {most:g}", value)
        return float(value)

    def text(self, key: str) -> str:
        value = self._take(key, None)
        if not isinstance(value, str):
            raise self._wrong(key, "a text", value)
        return value

    def size(self, key: str) -> int:
        """Bytes."""
        value = self._take(key, None)
        number, unit = str(value)[:-2], str(value)[-2:]
        if unit not in _SIZES or not number.replace(".", "", 1).isdecimal():
            raise self._wrong(key, 'a size such as "80GB"', value)
        return int(float(number) * _SIZES[unit])

    def finished(self, made: T) -> T:
        for key in self._fields:
            if key not in self._asked:
                raise InputError(f"{self._where}.{key}", f"must not be there, known are {', '.join(self._asked)}")
        return made

    def _take(self, key: str, default: float | None) -> Any:  # noqa: ANN401 (any value of TOML)
        self._asked.append(key)
        return self._fields.get(key, default)

    def _wrong(self, key: str, right: str, value: object) -> InputError:
        said = "is missing" if value is None else f"is {value!r}"
        return InputError(f"{self._where}.{key}", f"must be {right}, {said}")


def _found(known: Mapping[str, T], name: str, field: str) -> T:
    if name not in known:
        raise InputError(field, f"must be one of {', '.join(known)}, is {name!r}")
    return known[name]
