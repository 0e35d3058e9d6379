"""What one attempt is to generate, and how prefillers and decoders are asked for it. Plain data."""

import msgspec

from headrace.gateway.generation import Generation
from headrace.gateway.route import Wanted
from headrace.protocol.control import Generate, PrefillFrom, Reserve
from headrace.protocol.messages import MOST_REMAINING_S, Uuid


class Errand(msgspec.Struct, frozen=True, kw_only=True):
    """`token_ids`: the prompt, and what came of it in earlier attempts. `max_tokens` more may come, until `deadline`
    of the gateway's clock."""

    request_id: str
    generation: Generation
    token_ids: tuple[int, ...]
    max_tokens: int
    deadline: float

    @property
    def wanted(self) -> Wanted:
        """What routing looks at."""
        return Wanted(num_tokens=len(self.token_ids), max_tokens=self.max_tokens, tier=self.generation.tier)

    def reserve(self, sender: Uuid, now: float) -> Reserve:
        return Reserve(
            sender=sender,
            request_id=self.request_id,
            num_tokens=len(self.token_ids),
            tier=self.generation.tier,
            remaining_s=self._remaining_s(now),
        )

    def generate(self, sender: Uuid, prefill: PrefillFrom | None, now: float) -> Generate:
        return Generate(
            sender=sender,
            request_id=self.request_id,
            token_ids=self.token_ids,
            num_prompt_tokens=len(self.generation.token_ids),
            max_tokens=self.max_tokens,
            sampling=self.generation.sampling,
            stop_token_ids=self.generation.stop_token_ids,
            prefill=prefill,
            tier=self.generation.tier,
            remaining_s=self._remaining_s(now),
        )

    def _remaining_s(self, now: float) -> float:
        return min(MOST_REMAINING_S, max(0.0, self.deadline - now))
