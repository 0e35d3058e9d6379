"""One posted write on its way through the simulated network, with everything that may happen to it.

Owns the fate of one write, and the list of an endpoint's writes that have not landed; the network owns time, the
endpoints own memory. Runs on the thread that steps the network.

    launch -> header read at the target (the key is checked here, and only here)
           -> all bytes land, or the first ones now and the rest later (into nothing, when revoked in between)
           -> the imm arrives, with the bytes or later
    and, before, between or after these: the local completion. Whoever comes first, completion or landing, reads the
    source: a source page that is reused before its completion shows as wrong bytes at the target.
"""

import errno
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headrace.fabric.interface import Imm
from headrace.testing.endpoint import Access, Endpoint
from headrace.testing.network import LoopbackNetwork

OpId = tuple[int, int]  # place in the writer's pool, generation of that place


@dataclass(slots=True, kw_only=True, eq=False)
class Flights:
    """What `writer` has in flight; `completed(op, code)` is called at each local completion."""

    network: LoopbackNetwork
    writer: Endpoint
    completed: Callable[[OpId, int], None]
    not_landed: "dict[Flight, None]" = field(default_factory=dict)  # ordered, unlike a set

    def lose_writer(self) -> None:
        for flight in self.not_landed:
            flight.lose_writer()


class Flight:
    """Created by the writer when it posts."""

    __slots__ = (
        "_access",
        "_bytes",
        "_code",
        "_completes_early",
        "_flights",
        "_network",
        "_num_landed",
        "dst",
        "imm",
        "key",
        "length",
        "lost",
        "op",
        "src",
        "target",
        "writer",
    )

    def __init__(
        self,
        flights: Flights,
        target: Endpoint | None,
        *,
        op: OpId,
        key: int,
        imm: Imm,
        src: int,
        dst: int,
        length: int,
    ) -> None:
        self._flights, self._network = flights, flights.network
        self.writer, self.target = flights.writer, target
        self.op, self.key, self.imm = op, key, imm
        self.src, self.dst, self.length = src, dst, length
        self.lost = False
        self._code = 0
        self._access: Access | None = None  # what the key opened when the header was read
        self._num_landed = 0
        self._bytes: NDArray[np.uint8] | None = None
        self._completes_early = False

    def launch(self) -> None:
        network, faults = self._network, self._network.faults
        if network.draw(faults.lose_write):
            self.lost = True
        elif network.draw(faults.lose_write_with_error):
            self.lost, self._code = True, errno.EIO
        elif network.draw(faults.fail_landed_write):
            self._code = errno.EIO
        self._completes_early = self.lost or network.draw(faults.early_completion)
        if self._completes_early:
            self._complete_later(self._code)
        if not self.lost:
            self._flights.not_landed[self] = None
            network.schedule(self._land_first, at=self.target, source=self.writer, late=faults.late_write)

    def lose_writer(self) -> None:
        """The writer is gone: what has not left its memory never will; the rest may still land, but where the writer
        itself is what carries it."""
        is_carried = self._network.revocation == "at once"
        if is_carried and self._network.draw(self._network.faults.write_survives_death):
            self._take_bytes()
        else:
            self.lost = True

    # ---- landing

    def _land_first(self) -> None:
        if self.lost:
            return
        target = self.target
        if target is None or target.is_gone:
            self._miss(self._network.faults.error_after_death, errno.ECONNRESET, self._network.faults.death_noticed_s)
            return
        network, faults = self._network, self._network.faults
        if network.draw(faults.swap_pages):
            self._swap_with_another()
        access = target.access(self.key)
        if access is None or self.dst + self.length > len(target.memory):
            self._miss(faults.error_after_revoke, errno.EREMOTEIO, faults.delay_s)
            return
        self._access = access
        if network.draw(faults.split_write):
            self._copy_until(network.rng.randint(0, self.length))
            network.schedule(self._land_rest, at=target, source=self.writer, late=faults.late_write)
        else:
            self._land_rest()

    def _land_rest(self) -> None:
        target, network, faults = self.target, self._network, self._network.faults
        if self.lost or target is None or self._access is None:
            return
        if target.is_gone:
            self._miss(faults.error_after_death, errno.ECONNRESET, faults.death_noticed_s)
            return
        if self._access.is_live:
            self._copy_until(self.length)
            self._corrupt(target.memory)
        self._leave()
        if self._access.is_live or network.draw(faults.imm_after_revoke):
            if network.draw(faults.late_imm):
                network.schedule(self._arrive, at=target, source=self.writer, late=faults.late_write)
            else:
                self._arrive()
        if not self._completes_early:
            self._complete_later(self._code)

    def _copy_until(self, end: int) -> None:
        """Bytes [num_landed, end) land."""
        begin, target = self._num_landed, self.target
        assert target is not None
        if begin < end and not self._network.draw(self._network.faults.skip_bytes):
            source = self.writer.memory[self.src : self.src + self.length] if self._bytes is None else self._bytes
            target.memory[self.dst + begin : self.dst + end] = source[begin:end]
        self._num_landed = end

    def _corrupt(self, memory: NDArray[np.uint8]) -> None:
        if self.length and self._network.draw(self._network.faults.flip_bit):
            memory[self.dst + self._network.rng.randrange(self.length)] ^= 1 << self._network.rng.randrange(8)

    def _swap_with_another(self) -> None:
        """Exchange destinations with a write of the same transfer of which nothing was received."""
        for other in self._flights.not_landed:
            alike = other.imm == self.imm and other.length == self.length and other.key == self.key
            if alike and other is not self and other._access is None:
                self.dst, other.dst = other.dst, self.dst
                return

    def _arrive(self) -> None:
        assert self.target is not None
        self.target.arrive(self.imm)

    def _miss(self, error: float, code: int, delay_s: tuple[float, float]) -> None:
        """It lands nowhere; the writer is told an error, or that all went well."""
        self._leave()
        if not self._completes_early:
            self._complete_later(code if self._network.draw(error) else self._code, delay_s)

    def _leave(self) -> None:
        self._flights.not_landed.pop(self, None)

    # ---- local completion

    def _complete_later(self, code: int, delay_s: tuple[float, float] | None = None) -> None:
        late = self._network.faults.late_completion
        self._network.schedule(lambda: self._complete(code), at=self.writer, late=late, delay_s=delay_s)

    def _complete(self, code: int) -> None:
        if self.writer.is_gone:
            return
        if self in self._flights.not_landed:
            self._take_bytes()
        self._flights.completed(self.op, code)
        faults = self._network.faults
        if self._network.draw(faults.duplicate_completion):
            self._network.schedule(
                lambda: self._flights.completed(self.op, errno.ECANCELED), at=self.writer, delay_s=faults.late_s
            )

    def _take_bytes(self) -> None:
        if self._bytes is None:
            self._bytes = self.writer.memory[self.src : self.src + self.length].copy()
