"""What a profile is told: what it runs with, and what is wrong is found before anything is loaded."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer import BadParameter

from headrace.cli.app import run
from headrace.cli.profile_step.plan import ProfileOptions, ProfilePlan, plan_profile, stream_counts
from headrace.errors import InputError
from headrace.roles.pool_plan import plan_pool

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}

Planned = Callable[..., ProfilePlan]


@pytest.fixture
def planned(tmp_path: Path) -> Planned:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))

    def plan(**changes: Any) -> ProfilePlan:
        options: dict[str, Any] = {
            "model": "tiny",
            "dtype": "bf16",
            "kernels": "auto",
            "threads": 1,
            "cpus": (),
            "streams": (1, 8),
            "kv_len": 40,
            "num_steps": 20,
            "temperature": 0.0,
            "json_file": None,
            "log_level": "warning",
        }
        return plan_profile(ProfileOptions(**{**options, **changes}), model_dir=tmp_path, directory=tmp_path, port=1234)

    return plan


def test_numbers_of_streams_are_read_in_their_order() -> None:
    assert stream_counts("8,1").numbers == (8, 1)
    assert stream_counts(stream_counts("256")).numbers == (256,)
    assert str(stream_counts("1,8")) == "1,8"


@pytest.mark.parametrize("text", ["", "x", "1,", "0", "1,257", "-1", "1.5", "99999999999", "1 2"])
def test_what_is_no_number_of_streams_is_refused(text: str) -> None:
    with pytest.raises(BadParameter, match="must be numbers of streams such as 1,8, each from 1 to 256"):
        stream_counts(text)


def test_a_number_of_streams_is_named_once() -> None:
    with pytest.raises(BadParameter, match="once"):
        stream_counts("2,8,2")


def test_all_streams_fit_into_the_pool_from_first_to_last_token(planned: Planned) -> None:
    plan = planned()
    layout, max_model_len = plan_pool(plan.shape, plan.instance)
    longest = plan.asked(8).prompt_tokens + plan.asked(8).max_tokens
    assert longest == max_model_len
    assert layout.num_pages * layout.kv.page_size >= 8 * longest
    assert plan.instance.max_running == 8 and plan.instance.role == "colocated"


def test_gateway_client_and_instance_are_told_of_the_same_place_and_model(planned: Planned) -> None:
    plan = planned()
    gateway = plan.gateway_command()
    assert gateway[gateway.index("--control") + 1] == plan.instance.gateways[0]
    assert gateway[gateway.index("--port") + 1] == str(plan.asked(1).port) == "1234"
    assert gateway[gateway.index("--served-name") + 1] == plan.asked(1).model == plan.instance.model


def test_streams_that_the_model_does_not_hold_are_refused(planned: Planned) -> None:
    with pytest.raises(InputError, match=r"kv_len: must leave room for the \d+ tokens .* the model's 512, is 500"):
        planned(kv_len=500)
    with pytest.raises(InputError, match="kv_len: must leave room"):
        planned(num_steps=1000)


def test_a_file_in_no_folder_is_refused(planned: Planned, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="json_file: must be in a folder that exists"):
        planned(json_file=tmp_path / "nowhere" / "profile.json")


def test_a_row_reads_its_keys_in_every_layer(planned: Planned) -> None:
    head_bytes = 16 * 2  # head_dim in bf16
    assert planned().key_bytes(100) == 100 * 2 * 2 * 2 * head_bytes


def test_a_row_reads_no_more_than_the_window_in_local_layers(planned: Planned, tmp_path: Path) -> None:
    gemma = {
        **LLAMA,
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 6,
        "head_dim": 16,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 16,
        "sliding_window": 32,
        "sliding_window_pattern": 6,
        "rope_local_base_freq": 10_000.0,
        "rope_theta": 1_000_000.0,
    }
    del gemma["hidden_act"]
    (tmp_path / "config.json").write_text(json.dumps(gemma))
    plan = planned()
    assert plan.shape.local_attention is not None and len(plan.shape.local_attention.layers) == 5
    token_bytes = 2 * 2 * 16 * 2
    assert plan.key_bytes(100) == (100 + 5 * 32) * token_bytes
    assert plan.key_bytes(20) == 6 * 20 * token_bytes


WRONG = [
    ("--streams 1,x", "--streams: must be numbers of streams such as 1,8, each from 1 to 256, is '1,x'"),
    ("--kv-len 0", "--kv-len: must be a whole number from 1 to 1048576, is '0'"),
    ("--steps 1", "--steps: must be a whole number from 2 to 1048576, is '1'"),
    ("--temperature=-1", "--temperature: must be a number from 0 to 100, is '-1'"),
    ("--temperature nan", "--temperature: must be a number from 0 to 100, is 'nan'"),
    ("--json /nowhere/at/all.json", "--json: must be in a folder that exists, is /nowhere/at/all.json"),
    ("--kv-len 8191", "--kv-len: must leave room for the"),
    ("--kernels fast", "--kernels: must be auto, native or torch, is 'fast'"),
    ("--cpus 0,1", "--cpus: must be one for each of 1 threads"),
]


@pytest.mark.parametrize(("words", "said"), WRONG, ids=[words for words, _ in WRONG])
def test_what_is_wrong_with_the_command_is_one_line_on_stderr(
    smollm2: Path, capsys: pytest.CaptureFixture[str], words: str, said: str
) -> None:
    assert run(["profile-step", "--model", str(smollm2), *words.split(" ")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"headrace: error: {said}") and error.count("\n") == 1
