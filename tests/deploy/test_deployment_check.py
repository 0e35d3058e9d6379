"""Deployments against their models: what fits and what travels, and the number that breaks what does not fit."""

from dataclasses import replace
from pathlib import Path

import pytest

from headrace.deploy.check import Checked, check_deployment
from headrace.deploy.file import Deployment, read_deployment
from headrace.deploy.known import known_config
from headrace.deploy.transfer import RequestTransfer, plan_request
from headrace.errors import InputError
from headrace.model.families import FAMILIES
from headrace.model.shape import ModelShape
from headrace.roles.options import InstanceOptions
from headrace.roles.pool_plan import plan_pool

DEPLOY = Path(__file__).parents[2] / "deploy"
GB = 10**9


def deployment(name: str) -> Deployment:
    return read_deployment(DEPLOY / f"{name}.toml")


def checked(of: Deployment) -> Checked:
    shape = ModelShape.from_config(known_config(of.model))
    return check_deployment(of, shape, FAMILIES[shape.architecture].tensor_shapes)


def request_of(of: Checked, prompt_tokens: int | None = None) -> RequestTransfer:
    return plan_request(of.deployment, of.kv, of.pools, prompt_tokens)


@pytest.mark.parametrize("file", sorted(DEPLOY.glob("*.toml")), ids=lambda file: file.stem)
def test_every_file_of_ours_fits(file: Path) -> None:
    of = checked(read_deployment(file))
    for name, pool in of.pools.items():
        device, count = of.deployment.device, of.deployment.pools[name].count
        held = count * pool.kv_bytes if device.kind == "cpu" else pool.kv_bytes
        assert pool.weight_bytes + held <= device.memory_bytes * device.usable
        assert pool.num_pages * of.kv.num_layers * pool.page_bytes <= pool.kv_bytes
    request = request_of(of)
    assert request.num_bytes == request.num_pages * of.kv.page_size * of.token_bytes * num_copies(of)


def num_copies(of: Checked) -> int:
    """Of the KV that a decoder's group holds: one, but for latents, which every rank has."""
    return of.deployment.decoders.tp if of.kv.kind == "mla" else 1


def with_memory(of: Deployment, memory_bytes: int) -> Deployment:
    return replace(of, device=replace(of.device, memory_bytes=memory_bytes))


def test_deepseek_r1_does_not_fit_into_eight_devices_of_80_gb() -> None:
    with pytest.raises(InputError) as caught:
        checked(with_memory(deployment("deepseek-r1-tp8-3xtp8"), 80 * GB))
    weights = checked(deployment("deepseek-r1-tp8-3xtp8")).pools["prefillers"].weight_bytes
    assert str(caught.value) == (
        f"device.memory: a rank of prefillers holds {weights:,} bytes of weights, its device has 72,000,000,000 for "
        f"them, 90% of 80,000,000,000: {weights - 72 * GB:,} bytes too few"
    )
    assert weights > 80 * GB, "not even without a reserve"


def test_qwen3_coder_in_bf16_needs_more_than_one_host_of_eight_devices_of_141_gb() -> None:
    of = deployment("qwen3-coder-480b-tp8-3xtp8")
    in_bf16 = replace(of, model=of.model.removesuffix("-FP8"))
    with pytest.raises(InputError, match=r"^device.memory: a rank of prefillers holds 1[0-9]{2},"):
        checked(with_memory(in_bf16, 130 * GB))


def test_a_cpu_computes_with_what_it_dequantised() -> None:
    shape = ModelShape.from_config(known_config("Qwen/Qwen3-Coder-480B-A35B-Instruct-FP8"))
    of = deployment("laptop")
    large = replace(with_memory(of, 1000 * 10**12), model="Qwen/Qwen3-Coder-480B-A35B-Instruct-FP8")
    pools = {
        "prefillers": replace(of.prefillers, kv_memory_bytes=GB),
        "decoders": replace(of.decoders, kv_memory_bytes=GB),
    }
    as_bf16 = check_deployment(replace(large, **pools), shape, FAMILIES[shape.architecture].tensor_shapes)
    assert as_bf16.pools["decoders"].weight_bytes == 960_309_750_784
    assert as_bf16.weight_bytes == pytest.approx(480_154_875_392, rel=0.01)
    assert "FP8 weights become bf16 when they are loaded." in as_bf16.assumed


def test_the_laptops_pool_is_the_one_that_is_served() -> None:
    of = checked(deployment("laptop"))
    shape = ModelShape.from_config(known_config(of.deployment.model))
    options = InstanceOptions(role="decoder", name="", gateways=(), model_dir=Path(), model="")
    layout, max_model_len = plan_pool(shape, options)
    assert of.pools["decoders"].num_pages == layout.num_pages
    assert of.pools["decoders"].longest == max_model_len
    assert of.pools["decoders"].page_bytes == layout.kv.page_bytes


def test_a_host_holds_one_copy_of_weights_and_all_kv() -> None:
    of = deployment("laptop")
    needed = 269_030_016 + 3 * (512 << 20)
    three = replace(of, decoders=replace(of.decoders, count=2), device=replace(of.device, usable=1.0))
    assert checked(with_memory(three, needed)).pools["decoders"].num_hosts == 1
    with pytest.raises(InputError, match=f"^device.memory: weights and KV of all instances take {needed:,} bytes, the"):
        checked(with_memory(three, needed - 1))


def test_kv_memory_beside_the_weights_is_refused_where_it_does_not_fit() -> None:
    of = deployment("llama-3.1-70b-tp4-tp8")
    left = checked(of).pools["decoders"].kv_bytes
    fits = checked(replace(of, decoders=replace(of.decoders, kv_memory_bytes=8 * left)))
    assert fits.pools["decoders"].kv_bytes == left
    with pytest.raises(
        InputError, match=f"^decoders.kv_memory: must leave at most {left:,} bytes on each of 8 devices"
    ):
        checked(replace(of, decoders=replace(of.decoders, kv_memory_bytes=8 * left + 8)))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"max_model_len": 131_073}, r"^max_model_len: must be at most 131,072 \(the model's\), is 131,073$"),
        ({"tp": 3}, r"^decoders.tp: must divide the model's "),
        ({"page_size": 2**20}, r"^page_size: a rank of prefillers must hold the KV of 2,097,152 tokens, "),
    ],
)
def test_what_contradicts_the_model_is_refused_by_its_key(changed: dict[str, int], said: str) -> None:
    of = deployment("llama-3.1-70b-tp4-tp8")
    if tp := changed.pop("tp", None):
        of = replace(of, decoders=replace(of.decoders, tp=tp))
    with pytest.raises(InputError, match=said):
        checked(replace(of, **changed))


def test_a_context_that_the_kv_memory_does_not_hold_is_refused_with_what_it_would_take() -> None:
    of = deployment("laptop")
    small = replace(of.decoders, kv_memory_bytes=23_040 * 8000)
    with pytest.raises(InputError) as caught:
        checked(replace(of, decoders=small, max_model_len=8192))
    assert str(caught.value) == (
        f"max_model_len: a rank of decoders must hold the KV of 8,192 tokens, {8192 * 23_040:,} bytes; "
        f"has {8000 * 23_040:,} for it"
    )
    assert checked(replace(of, decoders=small)).pools["decoders"].longest == 8000


def test_a_wider_decoder_takes_halves_of_pages() -> None:
    request = request_of(checked(deployment("llama-3.1-70b-tp4-tp8")), 4097)
    assert [(sent.src_rank, sent.dst_rank) for sent in request.sent] == [(rank // 2, rank) for rank in range(8)]
    assert {sent.write_bytes for sent in request.sent} == {64 * 2 * 128 * 2}
    assert (request.num_pages, request.writes_per_layer, request.num_writes) == (64, 512, 80 * 512 + 1)
    assert request.num_bytes == 4096 * 327_680
    assert request.busiest_bytes == request.num_bytes // 4  # a prefiller's rank sends twice what a decoder's takes
    assert request.time_s == pytest.approx(request.busiest_bytes * 8 / 400e9 + 5e-6)
    assert not request.is_drawn


def test_a_narrower_decoder_takes_more_than_a_rank_sends() -> None:
    of = deployment("llama-3.1-70b-tp4-tp8")
    turned = replace(of, prefillers=replace(of.prefillers, tp=8), decoders=replace(of.decoders, tp=4))
    request = request_of(checked(turned), 4097)
    assert [(sent.src_rank, sent.dst_rank) for sent in request.sent] == [(rank, rank // 2) for rank in range(8)]
    assert request.busiest_bytes == request.num_bytes // 4


@pytest.mark.parametrize(("count", "num_hosts"), [(1, 1), (2, 1), (3, 2), (5, 3)])
def test_a_host_has_as_many_instances_as_its_devices_allow(count: int, num_hosts: int) -> None:
    of = deployment("llama-3.1-70b-tp4-tp8")
    more = replace(of, prefillers=replace(of.prefillers, count=count))
    assert checked(more).pools["prefillers"].num_hosts == num_hosts


def test_a_data_parallel_decoder_reads_one_rank_that_is_drawn() -> None:
    request = request_of(checked(deployment("deepseek-r1-tp8ep8-dp8ep8")), 4097)
    assert len(request.sent) == 1 and request.is_drawn
    assert request.num_bytes == request.busiest_bytes == 4096 * 70_272


def test_latents_go_to_every_rank_of_a_decoder_each_from_another() -> None:
    request = request_of(checked(deployment("deepseek-r1-tp8-3xtp8")), 4097)
    assert len({sent.src_rank for sent in request.sent}) == len({sent.dst_rank for sent in request.sent}) == 8
    assert request.num_bytes == 8 * request.busiest_bytes == 8 * 4096 * 70_272


def test_a_data_parallel_decoder_has_as_many_times_the_room() -> None:
    of = checked(deployment("deepseek-r1-tp8ep8-dp8ep8"))
    shared = checked(deployment("deepseek-r1-tp8-3xtp8"))
    assert of.pools["decoders"].weight_bytes > shared.pools["decoders"].weight_bytes  # attention is whole on each rank
    assert 8 * of.pools["decoders"].num_tokens > 5 * shared.pools["decoders"].num_tokens


@pytest.mark.parametrize(("page_size", "wanted"), [(16, 64), (32, 64), (64, None)])
def test_small_writes_are_told_with_the_page_size_that_would_do(page_size: int, wanted: int | None) -> None:
    of = deployment("qwen3-coder-480b-tp8-3xtp8")
    assert request_of(checked(replace(of, page_size=page_size))).line_rate_page_size == wanted


def test_where_there_is_no_rdma_small_writes_are_as_good() -> None:
    assert request_of(checked(deployment("laptop"))).line_rate_page_size is None


def test_a_prompt_that_does_not_fit_is_refused() -> None:
    with pytest.raises(InputError, match="^prompt_tokens: must be at most 8,192, which is what fits, is 8,193$"):
        request_of(checked(deployment("laptop")), 8193)
