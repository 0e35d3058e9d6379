"""`headrace check FILE`: what it says of deployments that fit, and of those that do not."""

import json
from pathlib import Path

import pytest

from headrace.cli.app import run
from headrace.deploy.known import known_config

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
LAPTOP = DEPLOY / "laptop.toml"
LLAMA = DEPLOY / "llama-3.1-70b-tp4-tp8.toml"


def said(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert run(["check", *map(str, arguments)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_a_deployment_that_fits_is_told_with_its_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    out = said(capsys, LLAMA)
    assert out.startswith(f"{LLAMA} fits.\n")
    assert out.endswith("is not known here.\n")
    for line in (
        "weights: 141.11 GB in bf16",
        "KV: 327,680 bytes a token in bf16, pages of 64 tokens",
        "prefillers: 2 x TP4, on 1 host",
        "decoders: 1 x TP8, on 1 host",
        "| page of one layer on a rank, bytes |     65,536 |    32,768 |",
        "| longest request, tokens            |    131,072 |   131,072 |",
        "| 3              |           6 7 |           32,768 |",
        "transports: verbs; a device's NICs: 1 x 400 Gbit/s, pairs 0-0",
        "time: 6.72 ms, for the busiest rank's 335,544,320 bytes",
    ):
        assert line in out.splitlines()


def test_what_the_documentation_shows_is_what_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    out = said(capsys, "deploy/deepseek-r1-tp8ep8-dp8ep8.toml")
    assert f"```\n{out}```\n" in (ROOT / "docs" / "deployments.md").read_text()


def test_for_machines_the_same_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    answer = json.loads(said(capsys, LAPTOP, "--json", "--prompt-tokens", 1025))
    assert any("counted once" in line for line in answer["assumed"])
    assert answer["token_bytes"] == 23_040
    assert answer["pools"]["decoders"]["num_pages"] == 1456
    assert answer["request"]["num_pages"] == 64 and answer["request"]["num_bytes"] == 1024 * 23_040
    assert answer["deployment"]["link"]["transports"] == ["mapped", "tcp"]


def test_small_writes_are_worth_knowing_and_no_refusal(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "small.toml"
    file.write_text(LLAMA.read_text().replace("page_size = 64", "page_size = 16"))
    small = "The smallest write is 8,192 bytes, less than the 32,768 that reach line rate over RDMA. A page_size of 64"
    assert f"Worth knowing:\n\n- {small} would.\n" in said(capsys, file)
    assert "Worth knowing" not in said(capsys, LLAMA)


def test_a_model_of_ones_own_is_read_from_its_directory(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = {**known_config("smollm2-135m-instruct"), "num_hidden_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    file = tmp_path / "own.toml"
    file.write_text(LAPTOP.read_text().replace("smollm2-135m-instruct", "me/own"))
    assert "KV: 2,304 bytes a token" in said(capsys, file, "--config", tmp_path)
    file.write_text(LAPTOP.read_text().replace("smollm2-135m-instruct", str(tmp_path)))
    assert "KV: 2,304 bytes a token" in said(capsys, file)


@pytest.mark.parametrize(
    ("text", "instead", "options", "line"),
    [
        (
            '"80GB"',
            '"30GB"',
            "",
            "{file}: device.memory: a rank of prefillers holds 36,854,841,344 bytes of weights, its",
        ),
        (
            "tp = 8",
            "tp = 5",
            "",
            "{file}: decoders.tp: must divide the model's 8 KV heads or be a multiple of them, is 5",
        ),
        ("page_size", "pagesize", "", "{file}: pagesize: must not be there, known are model, dtype, page_size,"),
        (
            "meta-llama/Llama-3.1-70B-Instruct",
            "me/own",
            "",
            "{file}: model: must be a directory or, without --config, one of deepseek-ai/",
        ),
        ("tp = 8", "tp = 8", "--config {file}", "--config: must be a directory with a config.json, is {file}"),
        (
            "tp = 8",
            "tp = 8",
            "--config {file.parent}",
            "--config: must be a directory with a config.json, is {file.parent}",
        ),
        ("meta-llama/Llama-3.1-70B-Instruct", "/", "", "{file}: model: must be a directory with a config.json, is /"),
        (
            "tp = 8",
            "tp = 8",
            "--prompt-tokens 200000",
            "--prompt-tokens: must be at most 131,072, which is what fits, is ",
        ),
        ("tp = 8", "tp = 8", "--prompt-tokens 1", "--prompt-tokens: must be a whole number from 2 to 1048576, is '1'"),
    ],
)
def test_what_does_not_fit_is_one_line_and_status_2(
    *, text: str, instead: str, options: str, line: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "other.toml"
    file.write_text(LLAMA.read_text().replace(text, instead))
    assert run(["check", str(file), *options.format(file=file).split()]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith(f"headrace: error: {line.format(file=file)}"), err


def test_a_file_that_is_not_there_is_said_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", "nothing.toml"]) == 2
    assert capsys.readouterr().err == (
        "headrace: error: nothing.toml: must be a file that can be read: No such file or directory\n"
    )
