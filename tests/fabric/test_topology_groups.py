"""Domain groups: the nearest NICs, all of them that matter, dealt out evenly; and CPUs near them."""

from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sysfs_trees import CONNECTX, EFA, GUEST, numa_nodes, rdma, tree, with_text, without

from headrace.fabric.topology.groups import (
    Device,
    Distance,
    DomainGroup,
    Level,
    best_transport,
    distance_between,
    plan_domain_groups,
    usable_nics,
)
from headrace.fabric.topology.machine import (
    Gpu,
    HostMemory,
    Nic,
    NumaNode,
    PciFunction,
    PciPath,
    Port,
    Topology,
    Transport,
)
from headrace.fabric.topology.parse import parse_topology

NODE_0, NODE_1 = (*range(56), *range(112, 168)), (*range(56, 112), *range(168, 224))


def groups_of(name: str, transport: Transport | None = None) -> tuple[DomainGroup, ...]:
    return plan_domain_groups(parse_topology(tree(name)), transport)


def with_port_down(topology: Topology, *names: str) -> Topology:
    nics = [
        replace(nic, rdma=replace(nic.rdma, is_up=False, rate_gbps=None)) if nic.rdma and nic.name in names else nic
        for nic in topology.nics
    ]
    return replace(topology, nics=tuple(nics))


# ---- the machines of the trees ---------------------------------------------------------------------------------


def test_each_gpu_of_the_efa_node_has_the_four_nics_of_its_switch() -> None:
    groups = groups_of(EFA)
    buses = [0x4F + 0x11 * n for n in range(8)]
    assert [group.port_names for group in groups] == [tuple(f"rdmap{bus + n}s0" for n in range(4)) for bus in buses]
    assert {(group.transport, group.distance, group.rate_gbps) for group in groups} == {
        ("efa", Distance(Level.SAME_SWITCH, 4), 400.0)
    }
    assert [min(group.cpus) for group in groups] == [0] * 4 + [48] * 4


def test_each_gpu_of_the_connectx_node_has_the_nic_that_its_makers_manual_gives_it() -> None:
    groups = groups_of(CONNECTX)
    assert [group.port_names for group in groups] == [(f"mlx5_{n}",) for n in (0, 3, 4, 5, 6, 9, 10, 11)]
    assert {group.distance.level for group in groups} == {Level.SAME_SWITCH}
    assert [group.cpus for group in groups] == [NODE_0] * 4 + [NODE_1] * 4
    assert all(group.is_near for group in groups)


def test_the_memory_of_a_machine_without_gpus_is_a_device() -> None:
    (group,) = groups_of(GUEST)
    assert (group.device, group.transport, group.port_names) == (HostMemory(numa_node=0), "tcp", ("eth0",))
    assert (group.cpus, group.is_near, group.rate_gbps) == ((0, 1), True, None)


def test_over_tcp_a_nic_is_its_interface() -> None:
    assert [group.port_names for group in groups_of(CONNECTX, "tcp")][:2] == [("ibp24s0",), ("ibp64s0",)]
    assert {group.port_names for group in groups_of(EFA, "tcp")} == {("enp71s0",)}


def test_a_transport_that_no_nic_serves_makes_no_groups() -> None:
    assert groups_of(CONNECTX, "efa") == groups_of(GUEST, "verbs") == ()
    assert best_transport(parse_topology(without(tree(EFA), lambda path: "devices" in path))) is None


def test_a_gpu_whose_nic_is_down_shares_the_fastest_of_its_node() -> None:
    """mlx5_1 and mlx5_2 serve nobody, but storage at half the rate is no replacement."""
    groups = plan_domain_groups(with_port_down(parse_topology(tree(CONNECTX)), "mlx5_0"))
    assert groups[0].port_names == ("mlx5_3",)
    assert groups[0].distance.level == Level.SAME_NUMA_NODE
    assert [group.port_names for group in groups[1:]] == [(f"mlx5_{n}",) for n in (3, 4, 5, 6, 9, 10, 11)]


def test_gpus_of_a_node_without_nics_go_to_the_other_one_evenly() -> None:
    names = [f"mlx5_{n}" for n in range(6, 12)] + ["irdma0"]
    groups = plan_domain_groups(with_port_down(parse_topology(tree(CONNECTX)), *names))
    assert [group.port_names for group in groups[4:]] == [("mlx5_0",), ("mlx5_3",), ("mlx5_4",), ("mlx5_5",)]
    assert {group.distance for group in groups[4:]} == {Distance(Level.OTHER_NUMA_NODE, 21)}
    assert [group.cpus for group in groups] == [NODE_0] * 8


def test_memory_beside_gpus_takes_what_they_leave() -> None:
    topology = parse_topology(tree(CONNECTX))
    groups = plan_domain_groups(replace(topology, gpus=topology.gpus[:4]))
    assert groups[4].device == HostMemory(numa_node=1)
    assert groups[4].port_names == ("mlx5_6", "mlx5_9", "mlx5_10", "mlx5_11")
    assert [group.port_names for group in groups[:4]] == [(f"mlx5_{n}",) for n in (0, 3, 4, 5)]


# ---- CPUs ------------------------------------------------------------------------------------------------------


def test_an_owner_gets_only_cpus_that_the_process_may_use() -> None:
    groups = plan_domain_groups(replace(parse_topology(tree(CONNECTX)), usable_cpus=(3, 55, 56, 60, 112)))
    assert [group.cpus for group in groups] == [(3, 55, 112)] * 4 + [(56, 60)] * 4


def test_a_process_kept_to_the_other_node_gets_what_it_may_use_and_is_told_that_it_is_far() -> None:
    groups = plan_domain_groups(replace(parse_topology(tree(CONNECTX)), usable_cpus=(56, 57)))
    assert [(group.cpus, group.is_near) for group in groups] == [((56, 57), False)] * 4 + [((56, 57), True)] * 4


@pytest.mark.parametrize("hidden", ["nodes", "numbers"])
def test_without_numa_nodes_groups_stand_and_owners_go_anywhere(hidden: str) -> None:
    machine = tree(EFA)
    seen = without(machine, numa_nodes) if hidden == "nodes" else with_text(machine, "", "numa_node", "-1")
    groups = plan_domain_groups(parse_topology(seen))
    assert [group.port_names for group in groups[:8]] == [group.port_names for group in groups_of(EFA)]
    assert {(group.cpus, group.is_near) for group in groups[:8]} == {(tuple(range(192)), False)}


def test_a_container_without_rdma_and_nodes_shares_what_it_sees() -> None:
    groups = plan_domain_groups(parse_topology(without(without(tree(EFA), rdma), numa_nodes)))
    assert {(group.transport, group.port_names) for group in groups} == {("tcp", ("enp71s0",))}
    assert [group.distance.level for group in groups][:5] == [Level.SAME_SWITCH] + [Level.SAME_NUMA_NODE] * 3 + [
        Level.OTHER_NUMA_NODE
    ]


# ---- any machine, against slow and obvious models --------------------------------------------------------------


def function(steps: tuple[str, ...], number: int, numa_node: int | None) -> PciFunction:
    path = PciPath((*steps, f"0000:{number:02x}:00.0"))
    return PciFunction(
        path=path, class_code=None, vendor_id=None, device_id=None, numa_node=numa_node, driver=None, link=None
    )


def gpu(index: int, steps: tuple[str, ...], numa_node: int | None) -> Gpu:
    return Gpu(index=index, function=function(steps, index, numa_node), model=None)


def nic(number: int, steps: tuple[str, ...] | None, numa_node: int | None, port: Port) -> Nic:
    place = None if steps is None else function(steps, 0x80 + number, numa_node)
    return Nic(kind="efa", function=place, rdma=port, interfaces=())


def node(number: int, num_nodes: int) -> NumaNode:
    distances = {other: 10 if other == number else 20 for other in range(num_nodes)}
    return NumaNode(number=number, cpus=tuple(range(number * 4, number * 4 + 4)), distances=distances)


def test_a_gpu_with_a_choice_leaves_the_only_nic_of_another_alone() -> None:
    """GPU 0 sits above two switches and is as near to the NIC of either; one of them is the only one near GPU 1."""
    up = Port(name="left", is_up=True, rate_gbps=100.0)
    topology = Topology(
        bridges=(),
        numa_nodes=(node(0, 1),),
        nics=(nic(0, ("pci0", "top", "left"), 0, up), nic(1, ("pci0", "top", "right"), 0, replace(up, name="right"))),
        gpus=(gpu(0, ("pci0", "top"), 0), gpu(1, ("pci0", "top", "left"), 0)),
        usable_cpus=(0,),
        not_visible=(),
    )
    assert [group.port_names for group in plan_domain_groups(topology)] == [("right",), ("left",)]


@st.composite
def machines(draw: st.DrawFn) -> Topology:
    """PCI trees up to three bridges deep below up to four host bridges, on up to two nodes that may be hidden."""
    num_nodes = draw(st.integers(0, 2))
    home = draw(st.lists(st.sampled_from([None, *range(num_nodes)]), min_size=4, max_size=4))
    turns = st.tuples(st.integers(0, 3), st.lists(st.integers(0, 1), max_size=3))
    rates = st.sampled_from([None, 100.0, 400.0])

    def steps(root: int, bridges: list[int]) -> tuple[str, ...]:
        names = [f"{root}." + "".join(map(str, bridges[: depth + 1])) for depth in range(len(bridges))]
        return (f"pci{root}", *names)

    gpus = [gpu(index, steps(*turn), home[turn[0]]) for index, turn in enumerate(draw(st.lists(turns, max_size=6)))]
    nics = []
    for number, turn in enumerate(draw(st.lists(st.none() | turns, max_size=8))):
        port = Port(name=f"nic{number}", is_up=draw(st.sampled_from([True, True, None, False])), rate_gbps=draw(rates))
        where = (None, None) if turn is None else (steps(*turn), home[turn[0]])
        nics.append(nic(number, *where, port))
    return Topology(
        bridges=(),
        numa_nodes=tuple(node(number, num_nodes) for number in range(num_nodes)),
        nics=tuple(nics),
        gpus=tuple(gpus),
        usable_cpus=tuple(draw(st.sets(st.integers(0, 7)))),
        not_visible=(),
    )


def model_distance(topology: Topology, device: Device, nic: Nic) -> tuple[int, int]:
    """By sets of ancestors instead of common beginnings."""
    if isinstance(device, Gpu) and nic.path:
        ours, theirs = set(device.path.steps), set(nic.path.steps)
        if ours & theirs:
            return (0 if len(ours & theirs) > 1 else 1, len(ours ^ theirs))
    if device.numa_node is None or nic.numa_node is None:
        return (3, 0)
    return (2, 0) if device.numa_node == nic.numa_node else (4, 20)


@given(machines())
def test_every_device_gets_one_to_four_nics_if_any_can_be_used(topology: Topology) -> None:
    groups, usable = plan_domain_groups(topology), usable_nics(topology, "efa")
    assert bool(groups) == bool(usable)
    if usable:
        assert [group.device for group in groups[: len(topology.gpus)]] == list(topology.gpus)
        with_gpu = {gpu.numa_node for gpu in topology.gpus}
        memories = [HostMemory(numa_node=node.number) for node in topology.numa_nodes if node.number not in with_gpu]
        hidden = [] if topology.gpus or topology.numa_nodes else [HostMemory(numa_node=None)]
        assert [group.device for group in groups[len(topology.gpus) :]] == memories + hidden
    for group in groups:
        assert 1 <= len(group.nics) <= 4
        assert len(set(group.nics)) == len(group.nics)
        assert set(group.nics) <= set(usable)


@given(machines())
def test_no_nic_is_nearer_than_the_chosen_or_as_near_and_faster(topology: Topology) -> None:
    for group in plan_domain_groups(topology):
        for chosen in group.nics:
            assert chosen.rdma is not None
            far = model_distance(topology, group.device, chosen)
            assert far == (group.distance.level, group.distance.steps)
            for other in usable_nics(topology, "efa"):
                assert other.rdma is not None
                assert model_distance(topology, group.device, other) >= far
                if model_distance(topology, group.device, other) == far:
                    assert (other.rdma.rate_gbps or 0) <= (chosen.rdma.rate_gbps or 0)


def choices(topology: Topology, device: Device) -> set[str]:
    """Names of the nearest NICs, the fastest of them."""
    nics = usable_nics(topology, "efa")
    nearest = min(model_distance(topology, device, nic) for nic in nics)
    rates = {
        nic.name: nic.rdma.rate_gbps or 0
        for nic in nics
        if nic.rdma and model_distance(topology, device, nic) == nearest
    }
    return {name for name, rate in rates.items() if rate == max(rates.values())}


def can_all_have_their_own(wanted: dict[str, set[str]]) -> bool:
    """Whether there is a matching, by augmenting paths."""
    taken: dict[str, str] = {}

    def seat(device: str, tried: set[str]) -> bool:
        for name in wanted[device] - tried:
            tried.add(name)
            if name not in taken or seat(taken[name], tried):
                taken[name] = device
                return True
        return False

    return all(seat(device, set()) for device in wanted)


@given(machines())
def test_no_gpu_shares_a_nic_if_all_can_have_their_own(topology: Topology) -> None:
    groups = [group for group in plan_domain_groups(topology) if isinstance(group.device, Gpu)]
    load = Counter(nic.name for group in groups for nic in group.nics)
    if groups and can_all_have_their_own({group.device.name: choices(topology, group.device) for group in groups}):
        assert max(load.values()) == 1
    for group in groups:
        ours = {nic.name for nic in group.nics}
        if len(ours) < 4 or max(load[name] for name in ours) > 1:  # nothing as good is left over
            assert all(load[name] for name in choices(topology, group.device))


@given(machines(), st.randoms(use_true_random=False))
def test_the_order_in_which_things_are_found_changes_nothing(topology: Topology, random: Random) -> None:
    nics = list(topology.nics)
    random.shuffle(nics)
    assert plan_domain_groups(replace(topology, nics=tuple(nics))) == plan_domain_groups(topology)


@given(machines())
def test_cpus_are_usable_ones_and_near_ones_where_there_are_any(topology: Topology) -> None:
    for group in plan_domain_groups(topology):
        assert set(group.cpus) <= set(topology.usable_cpus)
        homes = {nic.numa_node for nic in group.nics} - {None} or {group.device.numa_node}
        near = {cpu for node in topology.numa_nodes if node.number in homes for cpu in node.cpus}
        assert set(group.cpus) == (near & set(topology.usable_cpus) or set(topology.usable_cpus))
        assert group.is_near == bool(near & set(topology.usable_cpus))


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 9))
def test_a_symmetric_machine_is_shared_evenly(num_switches: int, gpus_each: int, nics_each: int) -> None:
    def below(kind: str, count: int) -> list[tuple[int, tuple[str, ...]]]:
        ports = [(switch, n) for switch in range(num_switches) for n in range(count)]
        return [(switch % 2, (f"pci{switch}", f"{switch}.up", f"{switch}.{kind}{n}")) for switch, n in ports]

    gpu_places, nic_places = below("gpu", gpus_each), below("nic", nics_each)
    up = Port(name="", is_up=True, rate_gbps=100.0)
    topology = Topology(
        bridges=(),
        numa_nodes=tuple(node(number, 2) for number in range(min(num_switches, 2))),
        nics=tuple(nic(n, place, home, replace(up, name=f"nic{n}")) for n, (home, place) in enumerate(nic_places)),
        gpus=tuple(gpu(n, place, home) for n, (home, place) in enumerate(gpu_places)),
        usable_cpus=tuple(range(8)),
        not_visible=(),
    )
    groups = plan_domain_groups(topology)
    sizes = {len(group.nics) for group in groups}
    load = Counter(nic.name for group in groups for nic in group.nics)
    loads = {load[nic.name] for nic in topology.nics}
    assert sizes <= {min(4, max(1, nics_each // gpus_each)), min(4, -(-nics_each // gpus_each))}
    assert max(loads) - min(loads) <= 1
    assert {group.distance.level for group in groups} == {Level.SAME_SWITCH}


@given(machines())
def test_distances_are_those_of_the_model(topology: Topology) -> None:
    for device in topology.gpus:
        for one in topology.nics:
            distance = distance_between(topology, device, one)
            assert (distance.level, distance.steps) == model_distance(topology, device, one)
