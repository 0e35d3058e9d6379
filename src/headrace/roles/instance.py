"""What every process with a model has: the model, its KV memory, the thread that computes, and how it is described.

Owns them from `open_instance` to its end; the role that uses them owns pages and requests. Knows no messages but the
description that it gives of itself.
"""

import asyncio
import logging
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from headrace.engine.runner import Runner
from headrace.engine.step import StepRow
from headrace.errors import Closed
from headrace.kvcache.layout import PoolLayout
from headrace.kvcache.memory import PoolMemory
from headrace.kvcache.pages import PagePool
from headrace.kvcache.pool import layer_views
from headrace.kvcache.prefix import PrefixIndex
from headrace.kvcache.sharding import Sharding
from headrace.messenger.hello import Identity
from headrace.model.checkpoint import fingerprint, read_shape
from headrace.model.footprint import own_footprint
from headrace.model.interface import AfterLayer, nothing_after
from headrace.model.kernels import WrapOps, as_they_are, open_model
from headrace.model.options import ComputeOptions
from headrace.model.shape import ModelShape
from headrace.protocol.control import CONTROL_VERSION, Announce, Limits
from headrace.roles.options import NEAR, InstanceOptions
from headrace.roles.pool_plan import plan_pool

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    options: InstanceOptions
    identity: Identity
    shape: ModelShape
    layout: PoolLayout
    memory: PoolMemory
    pages: PagePool
    runner: Runner
    max_model_len: int
    _model_thread: ThreadPoolExecutor

    async def compute(self, rows: Sequence[StepRow], after_layer: AfterLayer = nothing_after) -> list[int]:
        """Run a step on the model thread -> its tokens. Cancelled, it goes on to the end of the layer that it is at:
        a process that leaves does not wait for a whole step."""
        is_wanted = True

        def after(layer: int) -> None:
            if not is_wanted:
                raise Closed("nobody waits for this step any more")
            after_layer(layer)

        run = partial(self.runner.run, rows, after)
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
                pool_tokens=self.layout.num_pages * self.layout.kv.page_size,
                page_size=self.layout.kv.page_size,
                max_running=self.options.max_running,
            ),
            fabric_address=fabric_address,
            host=process.host,
            pid=process.pid,
            started=process.started,
        )

    def log_start(self) -> None:
        kv, pages = self.layout.kv, self.layout.num_pages
        _log.info(
            "%s %s: model %s (%s), KV %s pages of %d tokens = %s tokens in %d MiB, %s, %s",
            *(self.options.role, self.options.name, self.options.model, kv.dtype),
            *(f"{pages:,}", kv.page_size, f"{pages * kv.page_size:,}", self.memory.length >> 20),
            *(described_fabric(self.options), own_footprint()),
        )


@contextmanager
def open_instance(options: InstanceOptions, *, wrap: WrapOps = as_they_are) -> Iterator[Instance]:
    """Load the model and fill the memory, at the same time; each takes a second or more. `wrap`: see `open_model`.
    Raises InputError naming what is wrong."""
    layout, max_model_len = plan_pool(read_shape(options.model_dir), options)
    model_fingerprint = fingerprint(options.model_dir, dtype=options.dtype)
    with (
        _being_filled(layout.total_bytes) as filling,
        open_model(
            options.model_dir,
            fingerprint=model_fingerprint,
            dtype=options.dtype,
            options=_compute(options),
            wrap=wrap,
        ) as model,
    ):
        memory = filling.result()
        place = partial(_place_model_thread, torch.get_num_threads(), options.cpus)
        with ThreadPoolExecutor(1, "model", initializer=place) as thread:
            yield Instance(
                options=options,
                identity=Identity.of_this_process(
                    role="prefiller" if options.role == "prefiller" else "decoder",
                    fingerprint=model_fingerprint,
                    sharding=Sharding(kv=layout.kv),
                    pool=layout,
                ),
                shape=model.shape,
                layout=layout,
                memory=memory,
                pages=PagePool(layout.num_pages, PrefixIndex()),
                runner=Runner(
                    model, layer_views(memory, layout), page_size=layout.kv.page_size, num_pages=layout.num_pages
                ),
                max_model_len=max_model_len,
                _model_thread=thread,
            )


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


def _compute(options: InstanceOptions) -> ComputeOptions:
    return ComputeOptions(
        kernels=options.kernels, threads=options.threads, cpus=options.cpus, share_in=options.share_weights_in
    )


def _place_model_thread(num_torch_threads: int, cpus: Sequence[int]) -> None:
    torch.set_num_threads(num_torch_threads)  # torch counts them for each thread that calls it
    if cpus:
        os.sched_setaffinity(0, cpus[:1])


def described_fabric(options: InstanceOptions) -> str:
    """How peers reach its memory."""
    if options.role == "colocated":
        return "no fabric"
    ways = ", ".join(options.transports)
    return ways if set(options.transports) <= set(NEAR) else f"{ways} at {', '.join(options.fabric_hosts)}"
