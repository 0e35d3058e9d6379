"""What every process with a model has: the model, its KV memory, the thread that computes, and how it is described.

Owns them from `open_instance` to its end, and where the instance has several ranks the processes of the others; the
role that uses them owns pages and requests. Knows no messages but the description that it gives of itself.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from headrace.engine.runner import Runner
from headrace.engine.step import StepRow
from headrace.errors import Closed, RankLost
from headrace.kvcache.layout import PoolLayout
from headrace.kvcache.memory import PoolMemory
from headrace.kvcache.pages import PagePool
from headrace.kvcache.pool import layer_views
from headrace.kvcache.prefix import PrefixIndex
from headrace.messenger.hello import Identity
from headrace.model.checkpoint import fingerprint, read_shape
from headrace.model.footprint import own_footprint
from headrace.model.interface import AfterLayer, nothing_after
from headrace.model.kernels import WrapOps, as_they_are
from headrace.model.parallel import ALONE
from headrace.model.shape import ModelShape
from headrace.protocol.control import CONTROL_VERSION, Announce, Limits
from headrace.roles.options import NEAR, InstanceOptions
from headrace.roles.pool_plan import plan_pool, plan_sharding
from headrace.roles.ranks.model import meet, open_rank_model, place_model_thread
from headrace.roles.ranks.processes import open_rank_processes
from headrace.roles.ranks.runner import RankedRunner

RunStep = Callable[[Sequence[Sequence[StepRow]], AfterLayer], list[list[int]]]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    options: InstanceOptions
    identity: Identity
    shape: ModelShape  # the whole model's
    layout: PoolLayout
    memory: PoolMemory
    pools: tuple[PagePool, ...]  # of each data-parallel group
    runner: Runner  # of rank 0, whose process this is
    max_model_len: int
    _run_step: RunStep
    _model_thread: ThreadPoolExecutor

    async def compute(
        self, groups: Sequence[Sequence[StepRow]], after_layer: AfterLayer = nothing_after
    ) -> list[list[int]]:
        """Run a step on the model thread, the rows of each data-parallel group -> their tokens. Cancelled, it goes on
        to the end of the layer that it is at: a process that leaves does not wait for a whole step. Raises InputError
        as `Runner.run` does, and RankLost."""
        is_wanted = True

        def after(layer: int) -> None:
            if not is_wanted:
                raise Closed("nobody waits for this step any more")
            after_layer(layer)

        run = partial(self._run_step, groups, after)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._model_thread, run)
        except asyncio.CancelledError:
            is_wanted = False
            raise

    @property
    def salt(self) -> bytes:
        """Of the prefix index: equal prompts of different models never meet."""
        return self.identity.fingerprint.encode()

    def announce(self, *, fabric_address: bytes) -> Announce:
        process = self.identity.process
        return Announce(
            sender=self.identity.uuid,
            role=self.options.role,
            version=CONTROL_VERSION,
            name=self.options.name,
            model=self.options.model,
            fingerprint=self.identity.fingerprint,
            limits=Limits(
                max_model_len=self.max_model_len,
                pool_tokens=self.options.dp * self.layout.num_pages * self.layout.kv.page_size,
                page_size=self.layout.kv.page_size,
                max_running=self.options.dp * self.options.max_running,
            ),
            tp=self.options.tp,
            dp=self.options.dp,
            fabric_address=fabric_address,
            host=process.host,
            pid=process.pid,
            started=process.started,
        )

    def log_start(self) -> None:
        kv, pages = self.layout.kv, self.options.dp * self.layout.num_pages
        _log.info(
            "%s %s: model %s (%s), %sKV %s pages of %d tokens = %s tokens in %d MiB, %s, %s",
            *(self.options.role, self.options.name, self.options.model, kv.dtype, described_ranks(self.options)),
            *(f"{pages:,}", kv.page_size, f"{pages * kv.page_size:,}", self.memory.length >> 20),
            *(described_fabric(self.options), own_footprint()),
        )


def unheard(loss: RankLost) -> None:
    """For who finds out with the next step."""


@contextmanager
def open_instance(
    options: InstanceOptions, *, wrap: WrapOps = as_they_are, on_rank_lost: Callable[[RankLost], None] = unheard
) -> Iterator[Instance]:
    """Load the model and fill the memory, at the same time; each takes a second or more. `wrap`: see `open_model`.
    `on_rank_lost` is called on another thread. Raises InputError naming what is wrong, RankLost."""
    shape = read_shape(options.model_dir)
    layout, max_model_len = plan_pool(shape, options)
    model_fingerprint = fingerprint(options.model_dir, dtype=options.dtype)
    with ExitStack() as exits:
        filling = exits.enter_context(_being_filled(layout.total_bytes))
        others, parallel = None, ALONE
        if options.num_ranks > 1:
            others = exits.enter_context(
                open_rank_processes(
                    options,
                    layout=layout,
                    max_model_len=max_model_len,
                    fingerprint=model_fingerprint,
                    on_lost=on_rank_lost,
                )
            )
            try:
                parallel = exits.enter_context(meet(options, rank=0, meeting_points=others.meeting_points))
            except RankLost as loss:
                raise others.lost(str(loss)) from loss
        model = exits.enter_context(
            open_rank_model(options, rank=0, fingerprint=model_fingerprint, parallel=parallel, wrap=wrap)
        )
        memory = filling.result()
        runner = Runner(model, layer_views(memory, layout), page_size=layout.kv.page_size, num_pages=layout.num_pages)
        place = partial(place_model_thread, torch.get_num_threads(), options.cpus_of(0))
        thread = exits.enter_context(ThreadPoolExecutor(1, "model", initializer=place))
        run_step: RunStep = partial(_run_alone, runner)
        if others is not None:
            exits.callback(others.close)  # before the model thread, which may be waiting for them
            others.wait_loaded(memory.fd)
            run_step = RankedRunner(runner, others).run
        yield Instance(
            options=options,
            identity=Identity.of_this_process(
                role="prefiller" if options.role == "prefiller" else "decoder",
                fingerprint=model_fingerprint,
                sharding=plan_sharding(shape, options),
                pool=layout,
            ),
            shape=shape,
            layout=layout,
            memory=memory,
            pools=tuple(PagePool(layout.num_pages, PrefixIndex()) for _ in range(options.dp)),
            runner=runner,
            max_model_len=max_model_len,
            _run_step=run_step,
            _model_thread=thread,
        )


def _run_alone(runner: Runner, groups: Sequence[Sequence[StepRow]], after_layer: AfterLayer) -> list[list[int]]:
    return [runner.run(rows, after_layer) for rows in groups]


@contextmanager
def _being_filled(num_bytes: int) -> Iterator[Future[PoolMemory]]:
    """The memory, which a thread maps, fills and moves into huge pages; closed at the end."""
    with ThreadPoolExecutor(1, "memory") as thread:
        filling = thread.submit(PoolMemory, num_bytes)
        try:
            yield filling
        finally:
            if filling.exception() is None:
                filling.result().close()


def described_fabric(options: InstanceOptions) -> str:
    """How peers reach its memory."""
    if options.role == "colocated":
        return "no fabric"
    ways = ", ".join(options.transports)
    return ways if set(options.transports) <= set(NEAR) else f"{ways} at {', '.join(options.fabric_hosts)}"


def described_ranks(options: InstanceOptions) -> str:
    """Empty of one rank."""
    groups = f"{options.dp} groups of " if options.dp > 1 else ""
    return f"{groups}{options.tp} rank{'s' * (options.tp > 1)}, " if options.num_ranks > 1 else ""
