"""Fakes for everything that runs above a fabric: a network in memory with seeded faults and a clock that is moved."""

from headrace.testing.faults import Faults
from headrace.testing.loopback import LoopbackFabric
from headrace.testing.network import LoopbackNetwork, Revocation

__all__ = ["Faults", "LoopbackFabric", "LoopbackNetwork", "Revocation"]
