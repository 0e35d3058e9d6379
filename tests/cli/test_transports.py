"""Which transports are opened: what was asked for, on which machine, and what contradicts."""

from typing import get_args

import pytest

from headrace.cli.transports import plan_transports
from headrace.errors import InputError
from headrace.fabric import interface, native, places
from headrace.roles.options import MAX_FABRIC_HOSTS, NEAR, InstanceOptions, Transport

LOOPBACK, ADDRESS = ("127.0.0.1",), ("10.0.0.1",)


@pytest.fixture
def efa_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "available_transports", lambda: ("mapped", "shm", "efa", "tcp"))


@pytest.mark.usefixtures("efa_machine")
def test_where_nothing_is_asked_for_everything_is_opened_that_the_addresses_allow() -> None:
    assert plan_transports((), required=None, hosts=LOOPBACK) == ("mapped", "tcp")
    assert plan_transports((), required=None, hosts=("127.0.0.1", "::1")) == ("mapped", "tcp")
    assert plan_transports((), required=None, hosts=ADDRESS) == ("mapped", "efa", "tcp")
    assert plan_transports((), required=None, hosts=(*LOOPBACK, *ADDRESS)) == ("mapped", "efa", "tcp")


def test_without_such_a_device_there_is_no_rdma(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native._native, "has_provider", lambda provider: False)
    assert plan_transports((), required=None, hosts=ADDRESS) == ("mapped", "tcp")


@pytest.mark.usefixtures("efa_machine")
def test_their_order_is_always_the_same_so_that_both_sides_find_the_same_one() -> None:
    assert plan_transports(("tcp", "efa", "mapped"), required=None, hosts=ADDRESS) == ("mapped", "efa", "tcp")
    assert plan_transports(("tcp",), required=None, hosts=ADDRESS) == ("tcp",)
    assert plan_transports(("tcp", "shm", "mapped"), required=None, hosts=LOOPBACK) == ("mapped", "shm", "tcp")


@pytest.mark.usefixtures("efa_machine")
@pytest.mark.parametrize("required", ["mapped", "shm", "efa", "tcp"])
def test_the_required_one_is_the_only_one(required: Transport) -> None:
    assert plan_transports((), required=required, hosts=ADDRESS) == (required,)
    assert plan_transports(("tcp", "efa", "shm", "mapped"), required=required, hosts=ADDRESS) == (required,)


@pytest.mark.usefixtures("efa_machine")
@pytest.mark.parametrize(
    ("asked", "required", "hosts", "error"),
    [
        (("mapped", "efa"), "tcp", ADDRESS, "require_provider: must be one of --transports (mapped, efa), is tcp"),
        (("verbs",), None, ADDRESS, "transports: must be of what this machine has (mapped, shm, efa, tcp), is verbs"),
        ((), "verbs", ADDRESS, "require_provider: must be of what this machine has (mapped, shm, efa, tcp), is verbs"),
        (("efa", "tcp"), None, LOOPBACK, "transports: must be of what stays at 127.0.0.1 (mapped, shm, tcp), is efa"),
        ((), "efa", LOOPBACK, "require_provider: must be of what stays at 127.0.0.1 (mapped, shm, tcp), is efa"),
    ],
)
def test_what_cannot_be_or_contradicts_is_refused(
    asked: tuple[Transport, ...], required: Transport | None, hosts: tuple[str, ...], error: str
) -> None:
    with pytest.raises(InputError) as refused:
        plan_transports(asked, required=required, hosts=hosts)
    assert str(refused.value) == error


def test_options_and_fabric_know_the_same_transports_and_as_many_addresses() -> None:
    assert (get_args(Transport), NEAR) == (get_args(native.Transport), places.NEAR)
    assert MAX_FABRIC_HOSTS == interface.MAX_NICS
    defaults = InstanceOptions.__dataclass_fields__
    assert plan_transports((), required=None, hosts=defaults["fabric_hosts"].default) == defaults["transports"].default
