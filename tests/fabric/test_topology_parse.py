"""Trees of sysfs as topologies: what is there is found, and what is hidden is said and not guessed."""

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sysfs_trees import ALL, CONNECTX, EFA, GUEST, numa_nodes, rdma, tree, with_text, without

from headrace.fabric.topology.machine import PcieLink, PciPath, Port, Topology
from headrace.fabric.topology.parse import parse_topology
from headrace.fabric.topology.snapshot import Snapshot


def topology_of(name: str) -> Topology:
    return parse_topology(tree(name))


def lines_of(snapshot: Snapshot) -> str:
    return "\n".join(parse_topology(snapshot).not_visible)


def snapshot_of(*lines: tuple[str, dict[str, str]]) -> Snapshot:
    """A machine whose listings are all visible, with these directories."""
    listings = ("bus/pci/devices", "class/infiniband", "class/net", "devices/system/node")
    return Snapshot(tree={**{listing: {} for listing in listings}, **dict(lines)}, cpus_allowed=(0, 1))


# ---- whole machines --------------------------------------------------------------------------------------------


def test_the_efa_node_has_its_gpus_nics_switches_and_cpus() -> None:
    topology = topology_of(EFA)
    assert [gpu.path.address for gpu in topology.gpus] == [f"0000:{0x53 + 0x11 * n:02x}:00.0" for n in range(8)]
    assert {gpu.model for gpu in topology.gpus} == {"NVIDIA H100 SXM5 80GB"}
    assert Counter(nic.kind for nic in topology.nics) == {"efa": 32, "ethernet": 1}
    assert {nic.rdma.rate_gbps for nic in topology.nics if nic.rdma} == {100.0}
    assert {nic.function.driver for nic in topology.nics if nic.function} == {"efa", "ena"}
    assert [(node.number, len(node.cpus), node.distances) for node in topology.numa_nodes] == [
        (0, 96, {0: 10, 1: 32}),
        (1, 96, {0: 32, 1: 10}),
    ]
    assert Counter(device.numa_node for device in (*topology.gpus, *topology.nics)) == {0: 21, 1: 20}
    assert len(topology.bridges) == 8 * 7 + 1
    assert topology.usable_cpus == tuple(range(192))
    assert topology.not_visible == ()


def test_an_efa_nic_is_where_it_is() -> None:
    nic = next(nic for nic in topology_of(EFA).nics if nic.name == "rdmap79s0")
    steps = ("pci0000:44", "0000:44:00.0", "0000:45:00.0", "0000:46:01.0", "0000:4f:00.0")
    assert nic.path == PciPath(steps)
    assert nic.function is not None and nic.function.link == PcieLink(gt_per_s=16.0, num_lanes=8)
    assert nic.function.link.gbps == pytest.approx(126, abs=0.1)
    assert nic.interfaces == ()


def test_the_connectx_node_has_nics_with_both_names_and_down_ports_without_a_rate() -> None:
    topology = topology_of(CONNECTX)
    nics = {nic.name: nic for nic in topology.nics}
    assert list(nics)[1:4] == ["mlx5_0", "mlx5_1", "mlx5_2"] and len(nics) == 15
    assert nics["mlx5_3"].rdma == Port(name="mlx5_3", is_up=True, rate_gbps=400.0)
    assert nics["mlx5_3"].interfaces == (Port(name="ibp64s0", is_up=True, rate_gbps=400.0),)
    assert nics["mlx5_7"].rdma == Port(name="mlx5_7", is_up=False, rate_gbps=None)
    assert nics["mlx5_7"].interfaces == (Port(name="ibp170s0f0", is_up=False, rate_gbps=None),)
    assert (nics["eno3"].kind, nics["eno3"].rdma) == ("ethernet", None)
    assert Counter(nic.kind for nic in topology.nics) == {"verbs": 14, "ethernet": 1}
    assert topology.not_visible == ()


def test_the_guest_has_one_nic_on_its_only_node_and_what_it_does_not_tell_is_said() -> None:
    topology = topology_of(GUEST)
    (nic,) = topology.nics
    assert (nic.name, nic.kind, nic.numa_node) == ("eth0", "ethernet", 0)
    assert nic.path == PciPath(("pci0000:00", "0000:00:03.0"))
    assert nic.interfaces == (Port(name="eth0", is_up=True, rate_gbps=None),)
    assert topology.gpus == () and topology.bridges == ()
    rdma_line, rate_line = topology.not_visible
    assert rdma_line.startswith("RDMA devices (/sys/class/infiniband)") and rate_line == "state or rate of eth0"


# ---- what containers hide --------------------------------------------------------------------------------------


def test_hidden_rdma_devices_are_missed_where_pci_ids_promise_them() -> None:
    seen = parse_topology(without(tree(EFA), rdma))
    assert [nic.name for nic in seen.nics] == ["enp71s0"]
    assert "RDMA devices (/sys/class/infiniband): no RDMA driver is loaded, or they are hidden" in seen.not_visible[0]
    assert seen.not_visible[1].startswith("RDMA devices of 0000:4f:00.0, 0000:50:00.0,")
    assert seen.not_visible[1].endswith("and 26 more, which by their PCI ids have some")


def test_without_the_nodes_a_device_keeps_its_number_and_nothing_knows_cpus() -> None:
    seen = parse_topology(without(tree(CONNECTX), numa_nodes))
    assert seen.numa_nodes == ()
    assert [gpu.numa_node for gpu in seen.gpus] == [0] * 4 + [1] * 4
    assert seen.not_visible == ("NUMA nodes (/sys/devices/system/node)",)


def test_firmware_that_tells_no_nodes_is_believed_on_a_machine_with_several() -> None:
    seen = parse_topology(with_text(tree(CONNECTX), "", "numa_node", "-1"))
    assert {device.numa_node for device in (*seen.gpus, *seen.nics)} == {None}
    assert "NUMA node of GPU 0, GPU 1, GPU 2, GPU 3, GPU 4, GPU 5 and 17 more: the firmware" in seen.not_visible[0]


def test_without_pci_devices_there_are_no_gpus_and_nics_keep_their_place() -> None:
    def is_hidden(path: str) -> bool:
        is_function = PciPath.of(path) is not None and "/net/" not in path and not rdma(path)
        return path == "bus/pci/devices" or is_function

    seen = parse_topology(without(tree(CONNECTX), is_hidden))
    assert seen.gpus == () and len(seen.nics) == 15
    assert all(nic.path and nic.path.steps[0].startswith("pci") for nic in seen.nics)
    assert "PCI devices (/sys/bus/pci/devices): GPUs are not known without them" in seen.not_visible
    assert "what 0000:0b:00.0, 0000:18:00.0" in "\n".join(seen.not_visible)


def test_only_the_devices_of_one_container_are_visible() -> None:
    seen = parse_topology(without(tree(EFA), lambda path: PciPath.of(path) is not None and "pci0000:55" not in path))
    assert [gpu.name for gpu in seen.gpus] == ["GPU 0"]
    assert [nic.name for nic in seen.nics] == ["rdmap96s0", "rdmap97s0", "rdmap98s0", "rdmap99s0"]


def test_a_container_has_a_virtual_interface_and_nobody_knows_where_it_is() -> None:
    veth = {"type": "1", "operstate": "up", "speed": "10000", "ifindex": "2", "iflink": "12"}
    bridge = {"type": "1", "operstate": "up", "ifindex": "3", "iflink": "3"}
    inside = snapshot_of(("devices/virtual/net/eth0", veth), ("devices/virtual/net/br0", bridge))
    (nic,) = parse_topology(inside).nics
    assert (nic.name, nic.path, nic.interfaces[0].rate_gbps) == ("eth0", None, 10.0)
    assert "where in the machine eth0 is: no PCI device stands behind" in lines_of(inside)

    host = snapshot_of(("devices/virtual/net/veth7", veth), ("devices/pci0000:00/0000:00:03.0/net/eno1", bridge))
    assert [nic.name for nic in parse_topology(host).nics] == ["eno1"]


def test_an_interface_of_a_bus_without_pci_is_a_nic() -> None:
    seen = parse_topology(snapshot_of(("devices/vif-0/net/eth0", {"operstate": "up", "speed": "1000"})))
    assert [(nic.name, nic.path) for nic in seen.nics] == [("eth0", None)]


def test_a_snapshot_of_nothing_is_a_topology_that_says_so() -> None:
    seen = parse_topology(Snapshot(tree={}))
    assert (seen.gpus, seen.nics, seen.numa_nodes, seen.usable_cpus) == ((), (), (), ())
    assert [line.partition(" (")[0] for line in seen.not_visible] == [
        "PCI devices",
        "RDMA devices",
        "network interfaces",
        "NUMA nodes",
        "which CPUs a process may use: not recorded, so all that are online count",
    ]


def test_a_masked_device_is_named_and_is_no_gpu() -> None:
    masked = with_text(tree(EFA), "0000:53:00.0", "class", None)
    assert len(parse_topology(masked).gpus) == 7
    assert "what 0000:53:00.0 is: the class cannot be read" in lines_of(masked)


@given(st.sampled_from(ALL), st.randoms(use_true_random=False), st.floats(0, 1))
def test_any_part_of_a_machine_can_be_parsed(name: str, random: Random, share: float) -> None:
    part = without(tree(name), lambda path: random.random() < share)
    seen, whole = parse_topology(part), topology_of(name)
    assert {nic.name for nic in seen.nics} <= {n.name for nic in whole.nics for n in (nic.rdma, *nic.interfaces) if n}
    assert {gpu.path for gpu in seen.gpus} <= {gpu.path for gpu in whole.gpus}


@given(st.sampled_from(ALL), st.data())
def test_texts_that_make_no_sense_count_as_not_told(name: str, data: st.DataObject) -> None:
    whole = tree(name)
    keys = sorted({key for texts in whole.tree.values() for key in texts})
    garbage = st.one_of(
        st.text(max_size=12), st.sampled_from(["-1", "Unknown", "0x", "1e9", "999999999999", "-", "0-"])
    )
    parse_topology(with_text(whole, "", data.draw(st.sampled_from(keys)), data.draw(garbage)))


@pytest.mark.parametrize("hidden", ["driver", "vendor"])
def test_an_efa_nic_is_known_by_its_driver_or_its_vendor(hidden: str) -> None:
    seen = parse_topology(with_text(tree(EFA), "", hidden, None))
    assert Counter(nic.kind for nic in seen.nics) == {"efa": 32, "ethernet": 1}


# ---- single facts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("class_code", "vendor", "device", "model"),
    [
        ("0x030200", "0x10de", "0x2335", "NVIDIA H200"),
        ("0x030000", "0x10de", "0x2684", None),  # a desktop's, which CUDA can use
        ("0x038000", "0x1002", "0x7408", "AMD Instinct MI250X"),
        ("0x120000", "0x1002", "0x74a1", "AMD Instinct MI300X"),
        ("0x120000", "0x1da3", "0x1020", None),
    ],
)
def test_a_gpu_is_known_by_class_and_vendor(class_code: str, vendor: str, device: str, model: str | None) -> None:
    texts = {"class": class_code, "vendor": vendor, "device": device, "numa_node": "1"}
    (gpu,) = parse_topology(snapshot_of(("devices/pci0000:00/0000:00:01.0", texts))).gpus
    assert (gpu.name, gpu.model, gpu.numa_node) == ("GPU 0", model, 1)


@pytest.mark.parametrize(
    ("class_code", "vendor"),
    [
        ("0x030000", "0x1a03"),  # the console of a server
        ("0x030000", "0x8086"),  # built into a CPU
        ("0x030000", "0x1d0f"),  # the console of a virtual machine
        ("0x068000", "0x10de"),  # an NVSwitch
        ("0x120000", "0x8086"),
        ("", "0x10de"),
    ],
)
def test_other_displays_and_accelerators_are_none(class_code: str, vendor: str) -> None:
    texts = {"class": class_code, "vendor": vendor, "device": "0x1111"}
    assert parse_topology(snapshot_of(("devices/pci0000:00/0000:00:01.0", texts))).gpus == ()


def test_of_a_device_with_two_ports_the_fastest_that_is_up_counts() -> None:
    nic = "devices/pci0000:00/0000:00:01.0"
    seen = parse_topology(
        snapshot_of(
            (nic, {"class": "0x020700", "vendor": "0x15b3", "device": "0x1003"}),
            (f"{nic}/infiniband/mlx4_0", {}),
            (f"{nic}/infiniband/mlx4_0/ports/1", {"state": "4: ACTIVE", "rate": "40 Gb/sec (4X QDR)"}),
            (f"{nic}/infiniband/mlx4_0/ports/2", {"state": "1: DOWN", "rate": "56 Gb/sec (4X FDR)"}),
        )
    )
    assert seen.nics[0].rdma == Port(name="mlx4_0", is_up=True, rate_gbps=40.0)


def test_rdma_in_software_is_no_nic() -> None:
    assert parse_topology(snapshot_of(("devices/virtual/infiniband/rxe0", {}))).nics == ()


def test_an_unknown_link_of_a_virtual_machine_is_no_link() -> None:
    texts = {"class": "0x030200", "vendor": "0x10de", "current_link_speed": "Unknown", "current_link_width": "0"}
    (gpu,) = parse_topology(snapshot_of(("devices/pci0000:00/0000:00:01.0", texts))).gpus
    assert gpu.function.link is None


def test_distances_count_only_where_there_is_one_for_each_node() -> None:
    whole = parse_topology(with_text(tree(EFA), "node0", "distance", "10"))
    assert [dict(node.distances) for node in whole.numa_nodes] == [{}, {0: 32, 1: 10}]


def test_gpus_are_counted_in_pci_order_also_over_domains() -> None:
    texts = {"class": "0x030200", "vendor": "0x10de", "device": "0x2330"}
    paths = ("devices/pci10000:00/10000:00:01.0", "devices/pci0000:99/0000:99:00.0", "devices/pci0002:00/0002:00:00.0")
    seen = parse_topology(snapshot_of(*((path, texts) for path in paths)))
    assert [gpu.path.address for gpu in seen.gpus] == ["0000:99:00.0", "0002:00:00.0", "10000:00:01.0"]
