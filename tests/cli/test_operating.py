"""The commands of an operator, as a person runs them against a gateway that answers as scripted."""

import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from answering_gateway import GATEWAY, AnsweringGateway, deployment, instance

from headrace.cli.app import run
from headrace.protocol.operator import (
    Deployment,
    Dismiss,
    Leaves,
    OperatorAnswer,
    OperatorMessage,
    Refused,
    RequestFacts,
)

Said = tuple[int, str, str]
Headrace = Callable[..., Said]

PREFILLER, DECODER = instance(1, "prefiller", "prefiller-0"), instance(2, "decoder", "decoder-0")


@pytest.fixture
def headrace(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Headrace:
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: str) -> Said:
        status = run(arguments)
        return status, *capsys.readouterr()

    return call


def always(answer: OperatorAnswer | None) -> Callable[[OperatorMessage], OperatorAnswer | None]:
    return lambda message: answer


# ---- status ----------------------------------------------------------------------------------------------------


def test_status_shows_who_is_here_and_where_each_request_is(short_path: Path, headrace: Headrace) -> None:
    request = RequestFacts(
        request_id="request-7",
        tier="flex",
        stage="transferring",
        decoder=DECODER.uuid,
        prefiller=PREFILLER.uuid,
        num_prompt_tokens=1500,
        num_tokens=0,
    )
    away = instance(3, "decoder", "decoder-1", standing="absent", silent_s=7.2, status=None)
    other = instance(4, "decoder", "decoder-2", standing="refused", refusal="model [/b] differs", status=None)
    told = deployment(PREFILLER, DECODER, away, other, requests=(request,))
    with AnsweringGateway(short_path, always(told)) as gateway:
        status, out, err = headrace("status", "--control", gateway.control)
    assert (status, err) == (0, "")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[0] == "gateway serves tiny at http://127.0.0.1:8000, pid 39"
    assert f"prefiller-0 prefiller serving 41 3 0 1,234 {PREFILLER.uuid[:8]}" in lines
    assert f"decoder-1 decoder absent for 7 s 43 - - - {away.uuid[:8]}" in lines
    assert f"decoder-2 decoder refused: model [/b] differs 44 - - - {other.uuid[:8]}" in lines
    assert "1 request: 1 transferring" in lines
    assert "request-7 flex transferring prefiller-0 decoder-0 1,500 0" in lines


def test_status_as_json_is_the_message_itself(short_path: Path, headrace: Headrace) -> None:
    told = deployment(PREFILLER, DECODER)
    with AnsweringGateway(short_path, always(told)) as gateway:
        status, out, _ = headrace("status", "--json", "--control", gateway.control)
    assert status == 0 and msgspec.json.decode(out, type=Deployment) == told


@pytest.mark.parametrize("is_there", [True, False], ids=["a gateway that is stopped", "nobody"])
def test_no_answer_is_one_line_within_two_seconds(short_path: Path, headrace: Headrace, is_there: bool) -> None:
    control = f"ipc://{short_path}/control.sock"
    began = time.monotonic()
    if is_there:
        with AnsweringGateway(short_path, always(None)):
            status, out, err = headrace("status", "--control", control)
    else:
        status, out, err = headrace("status", "--control", control)
    assert time.monotonic() - began < 2.5, "two seconds are promised; this machine may be busy"
    assert (status, out, err) == (1, "", f"headrace: error: no gateway answers at {control}\n")


def test_without_a_gateway_the_option_is_named(
    short_path: Path, headrace: Headrace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_path))
    status, _, err = headrace("status")
    assert status == 2 and err.startswith("headrace: error: --control: must be said: no gateway of this user listens")


def test_what_a_gateway_refuses_is_told_as_it_says(short_path: Path, headrace: Headrace) -> None:
    refused = Refused(sender=GATEWAY, field="version", text="must be 4 as the gateway's, is 3")
    with AnsweringGateway(short_path, always(refused)) as gateway:
        status, _, err = headrace("status", "--control", gateway.control)
    assert (status, err) == (2, "headrace: error: version: must be 4 as the gateway's, is 3\n")


# ---- drain and role --------------------------------------------------------------------------------------------


class Leaving:
    """A gateway whose decoder-1 drains in `asks` questions after it was dismissed, and comes back if it is to."""

    def __init__(self, *, asks: int) -> None:
        self._asks = asks
        self._dismissed: Dismiss | None = None
        self.leaving = instance(5, "decoder", "decoder-1")

    def __call__(self, message: OperatorMessage) -> OperatorAnswer:
        if isinstance(message, Dismiss):
            self._dismissed = message
            return Leaves(sender=GATEWAY, instance=message.instance, successor="prefiller-1" if message.role else None)
        if self._dismissed is None:
            return deployment(PREFILLER, DECODER, self.leaving)
        self._asks -= 1
        if self._asks >= 0:
            return deployment(PREFILLER, DECODER, msgspec.structs.replace(self.leaving, standing="draining"))
        if self._dismissed.role and self._asks < -2:
            return deployment(PREFILLER, DECODER, instance(6, "prefiller", "prefiller-1"))
        return deployment(PREFILLER, DECODER)


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.cli.leaving.ASK_EVERY_S", 0.01)


@pytest.mark.parametrize("instance", ["decoder-1", f"{5:032x}"])
def test_drain_returns_when_the_instance_is_gone(short_path: Path, headrace: Headrace, instance: str) -> None:
    with AnsweringGateway(short_path, Leaving(asks=3)) as gateway:
        assert headrace("drain", instance, "--control", gateway.control) == (0, "decoder-1 has left\n", "")
    (dismissed,) = (message for message in gateway.heard if isinstance(message, Dismiss))
    assert (dismissed.instance, dismissed.role, dismissed.is_forced) == (f"{5:032x}", None, False)
    assert len(gateway.heard) == 6


def test_a_drain_that_takes_longer_goes_on_and_the_command_says_what_still_runs(
    short_path: Path, headrace: Headrace
) -> None:
    with AnsweringGateway(short_path, Leaving(asks=10**6)) as gateway:
        said = headrace("drain", "decoder-1", "--force", "--timeout", "0.1", "--control", gateway.control)
    text = "decoder-1 has not left yet (3 requests here, 0 of them of this gateway); it goes on"
    assert said == (1, "", f"headrace: error: {text}\n")
    assert isinstance(gateway.heard[1], Dismiss) and gateway.heard[1].is_forced


@pytest.mark.parametrize(("num_silent", "status"), [(2, 0), (10**6, 1)])
def test_a_gateway_that_is_busy_for_a_while_is_asked_again_and_one_that_is_gone_not_for_ever(
    short_path: Path, headrace: Headrace, monkeypatch: pytest.MonkeyPatch, num_silent: int, status: int
) -> None:
    monkeypatch.setattr("headrace.cli.operator.ANSWER_WITHIN_S", 0.2)
    leaving, num_asked = Leaving(asks=3), 0

    def answer(message: OperatorMessage) -> OperatorAnswer | None:
        nonlocal num_asked
        num_asked += 1
        return None if 3 < num_asked <= 3 + num_silent else leaving(message)

    with AnsweringGateway(short_path, answer) as gateway:
        said = headrace("drain", "decoder-1", "--control", gateway.control)
    gone = f"headrace: error: no gateway answers at {gateway.control}\n"
    assert said == ((0, "decoder-1 has left\n", "") if status == 0 else (1, "", gone))


def test_role_returns_when_the_successor_serves(short_path: Path, headrace: Headrace) -> None:
    with AnsweringGateway(short_path, Leaving(asks=2)) as gateway:
        said = headrace("role", "decoder-1", "prefiller", "--control", gateway.control)
    assert said == (0, "decoder-1 serves as prefiller-1\n", "")


def test_the_bounds_of_a_decoder_go_with_its_role_and_with_no_other(short_path: Path, headrace: Headrace) -> None:
    with AnsweringGateway(short_path, Leaving(asks=0)) as gateway:
        headrace("role", "prefiller-0", "decoder", "--tpot-ms", "50", "--timeout", "0.05", "--control", gateway.control)
        said = headrace("role", "decoder-1", "prefiller", "--tpot-ms", "50", "--control", gateway.control)
    assert isinstance(gateway.heard[1], Dismiss) and (gateway.heard[1].tpot_s, gateway.heard[1].role) == (
        0.05,
        "decoder",
    )
    assert said[0] == 2 and "--tpot-ms: must be left out for a prefiller" in said[2]


def test_an_instance_that_is_not_here_or_not_the_only_one_is_told_with_those_that_are(
    short_path: Path, headrace: Headrace
) -> None:
    told = deployment(PREFILLER, DECODER, instance(7, "decoder", "decoder-0"))
    with AnsweringGateway(short_path, always(told)) as gateway:
        _, _, nobody = headrace("drain", "decoder-9", "--control", gateway.control)
        status, _, two = headrace("drain", "decoder-0", "--control", gateway.control)
    assert status == 2
    assert "must be one of those that are here: prefiller-0 (00000000), decoder-0" in nobody
    assert "must be one alone, as a uuid is; by that name are here: decoder-0 (00000000), decoder-0" in two


def test_a_refusal_names_the_option_that_would_help(short_path: Path, headrace: Headrace) -> None:
    refused = Refused(sender=GATEWAY, field="force", text="must be given for decoder decoder-1: without it ..")

    def answer(message: OperatorMessage) -> OperatorAnswer:
        return refused if isinstance(message, Dismiss) else deployment(DECODER)

    with AnsweringGateway(short_path, answer) as gateway:
        status, _, err = headrace("drain", "decoder-0", "--control", gateway.control)
    assert status == 2 and err == "headrace: error: --force: must be given for decoder decoder-1: without it ..\n"
