"""The threads of the native kernels: more of them than cores, at rest, at work beside each other, and at their end."""

import itertools
import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing

import pytest
import torch
from native_worlds import (
    Way,
    angles,
    bf16,
    drawn,
    each_set,
    empty_view,
    fill,
    native_ops,
    needs_kernels,
    paged,
    same_bits,
    shape_of,
    whole_numbers,
    zeros,
)

from headrace.errors import InputError
from headrace.model import _cpu
from headrace.model.native_ops import NativeOps
from headrace.model.ops import HeadNorms

pytestmark = needs_kernels


def layer_of(ops: NativeOps, seed: int) -> Callable[[], torch.Tensor]:
    """A call that gives all kernels of a layer work for all threads."""
    shape = shape_of(num_heads=4, num_kv_heads=2)
    batch, num_pages = paged([(20, 1), (0, 40), (70, 1), (3, 30)], page_size=8, seed=seed)
    view = empty_view(num_pages, shape, 8)
    for row in range(batch.num_rows):
        fill(view, batch, row, drawn(int(batch.positions[batch.qo_indptr[row]]), 2, 2, 32, seed=seed + row))
    attention = ops.attention(batch, 8, *angles(batch, 32))
    qkv, out = ops.linear(bf16(drawn(8 * 32, 96, seed=seed))), ops.linear(bf16(drawn(96, 4 * 32, seed=seed)))
    gated = ops.gated_linear(*(bf16(drawn(96, 96, seed=seed + i)) for i in range(2)))
    norm, start = drawn(96, seed=seed), drawn(batch.num_tokens, 96, seed=seed)

    def layer() -> torch.Tensor:
        x = start.clone()
        q = attention.append(qkv.apply(ops.rms_norm(x, norm, 1e-5)), view)
        out.add_to(x, attention.attend(q, view))
        ops.add_rms_norm(x, gated.apply(ops.rms_norm(x, norm, 1e-5)).float(), norm, 1e-5)
        return x

    return layer


@each_set
def test_many_calls_with_more_threads_than_cores_agree(instruction_set: str) -> None:
    with native_ops(Way(instruction_set, 1), shape_of(num_heads=4, num_kv_heads=2)) as ops:
        expected = layer_of(ops, seed=0)()
    with native_ops(Way(instruction_set, 3), shape_of(num_heads=4, num_kv_heads=2)) as ops:
        layer = layer_of(ops, seed=0)
        for _ in range(200):
            assert same_bits(layer(), expected)


@each_set
def test_threads_that_fell_asleep_between_calls_are_woken(instruction_set: str) -> None:
    weight, inputs = bf16(whole_numbers(300, 64)), bf16(whole_numbers(5, 64, seed=1))
    expected = inputs.float() @ weight.float().T
    with native_ops(Way(instruction_set, 3)) as ops:
        linear = ops.linear(weight)
        for pause_s in (0, 0.001, 0.01, 0, 0.02):
            time.sleep(pause_s)
            assert torch.equal(linear.apply(inputs), expected)


def tasks() -> set[int]:
    return {int(task) for task in os.listdir("/proc/self/task")}


def require_ended(threads: set[int]) -> None:
    """A thread that was joined is listed for a moment longer."""
    give_up_s = time.monotonic() + 10
    while threads & tasks():
        assert time.monotonic() < give_up_s, f"{threads & tasks()} live on"
        time.sleep(0.001)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_closing_ends_the_threads_and_closing_again_does_nothing(num_threads: int) -> None:
    before = tasks()
    kernels = _cpu.Kernels(_cpu.instruction_sets()[0], (), num_threads)
    others = tasks() - before
    assert kernels.num_threads == num_threads and len(others) == num_threads - 1
    kernels.close()
    require_ended(others)
    kernels.close()


def test_kernels_that_nobody_closed_end_their_threads() -> None:
    before = tasks()
    kernels = _cpu.Kernels(_cpu.instruction_sets()[0], (), 3)
    others = tasks() - before
    assert len(others) == 2
    del kernels
    require_ended(others)


def test_threads_that_cannot_be_pinned_are_ended() -> None:
    before = tasks()
    with pytest.raises(InputError, match="CPUs that this process may use"):
        _cpu.Kernels(_cpu.instruction_sets()[0], (0, min(os.sched_getaffinity(0)), 1023), 3)
    require_ended(tasks() - before)


def test_other_threads_are_pinned_where_cpus_are_named() -> None:
    mine, before = os.sched_getaffinity(0), tasks()
    cpu = min(mine)
    with closing(_cpu.Kernels(_cpu.instruction_sets()[0], (cpu, cpu), 3)):
        of_others = [os.sched_getaffinity(task) for task in sorted(tasks() - before)]
        assert os.sched_getaffinity(0) == mine
    assert sorted(of_others, key=len) == sorted([{cpu}, mine], key=len)  # the third runs anywhere


def test_idle_threads_burn_no_cpu() -> None:
    weight, inputs = bf16(drawn(300, 64)), bf16(drawn(5, 64))
    with native_ops(Way(_cpu.instruction_sets()[0], 3)) as ops:
        ops.linear(weight).apply(inputs)
        time.sleep(0.02)  # they stay awake for some 50 us, longer where others are running
        before_s = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - before_s < 0.02


# ---- beside Python's threads ---------------------------------------------------------------------------------------


@each_set
def test_two_kernels_compute_at_once_in_two_threads(instruction_set: str) -> None:
    shape, failures = shape_of(num_heads=4, num_kv_heads=2), []
    with ExitStack() as opened:
        layers = [layer_of(opened.enter_context(native_ops(Way(instruction_set, 2), shape)), seed) for seed in (0, 9)]
        expected = [layer() for layer in layers]
        begin = threading.Barrier(2)

        def run(number: int) -> None:
            begin.wait()
            failures.extend(number for _ in range(100) if not same_bits(layers[number](), expected[number]))

        threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not same_bits(*expected) and not failures


def long_calls(ops: NativeOps) -> dict[str, Callable[[], object]]:
    """Of one thread, ten milliseconds each or more: several turns of the system's scheduler."""
    inputs, weight = torch.ones(200, 1024, dtype=torch.bfloat16), torch.ones(4000, 1024, dtype=torch.bfloat16)
    linear, gated, x = ops.linear(weight), ops.gated_linear(weight[:2000], weight[2000:]), torch.ones(200, 4000)
    batch, num_pages = paged([(0, 24_000)], page_size=16)
    view = torch.zeros(num_pages, 1, 2, 16, 256, dtype=torch.bfloat16)
    attention = ops.attention(batch, 16, *angles(batch, 256), window=9)
    qkv, q = torch.ones(24_000, 4 * 256), torch.ones(24_000, 2, 256, dtype=torch.bfloat16)
    norms = HeadNorms(q=torch.ones(256), k=torch.ones(256), eps=1e-5)
    rows, of_norm, memory = torch.ones(6000, 4000), torch.ones(4000), zeros(1 << 24)
    return {
        "linear": lambda: linear.apply(inputs),
        "linear_add": lambda: linear.add_to(x, inputs),
        "gated_linear": lambda: gated.apply(inputs),
        "rms_norm": lambda: ops.rms_norm(rows, of_norm, 1e-5),
        "add_rms_norm": lambda: ops.add_rms_norm(rows, rows, of_norm, 1e-5),
        "append": lambda: attention.append(qkv, view, norms),
        "attend": lambda: attention.attend(q, view),
        "read": lambda: _cpu.read(memory, 40),
    }


def duration_s(call: Callable[[], object]) -> float:
    begin_s = time.perf_counter()
    call()
    return time.perf_counter() - begin_s


def longest_silence_s(call: Callable[[], object]) -> float:
    """Of this thread's Python, while the call goes on in another."""
    thread = threading.Thread(target=call)
    turns_s = [time.perf_counter()]
    thread.start()
    while thread.is_alive():
        turns_s.append(time.perf_counter())
    turns_s.append(time.perf_counter())
    return max(after_s - before_s for before_s, after_s in itertools.pairwise(turns_s))


def python_goes_on(call: Callable[[], object]) -> bool:
    """A call that kept the GIL would always silence the others as long as it takes. One that does not may: the system
    lets this thread wait for its own reasons, but not every time."""
    durations_s, silences_s = [], []
    for _ in range(8):
        for _ in range(5):
            durations_s.append(duration_s(call))
            silences_s.append(longest_silence_s(call))
        if min(silences_s) < 0.6 * min(durations_s):
            return True
    return False


def test_python_goes_on_during_every_call() -> None:
    with native_ops(Way("avx512_bf16", 1), shape_of(head_dim=256)) as ops:
        for name, call in long_calls(ops).items():
            assert python_goes_on(call), name
