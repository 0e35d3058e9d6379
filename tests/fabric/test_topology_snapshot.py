"""Reading sysfs: from directories of every kind without ever failing, from files with the line that is wrong."""

import os
import platform
import re
from pathlib import Path

import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from sysfs_trees import ALL, CONNECTX, EFA, GUEST, TREES, laid_out, tree, without

from headrace.errors import InputError
from headrace.fabric.topology import snapshot as snapshots
from headrace.fabric.topology.cpus import cpu_text, parse_cpus
from headrace.fabric.topology.parse import parse_topology
from headrace.fabric.topology.snapshot import (
    FIRST_LINE,
    Snapshot,
    format_snapshot,
    parse_recording,
    read_directory,
    read_machine,
    read_recording,
)


@pytest.mark.parametrize("name", ALL)
def test_a_recording_is_read_as_it_was_written(name: str) -> None:
    assert parse_recording(format_snapshot(tree(name))) == tree(name)


@pytest.mark.parametrize("name", ALL)
def test_a_directory_laid_out_as_sys_reads_as_its_recording(name: str, tmp_path: Path) -> None:
    laid_out(tree(name), tmp_path)
    assert read_directory(tmp_path, cpus_allowed=tree(name).cpus_allowed) == tree(name)


def test_functions_behind_nics_are_read_though_the_list_of_pci_devices_is_hidden(tmp_path: Path) -> None:
    laid_out(without(tree(EFA), lambda path: path == "bus/pci/devices"), tmp_path)
    seen = read_directory(tmp_path)
    nics = [path for path in seen.tree if re.search(r":00\.0$", path)]
    assert len(nics) == 33
    assert {seen.tree[path]["class"] for path in nics} == {"0x020000"}


def test_devices_that_have_nothing_to_do_with_a_link_are_left_out(tmp_path: Path) -> None:
    laid_out(tree(GUEST), tmp_path)
    disk = tmp_path / "devices/pci0000:00/0000:00:02.0"
    disk.mkdir()
    (disk / "class").write_text("0x018000\n")
    (tmp_path / "bus/pci/devices/0000:00:02.0").symlink_to("../../../devices/pci0000:00/0000:00:02.0")
    assert read_directory(tmp_path).tree == tree(GUEST).tree


def test_the_machine_that_we_are_on_reads_without_names_and_addresses() -> None:
    text = format_snapshot(read_machine())
    addresses = [file.read_text().strip() for file in Path("/sys/class/net").glob("*/address")]
    for secret in (platform.node(), *addresses):
        assert len(secret) < 3 or set(secret) <= set("0:") or secret not in text
    assert parse_recording(text) == read_machine()
    assert read_machine().cpus_allowed == tuple(sorted(os.sched_getaffinity(0)))


@pytest.mark.parametrize("name", ALL)
def test_the_trees_of_the_tests_hold_only_what_is_read(name: str) -> None:
    names = {key for texts in tree(name).tree.values() for key in texts}
    assert names <= {"driver", *(text for texts in snapshots._TEXTS.values() for text in texts)}


@pytest.mark.parametrize("name", [EFA, CONNECTX])
def test_trees_that_were_not_read_from_a_machine_say_so_and_name_their_sources(name: str) -> None:
    head = (TREES / f"{name}.txt").read_text().split("\n\n")[0]
    assert "SYNTHETIC" in head and "Sources" in head


# ---- directories in which something is not as it should be -----------------------------------------------------


def test_a_directory_with_nothing_of_sysfs_is_an_empty_snapshot(tmp_path: Path) -> None:
    assert read_directory(tmp_path) == Snapshot(tree={})
    assert read_directory(tmp_path / "missing") == Snapshot(tree={})


@pytest.mark.timeout(20)
def test_what_is_neither_file_nor_directory_counts_as_unreadable(tmp_path: Path) -> None:
    laid_out(tree(GUEST), tmp_path)
    function = tmp_path / "devices/pci0000:00/0000:00:03.0"
    for name in ("vendor", "device", "numa_node", "driver"):
        (function / name).unlink()
    os.mkfifo(function / "vendor")  # opening it would wait for a writer
    (function / "device").mkdir()
    (function / "numa_node").symlink_to("/proc/self/stat")
    (function / "driver").write_text("no link")
    (tmp_path / "class/net/eth9").symlink_to("eth9")
    (tmp_path / "class/net/eth8").symlink_to("/proc/self")
    seen = read_directory(tmp_path)
    assert seen.tree["devices/pci0000:00/0000:00:03.0"] == {"class": "0x020000"}
    assert not any("eth8" in path or "proc" in path for path in seen.tree)
    assert [nic.name for nic in parse_topology(seen).nics] == ["eth0"]


def test_texts_that_would_disturb_a_terminal_or_a_recording_are_made_plain(tmp_path: Path) -> None:
    laid_out(tree(GUEST), tmp_path)
    interface = "devices/pci0000:00/0000:00:03.0/virtio2/net/e\x1b[31m\tx"
    (tmp_path / interface).mkdir()
    (tmp_path / interface / "operstate").write_bytes(b"up\x07\xff\nmore\n")
    (tmp_path / "class/net/e\x1b[31m\tx").symlink_to(f"../../{interface}")
    seen = read_directory(tmp_path)
    plain = "devices/pci0000:00/0000:00:03.0/virtio2/net/e?[31m?x"
    assert seen.tree[plain]["operstate"] == "up?\ufffd"
    assert parse_recording(format_snapshot(seen)) == seen


# ---- files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("", "whose first line is '# headrace sysfs 1'"),
        ("# headrace sysfs 2\n", "whose first line is"),
        (f"{FIRST_LINE}\nclass/net\nclass/net\n", "line 3: must name each directory once, class/net was there before"),
        (f"{FIRST_LINE}\n/sys/class/net\n", "line 2: must begin with a directory below /sys"),
        (f"{FIRST_LINE}\ndevices/../../etc\n", "line 2: must begin with a directory below /sys"),
        (f"{FIRST_LINE}\ndevices/\x1b[2J\n", "line 2: must begin with a directory below /sys"),
        (f"{FIRST_LINE}\nclass/net\tclass\n", "line 2: must have fields such as class=0x020000"),
        (f"{FIRST_LINE}\nclass/net\tclass=1\tclass=2\n", "line 2: must have fields such as class=0x020000"),
        (f"{FIRST_LINE}\nclass/net\tclass=\x1b[2J\n", "line 2: must have fields such as class=0x020000"),
        (f"{FIRST_LINE}\ncpus_allowed\tall\n", "line 2: must be CPUs such as 0-3,8"),
        (f"{FIRST_LINE}\ncpus_allowed\t0-99999\n", "line 2: must be CPUs such as 0-3,8"),
        (f"{FIRST_LINE}\ncpus_allowed\n", "line 2: must be CPUs such as 0-3,8"),
    ],
)
def test_a_file_that_is_no_recording_is_refused_with_its_line(lines: str, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        parse_recording(lines)


def test_a_recording_may_have_been_through_an_editor_of_another_system() -> None:
    text = (TREES / f"{GUEST}.txt").read_text()
    assert parse_recording(text.replace("\n", "\r\n") + "\r\n\r\n") == tree(GUEST)


def test_files_that_are_too_large_or_no_text_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "recording"
    file.write_bytes(FIRST_LINE.encode() + b"\n\xff\n")
    with pytest.raises(InputError, match="must be a recording, which is text in UTF-8"):
        read_recording(file)
    monkeypatch.setattr(snapshots, "MOST_FILE_BYTES", 2**20)
    file.write_bytes(b"#" * (2**20 + 1))
    with pytest.raises(InputError, match="at most 1 MiB"):
        read_recording(file)


@given(st.data())
def test_a_damaged_recording_is_read_or_refused_and_what_is_read_can_be_parsed(data: st.DataObject) -> None:
    lines = (TREES / f"{data.draw(st.sampled_from(ALL))}.txt").read_text().splitlines()
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(lines) - 1))
        cut = data.draw(st.integers(0, len(lines[at])))
        lines[at] = lines[at][:cut] + data.draw(st.text(max_size=4)) + lines[at][cut + data.draw(st.integers(0, 3)) :]
    try:
        seen = parse_recording("\n".join(lines))
    except InputError as error:
        event(error.field)
        return
    parse_topology(seen)
    assert parse_recording(format_snapshot(seen)) == seen


# ---- lists of CPUs ---------------------------------------------------------------------------------------------


@given(st.frozensets(st.integers(0, 300)))
def test_a_list_of_cpus_is_read_as_it_was_written(cpus: frozenset[int]) -> None:
    assert parse_cpus(cpu_text(cpus)) == tuple(sorted(cpus))


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("0-2,8", (0, 1, 2, 8)),
        ("8,0-2,1", (0, 1, 2, 8)),
        ("", ()),
        ("3-1", None),
        ("a", None),
        ("0,,1", None),
        ("-1", None),
        ("65536", None),
    ],
)
def test_what_is_no_list_of_cpus_is_none(text: str, cpus: tuple[int, ...] | None) -> None:
    assert parse_cpus(text) == cpus
