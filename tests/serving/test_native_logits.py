"""The real model by native kernels, bf16, beside transformers in fp32: logits, and the text that follows from them."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import pytest
import torch
from oracle import AT_ONCE, Oracle

from headrace.model import _cpu
from headrace.model.batch import Batch, Row
from headrace.model.checkpoint import fingerprint
from headrace.model.interface import Model
from headrace.model.kernels import open_model
from headrace.model.options import ComputeOptions

pytestmark = [
    pytest.mark.serving,
    pytest.mark.skipif(not _cpu.instruction_sets(), reason="this CPU has no avx512_bf16"),
]

PAGE, NUM_PAGES = 16, 24
NUM_PROMPTS, NUM_TOKENS = 20, 16
MOST_DIFFERENCE, USUAL_DIFFERENCE = 0.8, 0.3
"""Of any of 49,152 logits, in all prompts and in half of them: some 1.3 times what was measured.
What remains is the rounding of inputs to bf16; plain torch in bf16 is farther off."""

CLEAR = 0.3
"""Ahead by so much, the oracle's token is ours."""


@pytest.fixture(scope="module")
def native(smollm2: Path) -> Iterator[Model]:
    key = fingerprint(smollm2, dtype="bf16")
    with open_model(smollm2, fingerprint=key, dtype="bf16", options=ComputeOptions(kernels="native")) as model:
        yield model


def greedy(model: Model, prompt: list[int], num_tokens: int) -> tuple[list[int], torch.Tensor]:
    """The tokens, and the logits that each was taken from, `[num_tokens, V]`."""
    layout = model.shape.kv_layout(PAGE, "bf16")
    size = (NUM_PAGES, layout.num_kv_heads, 2, PAGE, layout.head_dim)
    views = [torch.full(size, torch.nan, dtype=torch.bfloat16) for _ in range(layout.num_layers)]
    tokens, rows = list(prompt), []
    begin = 0
    while len(rows) < num_tokens:
        table = list(reversed(range(NUM_PAGES)))
        row = Row(token_ids=tokens[begin:], begin=begin, page_table=table, wants_logits=True)
        batch = Batch.of([row], page_size=PAGE, num_pages=NUM_PAGES, vocab_size=model.shape.vocab_size)
        rows.append(model.forward(batch, views)[0])
        begin = len(tokens)
        tokens.append(int(rows[-1].argmax()))
    return tokens[len(prompt) :], torch.stack(rows)


@torch.inference_mode()
def test_logits_and_text_are_those_of_transformers(native: Model, oracle: Oracle, licence_ids: list[int]) -> None:
    prompts = [licence_ids[100 * place :][: 3 + 16 * place] for place in range(NUM_PROMPTS)]
    written = [greedy(native, prompt, NUM_TOKENS) for prompt in prompts]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        logits = list(pool.map(oracle.logits, prompts, [tokens for tokens, _ in written]))
    differences = []
    for (tokens, ours), judged in zip(written, logits, strict=True):
        differences.append(float((ours - judged).abs().max()))
        best = judged.topk(2).values
        is_clear = best[:, 0] - best[:, 1] > CLEAR
        assert is_clear.any()
        assert (judged.argmax(-1) == torch.tensor(tokens))[is_clear].all()
    assert max(differences) < MOST_DIFFERENCE
    assert median(differences) < USUAL_DIFFERENCE
