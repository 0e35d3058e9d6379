"""Two linked loopback endpoints with chosen faults, for the tests that look at the network itself."""

from fabric_world import EVERY_DAY, Link, LoopbackWorld, Side, fill, link

from headrace.fabric.interface import TransferId
from headrace.testing import Faults, LoopbackFabric, LoopbackNetwork

CALM = Faults()


class LettingGoWorld(LoopbackWorld):
    """Whose endpoints have each other's memory mapped: access that is revoked ends when the writer lets go."""

    def __init__(self, seed: int, faults: Faults = EVERY_DAY) -> None:
        super().__init__(seed, faults)
        self.network = LoopbackNetwork(seed=seed, faults=faults, revocation="when let go")


def calm_pair(
    faults: Faults = CALM, *, seed: int = 1, kind: type[LoopbackWorld] = LoopbackWorld
) -> tuple[LoopbackWorld, Link]:
    """The faults hold from the link's first message on; the writer has seeded bytes, the reader poison."""
    world = kind(seed=seed, faults=faults)
    pair = link(world)
    fill(pair.writer)
    return world, pair


def of(side: Side) -> LoopbackFabric:
    """The fabric of `side`, for the network's adversary."""
    assert isinstance(side.fabric, LoopbackFabric)
    return side.fabric


def submit(pair: Link, *, imm: int = 7, src: int = 0, dst: int = 0, length: int = 4096, count: int = 1) -> TransferId:
    """A transfer of `count` writes side by side, ended."""
    transfer = pair.open(imm)
    for i in range(count):
        pair.writer.fabric.submit_write(
            transfer, src_offset=src + i * length, dst_offset=dst + i * length, length=length
        )
    pair.writer.fabric.submit_last(transfer)
    return transfer


def landed(pair: Link, *, begin: int = 0, end: int = 4096) -> bool:
    """Whether [begin, end) at the reader equals the writer's."""
    return bool((pair.reader.memory[begin:end] == pair.writer.memory[begin:end]).all())


def untouched(pair: Link) -> bool:
    return bool((pair.reader.memory == 0xA5).all())


def arrivals(pair: Link) -> int:
    return pair.reader.fabric.statistics().num_arrivals
