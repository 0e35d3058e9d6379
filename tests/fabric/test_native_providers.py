"""What libfabric's providers are asked for and what is refused: the part of efa and verbs that needs no such NIC."""

import os
import time

import pytest

from headrace.errors import FabricError, InputError
from headrace.fabric import SharedMemory, _native
from headrace.fabric.places import plan_places, plan_watch


def require(provider: str, **changed: object) -> None:
    _native.require_traits(
        **{  # type: ignore[arg-type]
            "provider": provider,
            "cq_data_size": 4,
            "ordered_messages": True,
            "emulated_writes": False,
            "local_registration": True,
            "lasting_regions": False,
            **changed,
        }
    )


def test_efa_is_asked_for_its_nic_by_name_and_for_no_way_around_it() -> None:
    asked = _native.plan_ask("efa", "rdmap16s27", 0, False)
    assert (asked.domain, asked.address, asked.port) == ("rdmap16s27-rdm", "", "")
    assert not asked.local_peers, "peers of this host must not go through the provider's own shared memory"
    assert _native.plan_ask("efa", "", 0, False).domain == "", "no name: the first NIC"


def test_verbs_and_tcp_are_bound_to_an_address() -> None:
    for provider in ("verbs;ofi_rxm", "tcp;ofi_rxm"):
        asked = _native.plan_ask(provider, "10.0.0.1", 7400, False)
        assert (asked.domain, asked.address, asked.port) == ("", "10.0.0.1", "7400")
        assert asked.local_peers
    assert _native.plan_ask("tcp;ofi_rxm", "", 0, False).port == ""


def test_rdma_is_asked_for_by_a_version_that_this_build_knows() -> None:
    assert _native.plan_ask("tcp;ofi_rxm", "", 0, False).api == (1, 17)
    assert (1, 17) <= _native.plan_ask("efa", "", 0, False).api <= (1, 20)


def test_device_memory_is_asked_for_where_it_is_wanted() -> None:
    assert not _native.plan_ask("verbs;ofi_rxm", "", 0, False).device_memory
    assert _native.plan_ask("verbs;ofi_rxm", "", 0, True).device_memory


def test_a_provider_with_all_that_is_needed_is_taken() -> None:
    for provider in ("efa", "verbs;ofi_rxm"):
        require(provider)
    require("tcp;ofi_rxm", local_registration=False, cq_data_size=8)


@pytest.mark.parametrize(
    ("changed", "call", "text"),
    [
        ({"cq_data_size": 3}, "cq_data_size", "efa carries fewer than the 4 bytes of an imm"),
        ({"ordered_messages": False}, "FI_ORDER_SAS", "efa does not keep messages in order"),
        ({"emulated_writes": True}, "FI_OPT_EFA_EMULATED_WRITE", "needs a NIC with RDMA write, and .* 1.18"),
        ({"local_registration": False}, "FI_MR_LOCAL", "efa would register what it sends by itself"),
        ({"lasting_regions": True}, "FI_MR_CACHE_MAX_COUNT", "keeps closed registrations open .* set it to 0"),
    ],
)
def test_each_thing_that_is_missing_is_refused_by_name(changed: dict[str, object], call: str, text: str) -> None:
    with pytest.raises(FabricError, match=text) as refused:
        require("efa", **changed)
    assert refused.value.call == call


def test_the_cache_that_would_keep_a_revoked_peers_access_is_off() -> None:
    import headrace.fabric.native  # noqa: F401

    assert os.environ["FI_MR_CACHE_MAX_COUNT"] == "0"


# ---- a queue that wakes nobody -----------------------------------------------------------------------------------


def test_an_owner_whose_provider_wakes_nobody_looks_and_is_idle_otherwise() -> None:
    """As efa's before libfabric 2.5; here libfabric's shm stands for it."""

    def engine() -> _native.Engine:
        memory = SharedMemory(4096)
        setup = _native.Setup(
            control="", shm="", watch="", silence_s=2.0, cpus=[], cuda_device=None, providers=[("shm", [("", 0)])]
        )
        return _native.Engine(memory.fd, 4096, setup, None)

    one, other = engine(), engine()
    assert not one.traits[0].wait_fd
    to_other = one.add_peer(other.address)
    told = _Told()
    for number in range(3):
        time.sleep(0.2)
        before = other.owner_cpu_ns()
        time.sleep(0.2)
        assert other.owner_cpu_ns() - before < 20_000_000, "a tenth of a core: it would be all of it"
        one.send(to_other, b"%d" % number)
        until = time.monotonic() + 0.3  # half of what was left of its sleep, if it slept as others do
        while len(told.messages) <= number and time.monotonic() < until:
            other.drain(told)  # type: ignore[arg-type]  # nothing else comes
    assert told.messages == [b"0", b"1", b"2"]
    one.close()
    other.close()


class _Told:
    """A sink of events that knows messages alone."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []

    def message_received(self, message: bytes) -> None:
        self.messages.append(message)


# ---- which NICs -------------------------------------------------------------------------------------------------


def test_addresses_go_to_tcp_and_names_to_efa() -> None:
    nodes = ("10.0.0.1", "rdmap16s27", "rdmap32s27")
    assert plan_places(("mapped", "efa", "tcp"), nodes, 7400) == {
        "efa": [("rdmap16s27", 0), ("rdmap32s27", 0)],
        "tcp": [("10.0.0.1", 7400)],
    }
    assert plan_watch(("mapped", "efa", "tcp"), nodes, 7400) == "10.0.0.1:7401"


def test_without_a_name_efa_takes_its_first_nic_and_without_a_node_everybody_chooses() -> None:
    assert plan_places(("efa", "verbs"), ("10.0.0.1",), 0) == {"efa": [("", 0)], "verbs": [("10.0.0.1", 0)]}
    assert plan_places(("efa", "tcp"), (), 0) == {"efa": [("", 0)], "tcp": [("", 0)]}


def test_peers_are_watched_where_there_is_an_address_and_a_transport_for_it() -> None:
    assert plan_watch(("tcp",), ("10.0.0.1",), 0) == "10.0.0.1:0"
    assert plan_watch(("mapped",), ("10.0.0.1",), 0) == ""
    assert plan_watch(("efa",), ("rdmap16s27",), 0) == ""


def test_a_nic_that_no_transport_takes_is_refused_and_a_transport_without_one() -> None:
    with pytest.raises(
        InputError, match="nodes: must be IP addresses, has 'mlx5_0': only a NIC of efa goes by its name"
    ):
        plan_places(("verbs", "tcp"), ("10.0.0.1", "mlx5_0"), 0)
    with pytest.raises(InputError, match="nodes: must have an IP address for tcp, has rdmap16s27"):
        plan_places(("efa", "tcp"), ("rdmap16s27",), 0)
    with pytest.raises(InputError, match="nodes: must be at most 4, are 5"):
        plan_places(("efa",), [f"rdmap{n}s27" for n in range(5)], 0)
