"""Ports, endpoints and fabric addresses: what is taken, and what is refused before anything starts."""

import socket
from pathlib import Path

import pytest

from headrace.cli.network import require_endpoint, require_fabric_hosts, require_free_port
from headrace.errors import InputError


def test_a_free_port_is_as_free_afterwards() -> None:
    port = require_free_port("127.0.0.1", 0)
    assert port > 0
    assert require_free_port("127.0.0.1", port) == port
    with socket.create_server(("127.0.0.1", port)):
        pass


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost"])
def test_a_port_in_use_is_refused(host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(InputError, match=f"^port: {host}:{port} is in use; another one, or 0 for any that is free"):
            require_free_port(host, port)


def test_a_port_whose_connections_were_just_closed_is_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            accepted, _ = server.accept()
            accepted.close()  # this side is left in TIME_WAIT
    assert require_free_port("127.0.0.1", port) == port


@pytest.mark.parametrize("host", ["", "192.0.2.1", "no such host", "a" * 70, "::gg"])
def test_a_host_that_is_not_ours_is_refused(host: str) -> None:
    with pytest.raises(InputError, match="^host: must be an address of this machine"):
        require_free_port(host, 0)


def test_ipc_endpoints_need_a_folder_that_exists(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/control.sock"
    assert require_endpoint("control", endpoint, insecure=False) == endpoint
    with pytest.raises(InputError, match="^control: must be in a folder that exists, is"):
        require_endpoint("control", f"ipc://{tmp_path}/missing/control.sock", insecure=False)


def test_a_socket_path_that_the_kernel_would_not_take_is_refused() -> None:
    with pytest.raises(InputError, match="^gateway: a socket's path has at most 107 bytes"):
        require_endpoint("gateway", f"ipc:///tmp/{'x' * 103}", insecure=False)
    assert require_endpoint("gateway", f"ipc:///tmp/{'x' * 102}", insecure=False)


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:5555", "tcp://*:5555", "tcp://[::1]:5555", "ipc://@headrace"])
def test_endpoints_that_others_can_reach_need_insecure(endpoint: str) -> None:
    with pytest.raises(InputError, match=r"can be reached by others, .*: add --insecure$"):
        require_endpoint("control", endpoint, insecure=False)
    assert require_endpoint("control", endpoint, insecure=True) == endpoint


@pytest.mark.parametrize(
    "endpoint", ["", "/tmp/x", "http://a:1", "ipc://", "tcp://a", "tcp://:1", "tcp://a:b", "tcp://a:0"]
)
def test_what_is_no_endpoint_is_refused_even_with_insecure(endpoint: str) -> None:
    with pytest.raises(InputError, match="^control: must (be|name) .*, is '"):
        require_endpoint("control", endpoint, insecure=True)


def test_a_fabric_address_off_this_machine_needs_insecure() -> None:
    assert require_fabric_hosts(["127.0.0.1"], insecure=False) == ("127.0.0.1",)
    with pytest.raises(InputError, match=r"^fabric_host: 10.0.0.1 can be reached by others, .*: add --insecure$"):
        require_fabric_hosts(["127.0.0.1", "10.0.0.1"], insecure=False)
    assert require_fabric_hosts(["10.0.0.1"], insecure=True) == ("10.0.0.1",)


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "host", "1.2.3"])
def test_what_no_peer_could_reach_is_no_fabric_address(host: str) -> None:
    with pytest.raises(InputError, match="^fabric_host: must be"):
        require_fabric_hosts(["10.0.0.1", host], insecure=True)


def test_there_is_one_fabric_address_for_each_nic_of_at_most_four() -> None:
    four = [f"10.0.0.{number}" for number in range(1, 5)]
    assert require_fabric_hosts(four, insecure=True) == tuple(four)
    with pytest.raises(InputError, match="^fabric_host: must be at most 4, one for each NIC, are 5$"):
        require_fabric_hosts([*four, "10.0.0.5"], insecure=True)
    with pytest.raises(InputError, match="^fabric_host: must name each address once, are 10.0.0.1, 10.0.0.1$"):
        require_fabric_hosts(["10.0.0.1", "10.0.0.1"], insecure=True)
