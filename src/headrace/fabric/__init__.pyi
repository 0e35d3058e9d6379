"""The types of the names that `headrace.fabric` loads when they are asked for."""

from headrace.fabric.cuda_memory import CudaMemory
from headrace.fabric.interface import (
    Descriptor,
    DigestsReady,
    Event,
    Fabric,
    Imm,
    LastWrite,
    MessageReceived,
    PageReads,
    Pages,
    PageWrites,
    PeerHeard,
    PeerId,
    PeerLost,
    PeerSilent,
    Reached,
    Revoked,
    SendFailed,
    Surplus,
    TransferDone,
    TransferId,
)
from headrace.fabric.memory import SharedMemory
from headrace.fabric.native import NativeFabric, available_transports

__all__ = [
    "CudaMemory",
    "Descriptor",
    "DigestsReady",
    "Event",
    "Fabric",
    "Imm",
    "LastWrite",
    "MessageReceived",
    "NativeFabric",
    "PageReads",
    "PageWrites",
    "Pages",
    "PeerHeard",
    "PeerId",
    "PeerLost",
    "PeerSilent",
    "Reached",
    "Revoked",
    "SendFailed",
    "SharedMemory",
    "Surplus",
    "TransferDone",
    "TransferId",
    "available_transports",
]
