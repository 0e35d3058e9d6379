"""`headrace serve --deployment FILE`: the same as its options would be, or refused in one line."""

from hashlib import sha256
from pathlib import Path

import pytest

from headrace.cli import commands
from headrace.cli.app import run
from headrace.cli.deployed import SAID
from headrace.cli.serve import ServeOptions, plan_children

DEPLOY = Path(__file__).parents[2] / "deploy"
LAPTOP = DEPLOY / "laptop.toml"


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ServeOptions]:
    """What `serve` is called with."""
    options: list[ServeOptions] = []
    monkeypatch.setattr(commands, "configure_logging", lambda level, name: None)
    monkeypatch.setattr(commands, "serve", lambda given: options.append(given) or True)
    return options


def commands_of(options: ServeOptions) -> list[tuple[str, ...]]:
    children = plan_children(options, ports=(9000,), model_dir=Path("/models/tiny"), directory=Path("/run/of"))
    return [child.command for child in children]


def test_the_laptops_file_starts_what_serve_starts_without_options(served: list[ServeOptions]) -> None:
    assert run(["serve", "--deployment", str(LAPTOP)]) == 0
    assert run(["serve"]) == 0
    assert commands_of(served[0]) == commands_of(served[1])
    assert served[0].model == served[1].model == served[0].served_name


def test_each_role_gets_the_sizes_that_the_file_gives_it(served: list[ServeOptions], tmp_path: Path) -> None:
    file = tmp_path / "other.toml"
    text = (
        LAPTOP.read_text().replace('"smollm2-135m-instruct"', '"org/tiny"').replace("page_size = 16", "page_size = 8")
    )
    head, between, decoders = text.partition("[decoders]")
    head = head.replace("count = 1", "count = 2\ntp = 4").replace("chunk_tokens = 256", "chunk_tokens = 99")
    decoders = decoders.replace("32", "7\ntp = 2\ndp = 3\ntpot_ms = 40\nmax_stall_ms = 80").replace("512MiB", "64MiB")
    file.write_text(head + between + decoders)
    assert run(["serve", "--deployment", str(file), "--port", "9001", "--threads", "2"]) == 0
    options = served[0]
    assert (options.model, options.served_name, options.port, options.threads) == ("org/tiny", "org/tiny", 9001, 2)
    of_gateway, *of_prefillers, of_decoder = (" ".join(command) for command in commands_of(options))
    assert "--model /models/tiny --served-name org/tiny" in of_gateway
    assert len(of_prefillers) == 2
    for command in of_prefillers:
        assert "prefiller --tp 4 " in command and "--page-size 8" in command and "--tpot-ms" not in command
        assert command.endswith(f"--chunk-tokens 99 --max-running 32 --kv-memory {512 << 20}")
    assert "decoder --tp 2 --dp 3 " in of_decoder
    assert "--tpot-ms 40.0 --max-stall-ms 80.0" in of_decoder
    assert of_decoder.endswith(f"--chunk-tokens 256 --max-running 7 --kv-memory {64 << 20}")


def test_the_gateway_is_told_what_the_file_promises_and_of_keys_their_digests_alone(
    served: list[ServeOptions], tmp_path: Path
) -> None:
    file = tmp_path / "promising.toml"
    (tmp_path / "batch.key").write_text("sk-batch\n")
    promises = '[tiers.interactive]\nttft_ms = 500\ntpot_ms = 49.9\n[keys.batch]\nfile = "batch.key"\ntier = "flex"\n'
    file.write_text(LAPTOP.read_text() + promises)
    assert run(["serve", "--deployment", str(file)]) == 0
    of_gateway, *others = (" ".join(command) for command in commands_of(served[0]))
    digest = sha256(b"sk-batch").hexdigest()
    assert f"--interactive-ttft-ms 500 --interactive-tpot-ms 49.9 --key-tier {digest}=flex" in of_gateway
    assert not any("49.9" in other or digest in other for other in others)
    assert "sk-batch" not in of_gateway


GIVEN = (
    *("--model org/tiny", "--dtype fp32", "--page-size 8", "--max-model-len 512", "--prefillers 2", "--decoders 2"),
    *(
        "--prefiller-tp 2",
        "--decoder-tp 2",
        "--decoder-dp 2",
        "--colocated",
        "--chunk-tokens 64",
        "--max-running 5",
        "--kv-memory 1GB",
        "--tpot-ms 40",
        "--max-stall-ms 80",
        "--interactive-ttft-ms 500",
        "--interactive-tpot-ms 50",
        "--flex-ttft-ms 9000",
        "--flex-tpot-ms 900",
    ),
    *("--transports tcp", "--require-provider tcp"),
)


@pytest.mark.parametrize("given", GIVEN)
def test_what_the_file_says_must_not_stand_beside_it(
    given: str, served: list[ServeOptions], capsys: pytest.CaptureFixture[str]
) -> None:
    option = given.split()[0]
    assert run(["serve", "--deployment", str(LAPTOP), *given.split()]) == 2
    said = f"must be left out with --deployment: {LAPTOP} says it"
    assert capsys.readouterr().err == f"headrace: error: {option}: {said}\n"
    assert served == []


def test_every_option_that_a_file_says_was_tried() -> None:
    assert {given.split()[0].removeprefix("--").replace("-", "_") for given in GIVEN} == set(SAID)


@pytest.mark.parametrize(
    ("text", "instead", "said"),
    [
        (
            '"cpu"',
            '"cuda"\nper_host = 8',
            "device.kind: must be cpu to be served, is cuda: headrace computes on CPUs; ",
        ),
        ("count = 1", "count = 1\ndp = 2", "prefillers.dp: must not be there, known are count, tp, "),
        ("count = 1", "count = 0", "prefillers.count: must be a whole number from 1 to 256, is 0"),
    ],
)
def test_what_cannot_be_served_here_is_one_line_and_status_2(
    *,
    text: str,
    instead: str,
    said: str,
    served: list[ServeOptions],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    file = tmp_path / "other.toml"
    file.write_text(LAPTOP.read_text().replace(text, instead, 1))
    assert run(["serve", "--deployment", str(file)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"headrace: error: {file}: {said}") and error.count("\n") == 1
    assert served == []
