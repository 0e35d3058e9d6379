"""What the real model says, by transformers in fp32: logits, margins and draws of texts that headrace wrote.

A text is right when every one of its tokens is what the oracle draws at that place; then, by induction from the
prompt, it is the text that the oracle itself would have written. One forward pass tells that of a whole text. Where
the two best candidates of some place lie closer than MARGIN, two right engines may differ, so such a text is left out,
and counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from headrace.engine.requests import SamplingParams
from headrace.engine.sampling import sample, top2_margin

MARGIN = 1e-3
GREEDY = SamplingParams()


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

    def judge(self, prompt: Sequence[int], output: Sequence[int], sampling: SamplingParams = GREEDY) -> Judgement:
        with torch.inference_mode():
            ids = torch.tensor([[*prompt, *output[:-1]]])
            logits = self._model(ids, logits_to_keep=len(output)).logits[0].numpy()
        drawn = [sample(np.ascontiguousarray(row), sampling, len(prompt) + place) for place, row in enumerate(logits)]
        margins = [top2_margin(row, sampling, len(prompt) + place) for place, row in enumerate(logits)]
        return Judgement(is_right=drawn == list(output), least_margin=min(margins))
