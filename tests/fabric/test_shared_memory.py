"""Memory for transfers: views of it as arrays and tensors, and their places."""

import os

import numpy as np
import pytest
import torch

from headrace.errors import InputError
from headrace.fabric import SharedMemory


def test_arrays_and_tensors_are_views_of_the_same_file() -> None:
    memory = SharedMemory(1 << 16)
    array = memory.array((4, 8), np.float32, offset=4096)
    array[:] = 1.5
    tensor = torch.from_numpy(memory.array((16,), np.int16, offset=8192)).view(torch.bfloat16)
    tensor[:] = -2.0
    assert os.pread(memory.fd, 4, 4096) == np.float32(1.5).tobytes()
    assert os.pread(memory.fd, 2, 8192) == b"\x00\xc0"
    assert (memory.offset_of(array), memory.offset_of(tensor), memory.offset_of(array[2:])) == (4096, 8192, 4096 + 64)


def test_what_does_not_fit_is_not_aligned_or_lies_elsewhere_is_refused() -> None:
    memory = SharedMemory(1000)
    for shape, offset in (((1001,), 0), ((10,), 991), ((-1,), 0), ((1,), -1)):
        with pytest.raises(InputError, match="shape: .* do not fit in 1000 bytes"):
            memory.array(shape, np.uint8, offset=offset)
    with pytest.raises(InputError, match="offset: must be a multiple of 4"):
        memory.array(1, np.float32, offset=2)
    with pytest.raises(InputError, match="view: must lie in this memory"):
        memory.offset_of(np.zeros(4))
    with pytest.raises(InputError, match="view: must lie in this memory"):
        memory.offset_of(torch.zeros(4))
    with pytest.raises(InputError, match="view: must be contiguous"):
        memory.offset_of(memory.array((10, 10), np.uint8)[:, 0])
    with pytest.raises(InputError, match="num_bytes"):
        SharedMemory(0)


def test_it_keeps_its_length() -> None:
    memory = SharedMemory(4096)
    for length in (0, 8192):
        with pytest.raises(PermissionError):
            os.ftruncate(memory.fd, length)


def test_views_outlive_the_memory_and_the_descriptor_does_not() -> None:
    memory = SharedMemory(4096)
    fd, array = memory.fd, memory.array(4096, np.uint8)
    del memory
    array[:] = 7
    assert array.sum() == 7 * 4096
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
