"""Packed weights: one memory for all processes that want it, whichever of them dies; none that may not be believed."""

import errno
import gc
import logging
import os
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from packed_process import CAPACITY, KEY, SIZES, PackingProcess, fill, is_whole

from headrace.errors import Closed, InputError
from headrace.kvcache import mapping
from headrace.kvcache.mapping import HUGE_PAGE_BYTES
from headrace.model import packed as packed_module
from headrace.model.holders import Holder
from headrace.model.packed import PackedWeights, RegionsDiffer, load_packed, open_packed, read_rate_gbps


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "run" / "weights"


def opened(directory: Path | None, key: str = KEY) -> PackedWeights:
    return open_packed(key, capacity_bytes=CAPACITY, directory=directory)


def sealed(directory: Path | None, key: str = KEY) -> PackedWeights:
    packed = opened(directory, key)
    fill(packed)
    packed.seal()
    return packed


def inode(packed: PackedWeights) -> int:
    return os.fstat(packed._fd).st_ino


def descriptors() -> list[str]:
    """Of files of ours: memories and locks."""
    paths = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    links = [os.readlink(path) for path in paths if os.path.lexists(path)]  # listing had one too
    return [link for link in links if "headrace-weights" in link or link.endswith(".lock")]


def entries(directory: Path) -> list[str]:
    return sorted(path.suffix for path in directory.iterdir())


# ---- several processes -----------------------------------------------------------------------------------------


def test_the_second_process_maps_what_the_first_packed_and_outlives_it(directory: Path) -> None:
    with PackingProcess(directory) as first, ExitStack() as stack:
        packed = first.sealed()
        second = stack.enter_context(PackingProcess(directory))
        assert second.hears() == {"is_filled": True, "shared_with": first.pid}
        assert second.hears() == {"is_filled": True, "inode": packed["inode"], "seen": 1}
        first.process.kill()
        first.process.wait()
        second.say("check")
        assert second.hears() == {"is_whole": True}
        third = sealed(directory)
        with closing(third):
            assert (third.is_filled, third.shared_with, third.num_holders_seen) == (True, second.pid, 1)
            assert inode(third) == packed["inode"]
        assert second.end() == 0
    assert entries(directory) == [".lock"]


def test_of_four_that_start_at_once_one_packs(directory: Path) -> None:
    with ExitStack() as stack:
        processes = [stack.enter_context(PackingProcess(directory)) for _ in range(4)]
        said = [process.sealed() for process in processes]
        assert sorted(one["is_filled"] for one in said) == [False, True, True, True]
        assert len({one["inode"] for one in said}) == 1
        assert sorted(one["seen"] for one in said) == [0, 1, 2, 3]
        for process in processes:
            process.say("check")
            assert process.hears() == {"is_whole": True}


def test_a_packer_that_dies_half_way_leaves_nothing_that_is_believed_and_the_one_that_waits_packs(
    directory: Path,
) -> None:
    with PackingProcess(directory, "hold") as first:
        assert first.hears() == {"is_filled": False, "shared_with": None}
        with PackingProcess(directory) as second:
            first.process.kill()
            assert second.hears() == {"is_filled": False, "shared_with": None}
            assert second.hears()["is_filled"] is False
    with PackingProcess(directory, "die") as third:
        assert third.hears()["is_filled"] is False
        assert third.process.wait() == -9
    with closing(sealed(directory)) as packed:
        assert not packed.is_filled
    assert entries(directory) == [".lock"]


def test_a_stray_write_of_the_packer_faults(directory: Path) -> None:
    with PackingProcess(directory) as first:
        first.sealed()
        with closing(opened(directory)) as mine:
            assert is_whole(fill(mine))
            mine.seal()
            first.say("write")
            assert first.process.wait() == -11


def test_a_process_that_ends_without_closing_takes_its_entry_with_it(directory: Path) -> None:
    with PackingProcess(directory, "leave") as first:
        first.sealed()
        assert first.process.wait() == 0
    assert entries(directory) == [".lock"]


def test_a_fork_that_ends_leaves_the_entry_of_its_parent(directory: Path) -> None:
    packed = sealed(directory)
    child = os.fork()
    if child == 0:
        packed.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert entries(directory) == [".holder", ".lock"]
    packed.close()
    assert entries(directory) == [".lock"]


# ---- one process -----------------------------------------------------------------------------------------------


def test_regions_are_aligned_zeroed_and_in_order() -> None:
    with closing(opened(None)) as packed:
        regions = [packed.region(size) for size in (1, 64, 65, 10)]
        begins = [region.ctypes.data for region in regions]
        assert [begin - begins[0] for begin in begins] == [0, 64, 128, 256]
        assert begins[0] % 64 == 0
        assert not any(region.any() for region in regions)
        assert [len(region) for region in regions] == [1, 64, 65, 10]
        assert packed.num_bytes == 140
        assert (packed.is_filled, packed.shared_with) == (False, None)


def test_what_is_filled_is_read_only(directory: Path) -> None:
    with closing(sealed(directory)), closing(opened(directory)) as second:
        region = second.region(SIZES[0])
        with pytest.raises(ValueError, match="read-only"):
            region[0] = 1
        with pytest.raises(ValueError, match="cannot set WRITEABLE"):
            region.flags.writeable = True


def test_what_is_not_used_of_the_capacity_is_given_back() -> None:
    with closing(opened(None)) as packed:
        fill(packed)
        assert os.fstat(packed._fd).st_size > CAPACITY
        packed.seal()
        assert os.fstat(packed._fd).st_size == 4 << 20  # 3.7 MiB are used
        assert os.fstat(packed._fd).st_blocks * 512 == 4 << 20 or not packed.huge_pages


def test_all_of_the_capacity_can_be_used() -> None:
    with closing(open_packed(KEY, capacity_bytes=6 << 20, directory=None)) as packed:
        for _ in range(6000):
            packed.region(1 << 10)[:] = 1
        packed.seal()
    with closing(open_packed(KEY, capacity_bytes=1, directory=None)) as packed, pytest.raises(AssertionError):
        packed.region(8 << 20)


def test_a_capacity_of_nothing_is_refused() -> None:
    with pytest.raises(InputError, match="capacity_bytes: must be at least 1, is 0"):
        open_packed(KEY, capacity_bytes=0, directory=None)


def test_without_a_directory_nothing_is_shared() -> None:
    with closing(sealed(None)) as first, closing(sealed(None)) as second:
        assert not first.is_filled and not second.is_filled
        assert inode(first) != inode(second)


def test_another_key_is_another_memory(directory: Path) -> None:
    with closing(sealed(directory)) as first, closing(sealed(directory, "another model")) as second:
        assert not second.is_filled
        assert inode(first) != inode(second)


def test_closing_leaves_neither_descriptors_nor_entries_nor_locks_and_may_be_repeated(directory: Path) -> None:
    before = descriptors()
    packer, mapper, unsealed = sealed(directory), sealed(directory), opened(directory, "another model")
    assert len(descriptors()) == len(before) + 4  # the last one holds its lock too
    assert entries(directory) == [".holder", ".holder", ".lock", ".lock"]
    for packed in (packer, mapper, unsealed) * 2:
        packed.close()
        assert repr(packed).endswith("closed)")
    assert descriptors() == before
    assert entries(directory) == [".lock", ".lock"]
    with pytest.raises(Closed):
        unsealed.region(1)
    with pytest.raises(Closed):
        unsealed.seal()


def test_one_that_is_forgotten_leaves_nothing_either(directory: Path) -> None:
    before = descriptors()
    packed = sealed(directory)
    unsealed = opened(directory, "another model")
    del packed, unsealed
    gc.collect()
    assert descriptors() == before
    assert entries(directory) == [".lock", ".lock"]


def test_views_outlive_the_closing(directory: Path) -> None:
    with closing(sealed(directory)):
        mapper = opened(directory)
        regions = fill(mapper)
        mapper.close()
    del mapper
    gc.collect()
    assert is_whole(regions)


def test_it_says_what_it_has(directory: Path) -> None:
    with closing(opened(directory)) as packed:
        fill(packed)
        assert repr(packed) == (
            "PackedWeights(regions=4, bytes=3846793, holders_seen=0, huge_pages=False, packed here, open)"
        )
        packed.seal()
        with closing(sealed(directory)) as second:
            assert repr(second).startswith("PackedWeights(regions=4, bytes=3846793, holders_seen=1, huge_pages=")
            assert repr(second).endswith(f"of pid {os.getpid()}, sealed)")


# ---- other regions than were packed ----------------------------------------------------------------------------

OTHER_SIZES = {
    "one of another size": (1000, 2 << 20, 64, 700_001),
    "fewer": SIZES[:-1],
    "more": (*SIZES, 64),
    "the same in another order": (1000, 64, 3 << 20, 700_001),
}


@pytest.mark.parametrize("sizes", OTHER_SIZES.values(), ids=OTHER_SIZES)
def test_who_wants_other_regions_packs_its_own_with_a_warning(
    directory: Path, sizes: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    with closing(sealed(directory)) as first:
        regions, own = load_packed(
            KEY, lambda packed: fill(packed, sizes), capacity_bytes=CAPACITY, directory=directory
        )
        with closing(own):
            assert not own.is_filled
            assert inode(own) != inode(first)
            assert is_whole(regions)
            assert entries(directory) == [".holder", ".lock"]  # nobody is led to the other form
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warning.startswith("weights are packed for this process alone: ")
    assert KEY in warning


def test_who_wants_the_same_regions_gets_them_loaded_and_sealed(directory: Path) -> None:
    with closing(sealed(directory)) as first:
        regions, second = load_packed(KEY, fill, capacity_bytes=CAPACITY, directory=directory)
        with closing(second):
            assert second.is_filled and inode(second) == inode(first)
            assert is_whole(regions)
            assert second.read_gbps is not None


def test_other_regions_are_an_error_of_ours_where_nobody_loads_again(directory: Path) -> None:
    with closing(sealed(directory)), closing(opened(directory)) as second:
        with pytest.raises(RegionsDiffer, match="region 0 is asked for with 7 bytes"):
            second.region(7)
        with pytest.raises(RegionsDiffer, match="0 regions are asked for, 4 were packed"):
            second.seal()


def test_a_loading_that_fails_lets_the_next_one_pack(directory: Path) -> None:
    def fail(packed: PackedWeights) -> None:
        packed.region(10)
        raise InputError("model", "must be whole")

    before = descriptors()
    with pytest.raises(InputError, match="must be whole"):
        load_packed(KEY, fail, capacity_bytes=CAPACITY, directory=directory)
    assert descriptors() == before
    with closing(sealed(directory)) as packed:
        assert not packed.is_filled


# ---- where nothing can be shared -------------------------------------------------------------------------------


def unshared_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    begin = "weights are not shared with other processes: "
    return [line.removeprefix(begin) for line in caplog.messages if line.startswith(begin)]


def test_where_the_system_keeps_processes_apart_each_packs_and_says_why(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(holder: Holder, name: str) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), f"/proc/{holder.pid}/fd/{holder.fd}")

    caplog.set_level(logging.INFO)
    with closing(sealed(directory)) as first:
        monkeypatch.setattr(Holder, "open", refuse)
        before = descriptors()
        with closing(sealed(directory)) as second:
            assert not second.is_filled
            assert len(descriptors()) == len(before) + 1  # no lock
            assert entries(directory) == [".holder", ".lock"]  # of the first, whom others may be allowed to look at
        (line,) = unshared_lines(caplog)
        assert line == f"[Errno 13] Permission denied: '/proc/{os.getpid()}/fd/{first._fd}'"


def test_a_folder_that_is_not_this_users_alone_is_not_used(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    directory.mkdir(parents=True)
    directory.chmod(0o755)
    with closing(sealed(directory)) as packed:
        assert not packed.is_filled
    assert entries(directory) == []
    (line,) = unshared_lines(caplog)
    assert "must be a folder of this user's alone, mode 0700" in line


def test_a_folder_that_cannot_be_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    (tmp_path / "file").touch()
    with closing(sealed(tmp_path / "file")) as packed:
        assert not packed.is_filled
    (line,) = unshared_lines(caplog)
    assert "File exists" in line


def test_a_memory_that_cannot_be_sealed_is_used_alone(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(fd: int) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    caplog.set_level(logging.INFO)
    monkeypatch.setattr(packed_module, "add_seals", refuse)
    with closing(opened(directory)) as packed:
        regions = fill(packed)
        packed.seal()
        assert is_whole(regions)
        assert unshared_lines(caplog) == ["[Errno 22] Invalid argument"]
        assert entries(directory) == [".lock"]
        with closing(sealed(directory)) as second:  # which is not kept waiting
            assert not second.is_filled


# ---- huge pages and rates --------------------------------------------------------------------------------------


class ScriptedRates:
    """Reads nothing; knows what it was asked to read."""

    def __init__(self, *rates: float) -> None:
        self.rates = list(rates)
        self.asked: list[int] = []

    def __call__(self, array: NDArray[np.uint8]) -> float:
        self.asked.append(array.nbytes)
        return self.rates.pop(0)


def allow_huge_pages(monkeypatch: pytest.MonkeyPatch, allowed: bool) -> None:
    def advise(address: int, length: int, advice: int) -> None:
        assert address % HUGE_PAGE_BYTES == 0 and length == 4 << 20
        if not allowed:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(mapping, "_madvise", advise)


def test_the_packer_tells_the_rates_before_and_after_huge_pages(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allow_huge_pages(monkeypatch, True)
    rates = ScriptedRates(7.94, 9.06)
    with closing(opened(directory)) as packer, closing(opened(None)) as other:
        fill(packer)
        packer.seal(rates)
        assert packer.told(0.62) == "4 MB packed in 0.6 s, read at 9.1 GB/s (7.9 before huge pages)"
        assert rates.asked == [4 << 20, 4 << 20]
        with closing(opened(directory)) as mapper:
            fill(mapper)
            mapper.seal(ScriptedRates(8.8))  # once: it came with huge pages
            assert mapper.told(0.1) == f"4 MB shared with pid {os.getpid()}, read at 8.8 GB/s"
        assert other.told(0) == "0 MB packed in 0.0 s, read at 0.0 GB/s without huge pages"


def test_who_maps_a_memory_without_huge_pages_tries_for_all(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allow_huge_pages(monkeypatch, False)
    with closing(opened(directory)) as packer:
        fill(packer)
        packer.seal(ScriptedRates(7, 7.1))
        assert not packer.huge_pages
        assert packer.told(1) == "4 MB packed in 1.0 s, read at 7.1 GB/s without huge pages"
        allow_huge_pages(monkeypatch, True)
        with closing(opened(directory)) as mapper:
            fill(mapper)
            mapper.seal(ScriptedRates(7, 9))
            assert mapper.huge_pages
            assert mapper.told(1) == f"4 MB shared with pid {os.getpid()}, read at 9.0 GB/s (7.0 before huge pages)"


def test_no_more_is_read_than_measures_a_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_module, "_MOST_READ_BYTES", 1 << 20)
    rates = ScriptedRates(1, 2)
    with closing(opened(None)) as packed:
        fill(packed)
        packed.seal(rates)
    assert rates.asked == [1 << 20, 1 << 20]


def test_both_mappings_are_in_huge_pages_where_the_kernel_has_them(directory: Path) -> None:
    with closing(sealed(directory)) as packer, closing(sealed(directory)) as mapper:
        assert mapper.huge_pages == packer.huge_pages
        smaps = Path("/proc/self/smaps").read_text()
        (_, first), (_, second) = (smaps.split(f"{packed._memory.ctypes.data:x}-", 1) for packed in (packer, mapper))
        for text in (first, second):
            (line,) = [line for line in text.splitlines()[:30] if line.startswith("ShmemPmdMapped")][:1]
            assert int(line.split()[1]) == (4096 if packer.huge_pages else 0)


def test_a_read_takes_its_time_and_reads_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 10.5])
    monkeypatch.setattr(packed_module.time, "perf_counter", lambda: next(times))
    assert read_rate_gbps(np.ones(1001, np.uint8)) == pytest.approx(1001 / 0.5 / 1e9)
