"""A rank process of an instance: it loads its shard of the model and computes its part of each step.

Owns the shard, its view of the KV memory, and nothing that must be given back: its lead kills it, and the kernel does
when the lead is gone. Signals that end processes are its lead's to hear (they come to a whole group), so they stay
blocked here. The model runs on the main thread; the pulse is a thread of its own.
"""

import ctypes
import logging
import os
import signal
import socket
import threading
from contextlib import suppress
from pathlib import Path

import torch

from headrace.engine.runner import Runner
from headrace.engine.step_memory import StepMemory
from headrace.errors import InputError, RankLost
from headrace.kvcache.memory import PoolMemory
from headrace.kvcache.pool import layer_views
from headrace.roles.ranks.messages import BEAT_S, Compute, Computed, Failed, Here, Loaded, RankTask, Refused
from headrace.roles.ranks.messages import receive as receive_from
from headrace.roles.ranks.messages import send as send_to
from headrace.roles.ranks.model import meet, open_rank_model, place_model_thread

_PR_SET_PDEATHSIG = 1

_log = logging.getLogger(__name__)


def run_rank(*, lead_pid: int, lead_fd: int, pulse_fd: int, steps_fd: int) -> None:
    """Until its lead ends it. What it cannot load it tells the lead."""
    _die_with(lead_pid)
    threading.Thread(target=_beat, args=(pulse_fd,), name="pulse", daemon=True).start()
    with socket.socket(fileno=lead_fd) as lead:
        task = receive_from(lead)
        assert isinstance(task, RankTask), f"no task but {task!r}"
        try:
            _compute_steps(task, lead, StepMemory(task.limits, task.options.dp, steps_fd))
        except InputError as error:
            send_to(lead, Refused.of(error))
        except (RankLost, OSError) as failure:
            send_to(lead, Failed(text=str(failure)))
        while lead.recv(1):  # the lead ends us, when it has read that
            pass


def _compute_steps(task: RankTask, lead: socket.socket, steps: StepMemory) -> None:
    send_to(lead, Here())
    options, layout, group = task.options, task.layout, task.rank // task.options.tp
    with (
        meet(options, rank=task.rank, meeting_points=Path(task.meeting_points)) as parallel,
        open_rank_model(options, rank=task.rank, fingerprint=task.fingerprint, parallel=parallel) as model,
    ):
        _, (memory_fd,), _, _ = socket.recv_fds(lead, 1, 1)
        memory = PoolMemory(layout.total_bytes, memory_fd)
        views = layer_views(memory, layout, task.rank)
        runner = Runner(model, views, page_size=layout.kv.page_size, num_pages=layout.num_pages)
        place_model_thread(torch.get_num_threads(), options.cpus_of(task.rank))
        send_to(lead, Loaded())
        while isinstance(receive_from(lead), Compute):
            send_to(lead, _compute_step(runner, steps, group, draws_tokens=task.rank % options.tp == 0))


def _compute_step(runner: Runner, steps: StepMemory, group: int, *, draws_tokens: bool) -> Computed | Refused | Failed:
    batch, draws = steps.read(group)
    try:
        tokens = runner.compute(batch, draws if draws_tokens else ())
    except InputError as error:
        return Refused.of(error)
    except (RuntimeError, MemoryError) as error:
        # Where another rank has died this is how the others notice: of one end the lead tells, not of each.
        _log.debug("a step failed", exc_info=True)
        return Failed(text=str(error))
    if draws_tokens:
        steps.write_tokens(group, tokens)
    return Computed()


def _die_with(lead_pid: int) -> None:
    """From now on the kernel kills this process when the lead ends, however that does."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL):
        code = ctypes.get_errno()
        raise OSError(code, f"prctl(PR_SET_PDEATHSIG): {os.strerror(code)}")
    if os.getppid() != lead_pid:  # it has ended already
        os._exit(1)


def _beat(pulse_fd: int) -> None:
    """Off the main thread: a heart beats while the model computes."""
    os.set_blocking(pulse_fd, False)
    never = threading.Event()
    while not never.wait(BEAT_S):
        with suppress(BlockingIOError):  # the lead is stopped; it finds enough beats when it goes on
            os.write(pulse_fd, b".")
