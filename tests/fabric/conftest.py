"""The fixture `world`: endpoints of every kind of fabric that this machine can build."""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest
from fabric_world import Link, LoopbackWorld, NativeWorld, World, fill, link

from headrace.fabric.interface import Fabric


def _native_endpoint(memory_fd: int, length: int) -> Fabric:
    from headrace.fabric.native import NativeFabric

    return NativeFabric(memory_fd, length, provider="tcp;ofi_rxm")


@pytest.fixture(params=["loopback-1", "loopback-2", "loopback-3", "native"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    made: World
    if request.param == "native":
        if find_spec("headrace.fabric._native") is None:
            pytest.skip("the native fabric is not built")
        made = NativeWorld(_native_endpoint)
    else:
        made = LoopbackWorld(seed=int(request.param.rpartition("-")[2]))
    yield made
    made.close()


@pytest.fixture
def pair(world: World) -> Link:
    """A linked writer with seeded bytes and a poisoned reader."""
    made = link(world)
    fill(made.writer)
    return made
