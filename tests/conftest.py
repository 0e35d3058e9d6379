"""What all tests share: the device marks, their order, and hypothesis without deadlines."""

import gc
import logging
import os
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from headrace.model.builtin import ensure_builtin
from headrace.model.progress import no_progress

# Two cores are shared with whatever else runs: a slow example is no finding. CI repeats its examples exactly.
settings.register_profile("house", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.register_profile("house-ci", settings.get_profile("house"), derandomize=True)
settings.load_profile("house-ci" if os.environ.get("CI") else "house")


def has_gpu() -> bool:
    return any(Path("/proc/driver/nvidia/gpus").glob("*"))


def infiniband_drivers() -> set[str]:
    links = Path("/sys/class/infiniband").glob("*/device/driver")
    return {link.resolve().name for link in links}


DEVICES: Mapping[str, Callable[[], bool]] = {
    "gpu": has_gpu,
    "efa": lambda: "efa" in infiniband_drivers(),
    "verbs": lambda: bool(infiniband_drivers() - {"efa"}),
}


LONGEST = ("test_ticket_life.py", "test_random_histories.py")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """The cycle collector does not walk over what stays, neither while it comes nor again and again during the tests:
    that took a third of the collection, and a tenth of what allocates much."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Those that measure time come first, then those that take longest, so that at the end no worker is alone with one.
    Leave out the tests whose device is not here: they count as deselected, not as passed."""
    items.sort(key=lambda item: (item.get_closest_marker("timing") is None, item.path.name not in LONGEST))
    absent = {mark for mark, is_here in DEVICES.items() if not is_here()}
    left_out = [item for item in items if any(item.get_closest_marker(mark) for mark in absent)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """What a command sets when it is run in this process is not left to the next test."""
    ours = logging.getLogger("headrace")
    level = ours.level
    yield
    ours.setLevel(level)
    logging.captureWarnings(False)


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder for sockets, whose paths have 107 bytes: those of `tmp_path` grow with the runs on a machine."""
    with tempfile.TemporaryDirectory(prefix="run-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The directory of the built-in model, fetched at first."""
    return ensure_builtin(no_progress)
