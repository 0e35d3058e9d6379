"""One rank's part of the model, and the other ranks that it computes with. The same in the lead and in a rank process.

Owns both until the context ends. Synchronous, for start-up.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path

import torch

from headrace.errors import RankLost
from headrace.model.gloo_ranks import GlooRanks
from headrace.model.interface import Model
from headrace.model.kernels import WrapOps, as_they_are, open_model
from headrace.model.options import ComputeOptions
from headrace.model.parallel import Parallel
from headrace.model.ranks import OneRank, Ranks
from headrace.roles.options import InstanceOptions

COLLECTIVE_S = 60.0
"""How long a rank waits for the others: to meet, and in a step; and its lead, when its own part is done, for the rest.
One that is dead or stopped is noticed sooner; this is for one whose model thread alone hangs."""


@contextmanager
def meet(options: InstanceOptions, *, rank: int, meeting_points: Path) -> Iterator[Parallel]:
    """All ranks of the instance, in the folder of `meeting_points`. Raises RankLost where the others do not come."""
    group, place = divmod(rank, options.tp)
    with ExitStack() as exits:

        def join(name: str, place: int, size: int) -> Ranks:
            point = meeting_points / name
            try:
                ranks = _beside(partial(GlooRanks, point, rank=place, size=size, timeout_s=COLLECTIVE_S))
            except RuntimeError as error:
                raise RankLost(f"the ranks have not met: {error}") from error
            return exits.enter_context(closing(ranks))

        everyone = join("everyone", rank, options.num_ranks)
        if options.tp in (1, options.num_ranks):
            yield Parallel(group=OneRank() if options.tp == 1 else everyone, everyone=everyone)
        else:
            yield Parallel(group=join(f"group-{group}", place, options.tp), everyone=everyone)


def _beside(make: Callable[[], GlooRanks]) -> GlooRanks:
    """On a thread of its own: it waits in gloo, where the main thread would hear no signal, nor that a rank is lost."""
    made: Future[GlooRanks] = Future()

    def run() -> None:
        try:
            made.set_result(make())
        except Exception as error:  # noqa: BLE001 (raised where it is waited for; else that would be for ever)
            made.set_exception(error)

    threading.Thread(target=run, name="meet", daemon=True).start()
    return made.result()


@contextmanager
def open_rank_model(
    options: InstanceOptions,
    *,
    rank: int,
    fingerprint: str,
    parallel: Parallel,
    wrap: WrapOps = as_they_are,
) -> Iterator[Model]:
    """Ranks load at the same time, and wait for nobody. Raises InputError naming what is wrong."""
    compute = ComputeOptions(
        kernels=options.kernels,
        threads=options.threads,
        cpus=options.cpus_of(rank),
        share_in=options.share_weights_in,
    )
    with open_model(
        options.model_dir,
        fingerprint=fingerprint,
        dtype=options.dtype,
        options=compute,
        wrap=wrap,
        parallel=parallel,
    ) as model:
        yield model


def place_model_thread(num_torch_threads: int, cpus: Sequence[int]) -> None:
    """On the thread that is to compute, when the model is there; `cpus` are the rank's."""
    torch.set_num_threads(num_torch_threads)  # torch counts them for each thread that calls it
    if cpus:
        os.sched_setaffinity(0, cpus[:1])
