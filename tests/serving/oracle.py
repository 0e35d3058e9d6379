"""What a real model says, by transformers in fp32: logits, margins and draws of texts that headrace wrote.

A text is right when every one of its tokens is what the oracle draws at that place; then, by induction from the
prompt, it is the text that the oracle itself would have written. One forward pass tells that of a whole text. Where
the two best candidates of some place lie closer than MARGIN, two right engines may differ, so such a text is left out,
and counted.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from headrace.engine.requests import SamplingParams
from headrace.engine.sampling import sample, top2_margin

MARGIN = 1e-3
GREEDY = SamplingParams()
AT_ONCE = 2

torch.set_num_threads(1)  # two texts at once wait less for each other than two threads with one text


@dataclass(frozen=True)
class Judgement:
    is_right: bool
    least_margin: float

    @property
    def is_clear(self) -> bool:
        """Wide margins all along: two right engines write the same."""
        return self.least_margin > MARGIN


class Oracle:
    def __init__(self, directory: Path) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self._judged: dict[tuple[tuple[int, ...], tuple[int, ...], SamplingParams], Judgement] = {}

    def judge(self, prompt: Sequence[int], output: Sequence[int], sampling: SamplingParams = GREEDY) -> Judgement:
        """What was judged before is known: right texts are written again and again."""
        text = (tuple(prompt), tuple(output), sampling)
        if text not in self._judged:
            self._judged[text] = self._judge(*text)
        return self._judged[text]

    def _judge(self, prompt: Sequence[int], output: Sequence[int], sampling: SamplingParams) -> Judgement:
        logits = self.logits(prompt, output).numpy()
        drawn = [sample(np.ascontiguousarray(row), sampling, len(prompt) + place) for place, row in enumerate(logits)]
        margins = [top2_margin(row, sampling, len(prompt) + place) for place, row in enumerate(logits)]
        return Judgement(is_right=drawn == list(output), least_margin=min(margins))

    def logits(self, prompt: Sequence[int], output: Sequence[int]) -> torch.Tensor:
        """What each token of `output` would be drawn from, `[len(output), V]`."""
        with torch.inference_mode():
            return self._model(torch.tensor([[*prompt, *output[:-1]]]), logits_to_keep=len(output)).logits[0]

    def judge_all(
        self, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]], sampling: SamplingParams = GREEDY
    ) -> list[Judgement]:
        """Of each prompt its output."""
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return list(pool.map(self.judge, prompts, outputs, repeat(sampling)))
