"""What Python decodes of a peer's bytes, guided by coverage: atheris calls one of these, chosen by the first byte, and
nothing but the errors that they promise may come out. Arguments are libFuzzer's. (`make fuzz` gets atheris.)"""

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import atheris
import numpy as np

with atheris.instrument_imports(include=["headrace"]):
    from headrace.errors import HandshakeRefused, InputError, ProtocolFault
    from headrace.fabric.interface import Descriptor
    from headrace.kvcache.layout import KVLayout
    from headrace.kvcache.sharding import Sharding
    from headrace.messenger.aux import DIGESTS_AT, AuxHeader, digests_in
    from headrace.messenger.hello import Identity, check_hello, process_of
    from headrace.messenger.plan import Plans
    from headrace.messenger.process import ProcessName
    from headrace.protocol import control, messages, operator

SHARDING = Sharding(kv=KVLayout(num_layers=2, num_kv_heads=2, page_size=4, head_dim=8, dtype="fp32"))
POOL = SHARDING.pool(num_pages=8, num_aux_slots=2, aux_slot_bytes=128)
US = Identity(
    uuid="0123456789abcdef" * 2,
    role="prefiller",
    fingerprint="model",
    sharding=SHARDING,
    pool=POOL,
    process=ProcessName(host="here", pid=17, started=5),
)
THEM = replace(US, role="decoder", uuid="f" * 32)


def descriptor(wire: bytes) -> None:
    with suppress(InputError):
        assert Descriptor.decode(wire).encode() == wire


def message(wire: bytes) -> None:
    with suppress(ProtocolFault):
        decoded = messages.decode(wire)
        assert messages.decode(messages.encode(decoded)) == decoded


def hello(wire: bytes) -> None:
    """As a prefiller takes it: its pool, its process, its descriptor."""
    with suppress(ProtocolFault, HandshakeRefused, InputError):
        told = messages.decode(wire)
        if isinstance(told, messages.Hello):
            process_of(told)
            side = check_hello(US, told)
            assert side.sharding.kv == SHARDING.kv
            Plans(US.side, side).of(group=0, seed=1)
            Descriptor.decode(told.descriptor)


def aux(wire: bytes) -> None:
    """A slot is as long as our layout says, whatever was written there."""
    slot = np.zeros(POOL.aux_slot_bytes, dtype=np.uint8)
    landed = np.frombuffer(wire[: len(slot)], dtype=np.uint8)
    slot[: len(landed)] = landed
    header = AuxHeader.unpack(slot)
    again = np.zeros_like(slot)
    header.pack_into(again)
    assert (again[:DIGESTS_AT] == slot[:DIGESTS_AT]).all()
    assert len(digests_in(slot, 8)) == 8


def control_message(wire: bytes) -> None:
    for decode in (control.decode_from_gateway, operator.decode_at_gateway, operator.decode_at_operator):
        with suppress(ProtocolFault):
            decode(wire)


DECODERS: tuple[Callable[[bytes], None], ...] = (descriptor, message, hello, aux, control_message)


def one_input(fuzzed: bytes) -> None:
    if fuzzed:
        DECODERS[fuzzed[0] % len(DECODERS)](fuzzed[1:])


def write_seeds(folder: Path) -> None:
    """By our own encoders."""
    folder.mkdir(parents=True, exist_ok=True)
    granted = Descriptor(addressing="mapped", base=0, length=1 << 20, keys=(77,), generation=3).encode()
    greeting = messages.encode(THEM.hello(epoch=1, address=b"address", descriptor=granted))
    slot = np.zeros(POOL.aux_slot_bytes, dtype=np.uint8)
    ticket = messages.Ticket(decoder=THEM.uuid, epoch=1, imm=5)
    AuxHeader(ticket=ticket, cached_len=3, num_messages=17).pack_into(slot)
    cancel = messages.encode(messages.Cancel(sender=THEM.uuid, ticket=ticket))
    beat = control.encode_control(control.Beat(sender=US.uuid))
    for at, wire in ((0, granted), (1, greeting), (1, cancel), (2, greeting), (3, slot.tobytes()), (4, beat)):
        (folder / f"{DECODERS[at].__name__}_{len(wire)}").write_bytes(bytes([at]) + wire)


if __name__ == "__main__":
    if sys.argv[1] == "--seeds":
        write_seeds(Path(sys.argv[2]))
    else:
        atheris.Setup(sys.argv, one_input)
        atheris.Fuzz()
