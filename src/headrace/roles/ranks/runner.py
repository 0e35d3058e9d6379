"""One step on all ranks of an instance: the lead's half, which computes rank 0's part in between.

Owns nothing. Called on the model thread, one step at a time. What a step is to be computed from is checked before any
rank is told of it, since ranks that do different things wait for each other for ever.
"""

from collections.abc import Sequence

from headrace.engine.runner import Runner
from headrace.engine.step import StepRow, draws_of
from headrace.errors import InputError
from headrace.model.interface import AfterLayer, nothing_after
from headrace.roles.ranks.processes import RankProcesses


class RankedRunner:
    """`runner` is rank 0's, the first of group 0. `after_layer` is called here alone, when every rank has appended its
    part of the layer's KV."""

    def __init__(self, runner: Runner, others: RankProcesses) -> None:
        self._runner = runner
        self._others = others
        self._steps = others.steps

    def run(self, groups: Sequence[Sequence[StepRow]], after_layer: AfterLayer = nothing_after) -> list[list[int]]:
        """A step of rows for each data-parallel group -> their tokens. Raises InputError as `Runner.run` does, and
        RankLost where it could not be computed: no step can be, from then on."""
        batches = [self._runner.batch(rows) for rows in groups]
        draws = [draws_of(rows) for rows in groups]
        for group, batch in enumerate(batches):
            self._steps.write(group, batch, draws[group])
        self._others.begin_step()
        refusal = None
        tokens: list[int] = []
        try:
            tokens = self._runner.compute(batches[0], draws[0], after_layer)
        except InputError as error:
            refusal = error  # of its logits: the others are in step
        except (RuntimeError, MemoryError) as error:
            raise self._others.lost(f"rank 0 failed: {error}") from error
        self._others.end_step()
        if refusal is not None:
            raise refusal
        return [tokens, *(self._steps.read_tokens(group) for group in range(1, len(groups)))]

    def __repr__(self) -> str:
        return f"RankedRunner({self._runner!r}, {self._others!r})"
