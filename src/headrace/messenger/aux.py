"""The aux slot: the one write that ends every ticket, and what stands in it.

    [0, 32)              header: ticket (uuid 16 bytes, epoch u32, imm u32), p u32, num_messages u32
    [32, 32 + 8 * n)     the digests of the n pages of [h, n-1), little-endian uint64, by position

Pure: bytes in, records out. The header is written by the prefiller's messenger, the digests by its fabric.
"""

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.fabric.interface import Digests
from headrace.protocol.messages import Ticket

HEADER = struct.Struct("<16sIIII")
DIGESTS_AT = HEADER.size
ALIGNMENT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class AuxHeader:
    """`cached_len` is p, what the prefiller had in its prefix index; `num_messages` counts the aux write too."""

    ticket: Ticket
    cached_len: int
    num_messages: int

    def pack_into(self, slot: NDArray[np.uint8]) -> None:
        HEADER.pack_into(
            slot.data,
            0,
            bytes.fromhex(self.ticket.decoder),
            self.ticket.epoch,
            self.ticket.imm,
            self.cached_len,
            self.num_messages,
        )

    @classmethod
    def unpack(cls, slot: NDArray[np.uint8]) -> "AuxHeader":
        uuid, epoch, imm, cached_len, num_messages = HEADER.unpack_from(slot.data, 0)
        ticket = Ticket(decoder=uuid.hex(), epoch=epoch, imm=imm)
        return cls(ticket=ticket, cached_len=cached_len, num_messages=num_messages)


def digests_in(slot: NDArray[np.uint8], num_pages: int) -> Digests:
    """-> `[num_pages] uint64`, a copy."""
    return slot[DIGESTS_AT : DIGESTS_AT + 8 * num_pages].view("<u8").astype(np.uint64)


def aux_bytes(num_pages: int) -> int:
    """Length of the aux write of a ticket with num_pages pages."""
    return DIGESTS_AT + 8 * num_pages


def aux_slot_bytes(max_model_len: int, page_size: int) -> int:
    """Size of one slot, for the longest prompt that the model takes; fixed in Hello."""
    num_pages = -(-max_model_len // page_size)
    return -(-aux_bytes(num_pages) // ALIGNMENT) * ALIGNMENT
