"""Imm counters of one loopback endpoint: what arrives here, and what is told about it.

Owns the armed counters, by slot. It knows neither peers nor memory. Runs on the thread that steps the network.
"""

from collections.abc import Callable
from dataclasses import dataclass

from headrace.errors import InputError
from headrace.fabric.interface import IMM_SLOT_BITS, Event, Imm, Reached, Surplus

_SLOT_MASK = (1 << IMM_SLOT_BITS) - 1


@dataclass(slots=True)
class _Counter:
    imm: Imm
    target: int
    arrivals: int = 0
    at_ns: int = 0


def checked_imm(imm: int) -> Imm:
    if not 0 <= imm < 1 << 32:
        raise InputError("imm", f"must fit in 32 bits, is {imm}")
    return Imm(imm)


class ImmCounters:
    """Tells through `tell`; `now_ns` is the network's clock."""

    def __init__(self, tell: Callable[[Event], None], now_ns: Callable[[], int]) -> None:
        self._tell = tell
        self._now_ns = now_ns
        self._armed: dict[int, _Counter] = {}
        self.num_arrivals = 0
        self.num_surplus = 0

    def __len__(self) -> int:
        return len(self._armed)

    def arm(self, imm: Imm, expected: int) -> None:
        slot = checked_imm(imm) & _SLOT_MASK
        if expected < 1:
            raise InputError("expected", f"must be at least 1, is {expected}")
        if slot in self._armed:
            raise InputError("imm", f"slot {slot} is armed for imm {self._armed[slot].imm}; disarm it first")
        self._armed[slot] = _Counter(imm, expected)

    def retarget(self, imm: Imm, expected: int) -> None:
        counter = self._find(checked_imm(imm))
        if counter is None:
            raise InputError("imm", f"imm {imm} is not armed")
        if expected < 0:
            raise InputError("expected", f"must be at least 0, is {expected}")
        counter.target, counter.at_ns = expected, self._now_ns()
        if counter.arrivals > expected:
            self._tell_surplus(imm, counter.arrivals, armed=True)
        self._tell_if_reached(counter)

    def disarm(self, imm: Imm) -> None:
        if self._find(checked_imm(imm)) is not None:
            del self._armed[imm & _SLOT_MASK]

    def arrive(self, imm: Imm) -> None:
        self.num_arrivals += 1
        counter = self._find(imm)
        if counter is None:
            self._tell_surplus(imm, 1, armed=False)
            return
        counter.arrivals += 1
        counter.at_ns = self._now_ns()
        if counter.arrivals > counter.target:
            self._tell_surplus(imm, counter.arrivals, armed=True)
        self._tell_if_reached(counter)

    def _find(self, imm: Imm) -> _Counter | None:
        counter = self._armed.get(imm & _SLOT_MASK)
        return counter if counter is not None and counter.imm == imm else None

    def _tell_if_reached(self, counter: _Counter) -> None:
        """Arrivals only grow, so they meet a target once."""
        if counter.arrivals == counter.target:
            self._tell(Reached(imm=counter.imm, arrivals=counter.arrivals, at_ns=counter.at_ns))

    def _tell_surplus(self, imm: Imm, arrivals: int, *, armed: bool) -> None:
        self.num_surplus += 1
        self._tell(Surplus(imm=imm, arrivals=arrivals, armed=armed))
