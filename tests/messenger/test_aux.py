"""The aux slot: header and digests come back as they went in, and a slot holds the longest prompt."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.messenger.aux import DIGESTS_AT, AuxHeader, aux_bytes, aux_slot_bytes, digests_in
from headrace.protocol.messages import Ticket

U32 = st.integers(0, 2**32 - 1)
headers = st.builds(
    AuxHeader,
    ticket=st.builds(
        Ticket, decoder=st.binary(min_size=16, max_size=16).map(bytes.hex), epoch=st.integers(0, 2**31 - 1), imm=U32
    ),
    cached_len=U32,
    num_messages=U32,
)


@given(headers)
def test_a_header_comes_back_as_it_was_written_and_nothing_behind_it_is_touched(header: AuxHeader) -> None:
    slot = np.full(64, 0xEE, dtype=np.uint8)
    header.pack_into(slot)
    assert AuxHeader.unpack(slot) == header
    assert (slot[DIGESTS_AT:] == 0xEE).all()


def test_the_header_lies_where_the_other_side_looks_for_it() -> None:
    slot = np.zeros(DIGESTS_AT, dtype=np.uint8)
    ticket = Ticket(decoder="00112233445566778899aabbccddeeff", epoch=0x01020304, imm=0xA1B2C3D4)
    AuxHeader(ticket=ticket, cached_len=0x11121314, num_messages=0x21222324).pack_into(slot)
    assert slot.tobytes().hex() == "00112233445566778899aabbccddeeff04030201d4c3b2a11413121124232221"


@given(st.lists(st.integers(0, 2**64 - 1), max_size=20), st.integers(0, 7))
def test_digests_come_back_by_position_from_any_place_in_memory(digests: list[int], shift: int) -> None:
    memory = np.full(shift + aux_bytes(len(digests)) + 9, 0xEE, dtype=np.uint8)
    slot = memory[shift:]
    slot[DIGESTS_AT : aux_bytes(len(digests))] = np.array(digests, dtype="<u8").view(np.uint8)
    found = digests_in(slot, len(digests))
    assert found.tolist() == digests
    slot[:] = 0
    assert found.tolist() == digests, "a view, not a copy: the next ticket's bytes would change it"


@given(st.integers(1, 10_000), st.integers(1, 300))
def test_a_slot_holds_the_longest_prompt_and_is_whole_cache_lines(max_model_len: int, page_size: int) -> None:
    num_pages = -(-(max_model_len - 1) // page_size)
    size = aux_slot_bytes(max_model_len, page_size)
    assert size % 64 == 0
    assert aux_bytes(num_pages) <= size < aux_bytes(num_pages + 1) + 64


@pytest.mark.parametrize(("num_pages", "length"), [(0, 32), (1, 40), (100, 832)])
def test_an_aux_write_is_a_header_and_eight_bytes_a_page(num_pages: int, length: int) -> None:
    assert aux_bytes(num_pages) == length
