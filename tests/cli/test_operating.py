"""The commands of an operator, as a person runs them against a gateway that answers as scripted."""

import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from answering_gateway import GATEWAY, AnsweringGateway, deployment, instance

from headrace.cli.app import run
from headrace.protocol.operator import Deployment, OperatorAnswer, OperatorMessage, Refused, RequestFacts

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
    other = instance(4, "decoder", "decoder-2", standing="refused", refusal="model differs", status=None)
    told = deployment(PREFILLER, DECODER, away, other, requests=(request,))
    with AnsweringGateway(short_path, always(told)) as gateway:
        status, out, err = headrace("status", "--control", gateway.control)
    assert (status, err) == (0, "")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[0] == "gateway serves tiny at http://127.0.0.1:8000, pid 39"
    assert f"prefiller-0 prefiller serving 41 3 0 1,234 {PREFILLER.uuid[:8]}" in lines
    assert f"decoder-1 decoder absent for 7 s 43 - - - {away.uuid[:8]}" in lines
    assert f"decoder-2 decoder refused: model differs 44 - - - {other.uuid[:8]}" in lines
    assert "1 requests: 1 transferring" in lines
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
