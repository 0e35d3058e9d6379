"""How long the dispatch side waits for what. Plain data; tests make everything short."""

from dataclasses import dataclass

from headrace.protocol.control import BEAT_S, SILENCE_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """News cut every wait short; these are the bounds."""

    beat_s: float = BEAT_S
    silence_s: float = SILENCE_S  # an instance that is not heard of for so long is gone
    forget_s: float = 600.0  # what a silent or refused instance said of itself is kept so long, should it come back
    lease_retry_s: float = 0.05  # after Wait
    room_retry_s: float = 0.1  # after NoRoom
    answer_s: float = 2.0  # to Reserve and Generate: an instance's loop answers at once, whatever its model does
    need_prefill_s: float = 0.15  # the decoder waits 200 ms, two journeys included
    comeback_s: float = 4.0  # for a decoder, when none is left: with its loss noticed, an answer within 5 s
    max_resumes: int = 2  # of one request, on another decoder


DEFAULT_TIMINGS = Timings()
