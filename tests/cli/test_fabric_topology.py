"""`headrace fabric topology`: what a person sees in terminals of any width, what a machine reads, what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.app import run
from headrace.fabric.topology.snapshot import read_machine, read_recording

TREES = Path(__file__).parent.parent / "fabric" / "sysfs"
EFA, CONNECTX, GUEST = (TREES / f"{name}.txt" for name in ("efa_8gpu", "connectx_8gpu", "virtual_machine"))

Shown = Callable[..., str]


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shown:
    def show(*arguments: object, columns: int = 80) -> str:
        monkeypatch.setenv("COLUMNS", str(columns))
        assert run(["fabric", "topology", *map(str, arguments)]) == 0
        out, err = capsys.readouterr()
        assert err == ""
        return out

    return show


def rows(text: str, first: str) -> list[list[str]]:
    """Words of the lines that begin so."""
    return [line.split() for line in text.splitlines() if line.startswith(first)]


# ---- for people ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("file", [EFA, CONNECTX, GUEST], ids=lambda file: file.stem)
def test_no_line_is_wider_than_the_terminal(shown: Shown, file: Path, columns: int) -> None:
    text = shown("--sysfs", file, columns=columns)
    assert max(map(len, text.splitlines())) <= columns


def test_a_row_has_device_nics_distance_rate_and_cpus(shown: Shown) -> None:
    gpus = rows(shown("--sysfs", CONNECTX), "GPU ")
    assert gpus[0] == ["GPU", "0", "1b:00.0", "0", "mlx5_0", "same", "switch", "400", "0-55,112-167"]
    assert gpus[7] == ["GPU", "7", "df:00.0", "1", "mlx5_11", "same", "switch", "400", "56-111,168-223"]
    assert len(gpus) == 8


def test_four_nics_of_a_gpu_are_whole_names_in_eighty_columns(shown: Shown) -> None:
    text = shown("--sysfs", EFA)
    first = text.splitlines().index(next(line for line in text.splitlines() if line.startswith("GPU 7")))
    assert " rdmap198s0 rdmap199s0 " in text.splitlines()[first]
    assert text.splitlines()[first + 1].split() == ["rdmap200s0", "rdmap201s0"]


def test_a_nic_has_its_state_its_link_and_whom_it_serves(shown: Shown) -> None:
    text = shown("--sysfs", CONNECTX)
    assert rows(text, "mlx5_11 ") == [
        ["mlx5_11", "dc:00.0", "verbs", "1", "400", "32", "GT/s", "x16", "ibp220s0", "GPU", "7"]
    ]
    assert rows(text, "mlx5_7 ") == [
        ["mlx5_7", "aa:00.0", "verbs", "1", "down", "32", "GT/s", "x16", "ibp170s0f0", "(down)"]
    ]


def test_the_machine_stands_above_and_what_is_hidden_below(shown: Shown) -> None:
    text = shown("--sysfs", GUEST, columns=120)
    assert text.startswith("GPUs: none\nNUMA node 0: CPUs 0-1; distances 10\nCPUs that this process may use: 0-1\n")
    hidden = text.partition("Not visible here")[2].split("\n- ")[1:]
    assert [line.strip() for line in hidden] == [
        "RDMA devices (/sys/class/infiniband): no RDMA driver is loaded, or they are hidden from this process",
        "state or rate of eth0",
    ]
    assert "Not visible here" not in shown("--sysfs", EFA)


def test_a_nic_that_many_share_is_worth_knowing(shown: Shown) -> None:
    text = shown("--sysfs", EFA, "--transport", "tcp")
    assert "- enp71s0: shared by GPU 0-7, and so are its Gbit/s" in text
    assert "other node" in text and "same node" in text


def test_a_link_slower_than_its_port_and_far_cpus_are_worth_knowing(shown: Shown, tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    text = CONNECTX.read_text().replace("cpus_allowed\t0-223", "cpus_allowed\t56-57")
    lines = [line.replace("width=16", "width=8") if "driver=mlx5" in line else line for line in text.splitlines()]
    slow.write_text("\n".join(lines))
    text = " ".join(shown("--sysfs", slow).split())
    assert "- mlx5_0: its PCIe link carries 252 Gbit/s, less than its port" in text
    assert "mlx5_1:" not in text  # 200 Gbit/s pass
    assert "- GPU 0, GPU 1, GPU 2, GPU 3: no CPU near the NICs is known that this process may use" in text
    assert "any: 56-57" in text


def test_where_no_nic_serves_a_transport_that_is_said(shown: Shown) -> None:
    assert "No NIC is visible that is up and serves this" in shown("--sysfs", GUEST, "--transport", "verbs")


def test_names_from_outside_are_shown_as_they_are(shown: Shown, tmp_path: Path) -> None:
    file = tmp_path / "marked"
    file.write_text(GUEST.read_text().replace("net/eth0", "net/[red]:bug:[bold]"))
    assert "[red]:bug:[bold]" in shown("--sysfs", file)


def test_this_machine_is_shown_without_any_option(shown: Shown) -> None:
    assert shown().startswith("GPUs: ")


# ---- for machines ----------------------------------------------------------------------------------------------


def in_json(text: str) -> Any:
    return json.loads(text)


def test_json_has_groups_and_all_that_they_were_made_of(shown: Shown) -> None:
    whole = in_json(shown("--sysfs", EFA, "--json"))
    assert whole["transport"] == "efa"
    assert whole["groups"][1] == {
        "device": "GPU 1",
        "gpu": 1,
        "numa_node": 0,
        "nics": ["rdmap96s0", "rdmap97s0", "rdmap98s0", "rdmap99s0"],
        "ports": ["rdmap96s0", "rdmap97s0", "rdmap98s0", "rdmap99s0"],
        "distance": "same_switch",
        "steps": 4,
        "rate_gbps": 400.0,
        "cpus": "0-47,96-143",
        "cpus_are_near": True,
    }
    assert (len(whole["gpus"]), len(whole["nics"]), len(whole["bridges"])) == (8, 33, 57)
    assert whole["gpus"][0]["pci_id"] == "10de:2330" and whole["gpus"][0]["model"] == "NVIDIA H100 SXM5 80GB"
    assert whole["gpus"][0]["pci_path"] == [
        *("pci0000:44", "0000:44:00.0", "0000:45:00.0", "0000:46:01.4", "0000:53:00.0")
    ]
    assert whole["numa_nodes"][1] == {"node": 1, "cpus": "48-95,144-191", "distances": {"0": 32, "1": 10}}
    assert whole["remarks"] == whole["not_visible"] == []


def test_what_is_not_told_is_null(shown: Shown) -> None:
    whole = in_json(shown("--sysfs", GUEST, "--json"))
    (nic,) = whole["nics"]
    assert nic["rdma"] is None and nic["pcie"] is None
    assert nic["interfaces"] == [{"name": "eth0", "up": True, "rate_gbps": None}]
    assert whole["groups"][0]["gpu"] is None and whole["groups"][0]["rate_gbps"] is None
    assert in_json(shown("--sysfs", GUEST, "--json", "--transport", "efa"))["transport"] is None


# ---- recordings ------------------------------------------------------------------------------------------------


def test_what_is_recorded_here_is_seen_elsewhere(shown: Shown, tmp_path: Path) -> None:
    file = tmp_path / "here"
    text = shown("--record", file)
    assert text.endswith(f"Recorded in {file}.\n")
    assert read_recording(file) == read_machine()
    assert text.startswith(shown("--sysfs", file))


def test_a_recording_beside_json_leaves_it_alone(shown: Shown, tmp_path: Path) -> None:
    assert in_json(shown("--json", "--record", tmp_path / "here", "--sysfs", EFA))["transport"] == "efa"
    assert read_recording(tmp_path / "here") == read_recording(EFA)


def test_a_directory_laid_out_as_sys_is_as_good(shown: Shown) -> None:
    assert "which CPUs a process may use: not recorded" in shown("--sysfs", "/sys", columns=120)


# ---- what is wrong ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("topology --sysfs nowhere", "sysfs: must be a recording or a directory laid out as /sys, nowhere is neither"),
        ("topology --sysfs .", "sysfs: must be laid out as /sys, with bus, class and devices, which . is not"),
        ("topology --sysfs words", "sysfs: must be a recording, whose first line is '# headrace sysfs 1'"),
        ("topology --record nowhere/file", "record: must be a file in a folder that exists, is nowhere/file"),
        ("topology --record .", "record: must be a file in a folder that exists, is ."),
        ("topology --transport ib", "--transport: must be best, efa, verbs or tcp, is 'ib'"),
        ("topology --sysf x", "no such option: --sysf; did you mean --sysfs?"),
        ("topology --sysfs", "option '--sysfs' requires an argument"),
        ("topology here", "got unexpected extra argument(s) (here)"),
        ("topologie", "no such command 'topologie'. Did you mean 'topology'?"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    arguments: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words").write_text("just words\n")
    assert run(["fabric", *arguments.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("headrace: error: ") and message in err
    assert err.count("\n") == 1 and err.endswith("\n")


def test_fabric_alone_shows_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["fabric"]) == 2
    out, err = capsys.readouterr()
    assert "topology" in out and err == ""
