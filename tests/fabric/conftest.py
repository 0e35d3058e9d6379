"""The fixture `world`: endpoints of every kind of fabric that this machine can build."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from fabric_world import Link, LoopbackWorld, NativeWorld, World, fill, link
from loopback_world import LettingGoWorld

from headrace.fabric.interface import Fabric

NATIVE: dict[str, dict[str, Any]] = {
    "tcp": {"transports": ("tcp",)},
    "tcp-by-3-nics": {"transports": ("tcp",), "nodes": ("127.0.0.1", "127.0.0.2", "127.0.0.3")},
    "mapped": {"transports": ("mapped",)},
    "shm": {"transports": ("shm",)},
}


@pytest.fixture(params=["loopback-1", "loopback-2", "loopback-3", "letting-go", *NATIVE])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    made: World
    if request.param in NATIVE:
        made = NativeWorld(request.param, partial(_native_endpoint, **NATIVE[request.param]))
    elif request.param == "letting-go":
        made = LettingGoWorld(seed=1)
    else:
        made = LoopbackWorld(seed=int(request.param.rpartition("-")[2]))
    yield made
    made.close()


def _native_endpoint(memory_fd: int, length: int, **options: Any) -> Fabric:
    from headrace.fabric.native import NativeFabric

    return NativeFabric(memory_fd, length, **options)


@pytest.fixture
def pair(world: World) -> Link:
    """A linked writer with seeded bytes and a poisoned reader."""
    made = link(world)
    fill(made.writer)
    return made
