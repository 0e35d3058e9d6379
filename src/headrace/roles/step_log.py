"""What each step of an instance took, as a line of its log at debug, from which `headrace profile` learns.

    step: begin 1234.567890 took 0.012345 follows 1 rows 8 chunk 256 keys 2304 pairs 32896

`begin` is of the monotonic clock, seconds; `follows` 1 where the step before it had just ended, with nothing to wait
for between: then that one kept the instance until this one's begin, and not only while it was computed. Runs on the
role's loop.
"""

import logging

from headrace.engine.cost import StepSize

STEP_LINE = "step: begin %.6f took %.6f follows %d rows %d chunk %d keys %d pairs %d"


class StepLog:
    """Costs nothing where `log` is not at debug."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._follows = False

    def waits(self) -> None:
        """There was nothing to compute."""
        self._follows = False

    def tell(self, size: StepSize, *, began_at: float, ended_at: float) -> None:
        """A step is over."""
        if self._log.isEnabledFor(logging.DEBUG):
            took_s = ended_at - began_at
            sizes = size.rows, size.chunk_tokens, size.keys, size.pairs
            self._log.debug(STEP_LINE, began_at, took_s, self._follows, *sizes)
        self._follows = True
