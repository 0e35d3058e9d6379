"""No kernel reads or writes outside of the arrays that it was handed, by a byte before or behind."""

import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from guarded_kernels import Guarded
from native_worlds import needs_kernels

PROGRAM = Path(__file__).with_name("guarded_kernels.py")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=100)


@needs_kernels
def test_no_kernel_touches_what_lies_beside_its_arrays() -> None:
    done = run("-X", "faulthandler", str(PROGRAM))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 1000


@pytest.mark.parametrize("at_end", [False, True])
def test_memory_beside_a_guarded_array_is_forbidden(at_end: bool) -> None:
    """Else the test above would prove nothing."""
    for size in (1, 7, 4096, 5000):
        assert Guarded(at_end)(size, np.uint8).sum() == 0
    touch = f"import ctypes, numpy; from guarded_kernels import *; a = Guarded({at_end})(7, numpy.uint8);"
    place = "at(a) + 7" if at_end else "at(a) - 1"
    done = run("-c", f"import sys; sys.path.insert(0, {str(PROGRAM.parent)!r}); {touch} ctypes.string_at({place}, 1)")
    assert done.returncode == -signal.SIGSEGV
