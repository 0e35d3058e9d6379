"""`headrace plan`: from the command line to a screen, a page, a deployment file."""

import json
import re
from pathlib import Path

import pytest
from profiled import profiled

from headrace.cli.app import run
from headrace.deploy.file import read_deployment
from headrace.planner.profile import write_profile

WANTED = ("plan", "--rate", "2", "--ttft-ms", "2000", "--tpot-ms", "30", "--workload", "long")


def test_it_answers_on_a_screen_with_its_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*WANTED, "--model", "meta-llama/Llama-3.1-8B"]) == 0
    told = capsys.readouterr().out
    assert "STAY COLOCATED WITH CHUNK" in told and "step times are wrong by 8%" in told
    assert "colocated  1 colocated, TP1 h100" in told and "split" in told


def test_a_plan_is_a_page_json_and_a_deployment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "deploy.toml", tmp_path / "plan"
    asked = (*WANTED, "--model", "meta-llama/Llama-3.1-8B", "--least", "cost", "--decode-device", "h100")
    assert run([*asked, "--out", str(out), "--write", str(file)]) == 0
    assert f"report: {out / 'plan.html'}" in capsys.readouterr().out
    told = json.loads((out / "plan.json").read_text())
    assert told["region"] and len(told["frontier"]) == 6 and told["objective"] == "cost"
    page = (out / "plan.html").read_text()
    assert page.count("<svg") == 3 and "http" not in page.split("<svg")[0].split("</style>")[1]
    deployment = read_deployment(file)
    assert deployment.prefillers.count == told["split"]["pools"][0]["count"]
    assert deployment.tiers.budgets["interactive"].ttft_s == 2.0
    assert run(["check", str(file)]) == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ("--model", "deepseek-ai/DeepSeek-R1", "--device", "a100"),
            r"--device: must hold deepseek-ai/DeepSeek-R1 and .* tokens on one host.*; a100 does not",
        ),
        (("--device", "h300"), "--device: must be one of a100, .*, is 'h300'"),
        (("--link", "fast"), "--link: must be one of 1gbit, .*, is 'fast'"),
        (("--model", "nobody/nothing"), "--model: must be a directory or"),
        (("--workload", "none.csv"), "--workload: must be a trace file that is there, is none.csv"),
        (("--write", "no/such/folder/file.toml"), "--write: must be in a folder that exists"),
        (("--least", "money"), "--least.*must be devices, cost or power"),
    ],
)
def test_what_is_wrong_is_told_by_its_option(
    options: tuple[str, str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*WANTED, *options]) == 2
    assert re.search(said, capsys.readouterr().err)


def test_a_plan_of_a_profile_says_how_to_start_what_it_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, deployment = tmp_path / "profile.json", tmp_path / "deploy.toml"
    write_profile(file, profiled("HuggingFaceTB/SmolLM2-135M-Instruct"))
    asked = ("plan", "--profile", str(file), "--rate", "2", "--ttft-ms", "2000", "--tpot-ms", "100")
    assert run([*asked, "--workload", "short", "--write", str(deployment)]) == 0
    told = capsys.readouterr().out
    assert "start it: headrace serve --colocated --decoders 1 --chunk-tokens" in told and "wrong by 5%" in told
    read = read_deployment(deployment)
    assert read.device.kind == "cpu" and read.decoders.kv_memory_bytes == 2000 * 368_640
    assert run([*asked, "--device", "h100"]) == 2
    assert "--device: must not be given with --profile" in capsys.readouterr().err
