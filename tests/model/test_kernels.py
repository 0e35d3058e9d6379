"""Which kernels a model is opened with: what is said, what is refused, and weights that are shared."""

import logging
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from llama_oracle import config_of
from native_worlds import needs_kernels
from thread_ranks import in_ranks
from transformers import LlamaForCausalLM

from headrace.errors import InputError
from headrace.kvcache.layout import KVDtype
from headrace.model import _cpu, native_ops
from headrace.model.batch import Batch, Row
from headrace.model.checkpoint import fingerprint
from headrace.model.interface import Model
from headrace.model.kernels import open_model
from headrace.model.options import ComputeOptions
from headrace.model.parallel import Parallel

IDS = [5, 3, 99, 7, 7, 1, 2]


def tiny(directory: Path, *, head_dim: int) -> Path:
    torch.manual_seed(5)
    config = config_of("group of 4")
    config.head_dim = head_dim
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("tiny"), head_dim=32)


def logits_of(model: Model) -> torch.Tensor:
    """Of the last token, in a pool of two pages."""
    row = Row(token_ids=IDS, begin=0, page_table=[1], wants_logits=True)
    batch = Batch.of([row], page_size=16, num_pages=2, vocab_size=model.shape.vocab_size)
    layout = model.shape.kv_layout(16, "bf16")
    views = [torch.zeros(2, layout.num_kv_heads, 2, 16, layout.head_dim, dtype=torch.bfloat16)] * layout.num_layers
    return model.forward(batch, [view.clone() for view in views])


def opened(directory: Path, options: ComputeOptions, *, dtype: KVDtype = "bf16") -> AbstractContextManager[Model]:
    return open_model(directory, fingerprint=fingerprint(directory, dtype=dtype), dtype=dtype, options=options)


@needs_kernels
def test_native_ones_are_taken_where_they_can_be(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), opened(directory, ComputeOptions()) as native:
        ours = logits_of(native)
    assert caplog.messages[0] == f"kernels: native ({_cpu.instruction_sets()[0]}), 1 thread on any CPU"
    assert caplog.messages[1].startswith("weights: 0 MB packed in ")
    with opened(directory, ComputeOptions(kernels="torch")) as plain:
        torch.testing.assert_close(ours, logits_of(plain), rtol=0.05, atol=0.05)


@needs_kernels
def test_threads_and_cpus_are_told_and_change_nothing(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(directory, ComputeOptions()) as one:
        expected = logits_of(one)
    options = ComputeOptions(kernels="native", threads=2, cpus=(0, 0))
    with caplog.at_level(logging.INFO), opened(directory, options) as two:
        assert torch.equal(logits_of(two), expected)
    assert caplog.messages[0].endswith(", 2 threads on CPUs 0, 0")


@needs_kernels
def test_who_comes_second_maps_what_the_first_packed(
    directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = ComputeOptions(share_in=tmp_path / "weights")
    with opened(directory, options) as first, caplog.at_level(logging.INFO), opened(directory, options) as second:
        assert torch.equal(logits_of(first), logits_of(second))
    assert "shared with pid" in caplog.messages[1]


@needs_kernels
def test_each_rank_packs_its_part_for_itself(directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options, key = ComputeOptions(share_in=tmp_path / "weights"), fingerprint(directory, dtype="bf16")

    def act(parallel: Parallel) -> torch.Tensor:
        with open_model(directory, fingerprint=key, dtype="bf16", options=options, parallel=parallel) as model:
            logits = logits_of(model)
            parallel.group.all_gather(logits)  # until the other has packed, too
            return logits

    with opened(directory, options) as alone:
        expected = logits_of(alone)
    with caplog.at_level(logging.INFO):
        results = in_ranks(act, tp=2)
    assert sum("packed in" in message for message in caplog.messages) == 2
    for logits in results:
        torch.testing.assert_close(logits, expected, rtol=0.05, atol=0.05)


def test_fp32_is_computed_by_torch_and_native_ones_are_refused(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO), opened(directory, ComputeOptions(), dtype="fp32"):
        assert caplog.messages == ["kernels: torch (native ones compute in bf16), 1 thread on any CPU"]
    said = "^kernels: must be auto or torch here: native ones compute in bf16$"
    with pytest.raises(InputError, match=said), opened(directory, ComputeOptions(kernels="native"), dtype="fp32"):
        pass


def test_a_model_without_native_kernels_is_computed_by_torch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    odd = tiny(tmp_path, head_dim=24)
    with caplog.at_level(logging.INFO), opened(odd, ComputeOptions()):
        pass
    assert caplog.messages[0].startswith("kernels: torch (")
    said = "^kernels: must be auto or torch here: "
    with pytest.raises(InputError, match=said), opened(odd, ComputeOptions(kernels="native")):
        pass


def test_a_cpu_without_them_uses_torch_and_says_why(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native_ops._cpu, "instruction_sets", list)
    with caplog.at_level(logging.INFO), opened(directory, ComputeOptions()):
        assert caplog.messages == ["kernels: torch (this CPU has no avx512_bf16), 1 thread on any CPU"]
