"""Engine and runner over a tiny Llama in fp32: however a prompt is cut, batched, preempted or handed over, the greedy
text is the same.

Sums of another order give logits that differ in their last bits. The tests make sure that no choice was that close.
"""

from collections.abc import Sequence

import pytest
import torch

from headrace.engine.engine import Engine
from headrace.engine.prefill_queue import PrefillQueue, Prompt
from headrace.engine.requests import EngineOptions, EngineRequest, NewToken, SamplingParams
from headrace.engine.runner import Runner
from headrace.engine.sampling import top2_margin
from headrace.engine.step import Draw, StepRow
from headrace.errors import InputError
from headrace.kvcache.layout import num_pages_for
from headrace.kvcache.pages import PagePool
from headrace.kvcache.prefix import PrefixIndex
from headrace.model.batch import Batch, Row
from headrace.model.interface import AfterLayer, nothing_after
from headrace.model.llama import Llama, tensor_shapes
from headrace.model.shape import ModelShape
from headrace.model.torch_ops import TorchOps

PAGE_SIZE = 4
NUM_LAYERS = 2
SHAPE = ModelShape.from_config(
    {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": NUM_LAYERS,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 101,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 256,
        "rope_theta": 10_000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
)
SAFE_MARGIN = 1e-3


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def llama() -> Llama:
    draw = torch.Generator().manual_seed(0)
    shapes = tensor_shapes(SHAPE)
    return Llama(SHAPE, lambda name: torch.randn(shapes[name], generator=draw) / 2, TorchOps(SHAPE, "fp32"))


class Watched:
    """A model that keeps its logits, to tell how close its choices were."""

    def __init__(self, model: Llama) -> None:
        self.shape = model.shape
        self.model = model
        self.logits: list[torch.Tensor] = []

    def forward(
        self, batch: Batch, views: Sequence[torch.Tensor], after_layer: AfterLayer = nothing_after
    ) -> torch.Tensor:
        logits = self.model.forward(batch, views, after_layer)
        self.logits += list(logits)
        return logits


def views(num_pages: int) -> list[torch.Tensor]:
    """Poisoned: what was not written must not be read."""
    shape = (num_pages, SHAPE.num_kv_heads, 2, PAGE_SIZE, SHAPE.head_dim)
    return [torch.full(shape, float("nan")) for _ in range(NUM_LAYERS)]


class Site:
    """An engine with a pool in memory, and the model that runs its steps."""

    def __init__(self, llama: Llama, *, num_pages: int = 64, chunk_tokens: int = 1000, samples: bool = False) -> None:
        self.model = Watched(llama)
        self.views = views(num_pages)
        self.runner = Runner(self.model, self.views, page_size=PAGE_SIZE, num_pages=num_pages)
        self.pool = PagePool(num_pages, PrefixIndex())
        options = EngineOptions(
            page_size=PAGE_SIZE,
            chunk_tokens=chunk_tokens,
            max_model_len=SHAPE.max_model_len,
            sample_from_prefill=samples,
        )
        self.engine = Engine(pages=self.pool, options=options, salt=b"tiny", vocab_size=SHAPE.vocab_size)

    def generate(self, requests: Sequence[EngineRequest]) -> dict[str, list[int]]:
        """All at once, as far as there is room."""
        outside = list(requests)
        texts: dict[str, list[int]] = {request.request_id: [] for request in requests}
        while outside or self.engine.has_work:
            while outside and self.engine.try_admit(outside[0]) is not None:
                self.engine.start(outside.pop(0).request_id)
            step = self.engine.begin_step(0.0)
            assert step is not None
            self.engine.commit_step(step, self.runner.run(step.rows), 0.0)
            self.engine.check()
            for output in self.engine.drain_outputs():
                if isinstance(output, NewToken):
                    texts[output.request_id].append(output.token_id)
        return texts


def requests_of(*, temperature: float = 0.0, max_tokens: int = 12) -> list[EngineRequest]:
    draw = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, SHAPE.vocab_size, (num,), generator=draw).tolist() for num in (1, 3, 8, 9, 21, 33)]
    return [
        EngineRequest(
            request_id=f"{number}",
            token_ids=tuple(token_ids),
            max_tokens=max_tokens,
            sampling=SamplingParams(temperature=temperature, seed=number),
            stop_token_ids=frozenset(),
        )
        for number, token_ids in enumerate(prompts)
    ]


def alone(llama: Llama, requests: Sequence[EngineRequest]) -> dict[str, list[int]]:
    """Each for itself, its prompt in one chunk; no choice was close."""
    texts: dict[str, list[int]] = {}
    for request in requests:
        site = Site(llama)
        texts |= site.generate([request])
        position = len(request.token_ids)
        for logits in site.model.logits:
            assert top2_margin(logits.numpy(), request.sampling, position) > SAFE_MARGIN
            position += 1
    return texts


@pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["greedy", "drawn"])
@pytest.mark.parametrize("samples", [False, True], ids=["decodes the last", "samples from prefill"])
@pytest.mark.parametrize("chunk_tokens", [1, 5, 1000])
def test_texts_do_not_depend_on_chunks_or_on_company(
    llama: Llama, chunk_tokens: int, samples: bool, temperature: float
) -> None:
    requests = requests_of(temperature=temperature)
    expected = alone(llama, requests)
    site = Site(llama, chunk_tokens=chunk_tokens, samples=samples)
    assert site.generate(requests) == expected
    assert site.generate([again(request) for request in requests]) == {f"again {k}": v for k, v in expected.items()}
    assert site.engine.statistics().num_cached_tokens > 0


def again(request: EngineRequest) -> EngineRequest:
    """Its prompt is in the prefix index by now."""
    return EngineRequest(
        request_id=f"again {request.request_id}",
        token_ids=request.token_ids,
        max_tokens=request.max_tokens,
        sampling=request.sampling,
        stop_token_ids=request.stop_token_ids,
    )


@pytest.mark.parametrize("samples", [False, True], ids=["decodes the last", "samples from prefill"])
def test_texts_do_not_depend_on_preemption(llama: Llama, samples: bool) -> None:
    short = [
        EngineRequest(
            request_id=f"short {number}",
            token_ids=(number,),
            max_tokens=1,
            sampling=SamplingParams(),
            stop_token_ids=frozenset(),
        )
        for number in range(10)
    ]
    requests = requests_of(max_tokens=24)
    expected = alone(llama, requests)
    site = Site(llama, num_pages=24, chunk_tokens=7, samples=samples)
    site.generate(short)
    assert site.generate(requests) == expected
    assert site.engine.statistics().num_preemptions > 1
    assert site.pool.statistics().num_held == 0


def prefilled_elsewhere(llama: Llama, request: EngineRequest, pages: Sequence[int]) -> list[torch.Tensor]:
    """The pool of a prefiller that computed the request's prompt, in chunks of 6, into these pages."""
    there = views(32)
    runner = Runner(llama, there, page_size=PAGE_SIZE, num_pages=32)
    queue: PrefillQueue[str] = PrefillQueue(chunk_tokens=6)
    queue.add(Prompt(key="a", tier="flex", token_ids=request.token_ids, pages=pages, computed=0), 0.0)
    while (step := queue.next_step(0.0)) is not None:
        assert runner.run(step.rows) == []
        queue.commit(step, 0.0)
    return there


def run_to_end(site: Site) -> list[int]:
    text = []
    while (step := site.engine.begin_step(0.0)) is not None:
        site.engine.commit_step(step, site.runner.run(step.rows), 0.0)
        text += [output.token_id for output in site.engine.drain_outputs() if isinstance(output, NewToken)]
    return text


def kv(pool: Sequence[torch.Tensor], pages: Sequence[int], num_tokens: int) -> torch.Tensor:
    """Of positions [0, num_tokens), over all layers."""
    at = torch.arange(num_tokens)
    return torch.stack([view[torch.tensor(pages)[at // PAGE_SIZE], :, :, at % PAGE_SIZE] for view in pool])


def test_a_handed_over_prompt_is_bit_for_bit_what_would_have_been_computed_here(llama: Llama) -> None:
    for request in requests_of()[1:]:
        num_prefilled = len(request.token_ids) - 1
        local = Site(llama, chunk_tokens=6)
        admission = local.engine.try_admit(request)
        assert admission is not None
        local.engine.start(request.request_id)
        expected = run_to_end(local)

        pages = tuple(range(31, 31 - num_pages_for(num_prefilled, PAGE_SIZE), -1))
        there = prefilled_elsewhere(llama, request, pages)
        assert torch.equal(kv(there, pages, num_prefilled), kv(local.views, admission.pages, num_prefilled))

        here = Site(llama)
        assert here.engine.try_admit(request) is not None
        lent = here.engine.pages_to_fetch(request.request_id)
        here.engine.fetch(request.request_id)
        for view_here, view_there in zip(here.views, there, strict=True):
            view_here[list(lent)] = view_there[list(pages)]
        here.engine.fetched(request.request_id, 0)
        assert run_to_end(here) == expected
        assert len(set(expected)) > 3


def test_rows_that_draw_nothing_yield_no_token(llama: Llama) -> None:
    runner = Runner(llama, views(8), page_size=PAGE_SIZE, num_pages=8)
    prefill = StepRow(row=Row(token_ids=[3, 4, 5], begin=0, page_table=[2], wants_logits=False), draw=None)
    last = Row(token_ids=[7, 8], begin=0, page_table=[5], wants_logits=True)
    drawn = StepRow(row=last, draw=Draw(sampling=SamplingParams(), position=2))
    layers: list[int] = []
    assert runner.run([prefill], layers.append) == []
    assert layers == list(range(NUM_LAYERS))
    (token,) = runner.run([prefill, drawn, prefill_elsewhere()])
    assert [token] == runner.run([drawn])


def prefill_elsewhere() -> StepRow:
    return StepRow(row=Row(token_ids=[9], begin=0, page_table=[6], wants_logits=False), draw=None)


def test_a_row_outside_of_the_pool_is_refused_before_anything_is_computed(llama: Llama) -> None:
    memory = views(8)
    runner = Runner(llama, memory, page_size=PAGE_SIZE, num_pages=8)
    outside = StepRow(row=Row(token_ids=[3], begin=0, page_table=[8], wants_logits=False), draw=None)
    with pytest.raises(InputError, match="rows: row 1 must have page ids in 0..7"):
        runner.run([prefill_elsewhere(), outside])
    assert all(view.isnan().all() for view in memory)


def test_views_of_another_number_of_layers_are_refused(llama: Llama) -> None:
    with pytest.raises(InputError, match="views: must be one for each of 2 layers, are 1"):
        Runner(llama, views(8)[:1], page_size=PAGE_SIZE, num_pages=8)


def test_logits_that_are_no_numbers_fail_the_step(llama: Llama) -> None:
    """What is read here was never written."""
    runner = Runner(llama, views(8), page_size=PAGE_SIZE, num_pages=8)
    row = Row(token_ids=[3], begin=2, page_table=[1], wants_logits=True)
    with pytest.raises(InputError, match="logits: must be numbers"):
        runner.run([StepRow(row=row, draw=Draw(sampling=SamplingParams(), position=3))])
