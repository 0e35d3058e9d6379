"""The faults of a simulated network: probabilities and switches, all off by default.

Pure data, no state; `LoopbackNetwork.faults` may be replaced while the network runs. The first group is what a correct
provider does every day, the second what happens when something is broken.
"""

from dataclasses import dataclass, fields

from headrace.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """A float is the probability per write or message, unless its name ends in `_s`: then seconds, as (low, high)."""

    # what every provider may do
    delay_s: tuple[float, float] = (0.0, 0.0)
    late_s: tuple[float, float] = (0.05, 1.0)  # added to whatever is late
    reorder: bool = False  # anything due may be next; the messages of one pair keep their order
    early_completion: float = 0.0  # the writer is told before the bytes land, and though they never may
    late_completion: float = 0.0
    late_write: float = 0.0
    split_write: float = 0.0  # the first bytes land, the rest later
    late_imm: float = 0.0  # the imm arrives after its bytes
    imm_after_revoke: float = 0.5  # of a write half received when its access was revoked
    error_after_revoke: float = 0.5  # a write that finds its access revoked fails at the writer; else it just vanishes
    duplicate_completion: float = 0.0  # a second, late error completion of a finished write
    full_queue: float = 0.0  # EAGAIN: the peer is parked for queue_full_s
    queue_full_s: tuple[float, float] = (0.001, 0.01)

    # what breaks
    lose_write: float = 0.0  # neither bytes nor imm, reported as done
    lose_write_with_error: float = 0.0  # the same, reported as failed
    fail_landed_write: float = 0.0  # reported as failed, though it lands
    lose_message: float = 0.0
    fail_message: float = 0.0  # SendFailed, half of them delivered all the same
    duplicate_message: float = 0.0
    reorder_messages: bool = False
    flip_bit: float = 0.0  # one bit of the bytes that land
    swap_pages: float = 0.0  # the write lands where another one of its transfer should, and that one here
    skip_bytes: float = 0.0  # the imm arrives, the bytes do not
    write_survives_death: float = 0.5  # posted writes of a killed or closed endpoint that still land
    error_after_death: float = 0.5  # of writes and messages to a killed endpoint; the others are reported as done
    death_noticed_s: tuple[float, float] = (0.012, 0.7)  # measured: error completions 12-700 ms after a kill

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("_s"):
                if not 0 <= value[0] <= value[1]:
                    raise InputError(field.name, f"must be 0 <= low <= high, is {value}")
            elif not 0 <= value <= 1:
                raise InputError(field.name, f"must be a probability in 0..1, is {value}")
