"""What a gateway's log says of each request at --log-level debug, by the id that the client has of it. Pure."""

import re
from collections.abc import Mapping

from headrace.bench.records import Waterfall

PARTS = {
    "queue": "queue_s",
    "prefill": "prefill_s",
    "exposed transfer": "exposed_transfer_s",
    "hand-over": "hand_over_s",
    "first step": "first_step_s",
}


def read_waterfalls(log: str) -> dict[str, Waterfall]:
    """Of a gateway's log at debug. The prefiller's queue counts as queue. What is left of the gateway's time to first
    token is its own, and what its messages took."""
    return {request: _waterfall(ms) for request, ms in read_parts(log).items()}


def _waterfall(ms: Mapping[str, float]) -> Waterfall:
    parts = {field: ms[part] / 1e3 for part, field in PARTS.items() if part in ms}
    parts["queue_s"] = parts.get("queue_s", 0.0) + ms.get("prefiller queue", 0.0) / 1e3
    if "ttft" in ms:
        parts["gateway_s"] = max(0.0, ms["ttft"] / 1e3 - sum(parts.values()))
    return Waterfall(**parts)


def read_parts(log: str) -> dict[str, dict[str, float]]:
    """Milliseconds by part, without those that it did not come to."""
    lines = re.findall(r"\b(cmpl-\w+)-0: \w+; (queue .*?);", log)
    return {
        request: {part: float(ms) for part, ms in re.findall(r"(?:^|, )([a-z -]+?) ([\d.]+) ms", said)}
        for request, said in lines
    }
