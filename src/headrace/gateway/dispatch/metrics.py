"""What the gateway measures, for Prometheus: requests as it sees them, and every instance's own figures passed through.

Owns its registry; runs on the gateway's loop. Times are the gateway's: from admission to a message's arrival here, so
that a client that reads slowly is not taken for a slow decoder.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, Protocol, TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headrace.gateway.budgets import TIERS
from headrace.gateway.dispatch.exchange import DispatchStatistics
from headrace.gateway.dispatch.instances import Instance
from headrace.gateway.generation import BudgetExceeded, Latency, Overloaded
from headrace.gateway.route import Price
from headrace.protocol.control import Role
from headrace.protocol.messages import Tier

Outcome = Literal["stop", "length", "refused", "overloaded", "unavailable", "failed", "deadline", "closed"]
"""closed: by whoever asked, because the client left or a stop string came."""

ROLES: tuple[Role, ...] = ("prefiller", "decoder", "colocated")
REQUEST_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
TOKEN_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class Exposed(Protocol):
    """Whose state is read when somebody asks for the metrics."""

    def statistics(self) -> DispatchStatistics: ...
    def alive(self) -> Sequence[Instance]: ...


class GatewayMetrics:
    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "headrace_requests", "Requests that are over", ["outcome", "tier"], registry=self._registry
        )
        self._tokens = Counter(
            "headrace_tokens",
            "Prompt tokens (of requests that got a token), those of them told to be cached, completion tokens",
            ["kind"],
            registry=self._registry,
        )
        # Children are kept: to look one up takes longer than to count.
        self._completion_tokens = self._tokens.labels("completion")
        self._prompt_tokens, self._cached_tokens = self._tokens.labels("prompt"), self._tokens.labels("cached")
        self._ttft = self._histogram("ttft", "Admission to first token", REQUEST_BUCKETS_S, ["tier"])
        self._itl = self._histogram("itl", "Between two arrivals of tokens", TOKEN_BUCKETS_S, ["tier"])
        self._itl_of = {tier: self._itl.labels(tier) for tier in TIERS}
        self._tpot = self._histogram(
            "tpot", "Mean time of a request's tokens after its first", TOKEN_BUCKETS_S, ["tier"]
        )
        self._ttft_of = {tier: self._ttft.labels(tier) for tier in TIERS}
        self._tpot_of = {tier: self._tpot.labels(tier) for tier in TIERS}
        self._queue = self._histogram("queue", "Admission to acceptance by a decoder", REQUEST_BUCKETS_S, ["tier"])
        self._queue_of = {tier: self._queue.labels(tier) for tier in TIERS}
        self._prefill = self._histogram("prefill", "First chunk's begin to last chunk's end", REQUEST_BUCKETS_S)
        self._exposed = self._histogram("exposed_transfer", "What KV transfer added to TTFT", TOKEN_BUCKETS_S)
        self._predicted = Counter(
            "headrace_predicted_ttft_seconds",
            "From routing to first token, as routing predicted it, by what it is spent on",
            ["term"],
            registry=self._registry,
        )
        self._predicted_of = {term: self._predicted.labels(term) for term in Price().terms}
        self._prediction_error = self._error(
            "ttft_prediction_error",
            "How far the first token was from when routing had predicted it",
            REQUEST_BUCKETS_S,
        )

        self._expectation_error = self._error(
            "admission_ttft_prediction_error",
            "The same of requests with a budget, when they were let in",
            REQUEST_BUCKETS_S,
        )
        self._tpot_error = self._error(
            "tpot_prediction_error",
            "How far the mean time of a request's tokens was from what its routing had predicted",
            TOKEN_BUCKETS_S,
        )
        self._budgets = Counter(
            "headrace_budgets",
            "Requests with a budget whose first token came (ttft) or that had two (tpot)",
            ["latency", "tier", "outcome"],
            registry=self._registry,
        )
        self._refusals = Counter(
            "headrace_refusals", "Requests that were answered 429", ["reason", "tier"], registry=self._registry
        )

    def _histogram(self, name: str, text: str, buckets: Sequence[float], labels: Iterable[str] = ()) -> Histogram:
        return Histogram(f"headrace_{name}_seconds", text, labels, buckets=buckets, registry=self._registry)

    def _error(self, name: str, text: str, buckets: Sequence[float]) -> "PredictionError":
        return PredictionError(self._histogram(name, text, buckets, ["came"]))

    def expose(self, dispatcher: Exposed) -> None:
        """Its state is part of what `render` shows. Once."""
        self._registry.register(_State(dispatcher))

    def render(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self._registry)

    # ---- what happens ------------------------------------------------------------------------------------------

    def placed(self, tier: Tier, queue_s: float) -> None:
        self._queue_of[tier].observe(queue_s)

    def first_tokens(self, tier: Tier, ttft_s: float, num_tokens: int, *, prompt_tokens: int) -> None:
        self._ttft_of[tier].observe(ttft_s)
        self._prompt_tokens.inc(prompt_tokens)
        self._completion_tokens.inc(num_tokens)

    def predicted(self, price: Price, ttft_s: float) -> None:
        """The first token came so long after its routing."""
        for term, seconds in price.terms.items():
            self._predicted_of[term].inc(seconds)
        self._prediction_error.observe(price.ttft_s, ttft_s)

    def expected(self, predicted_s: float, ttft_s: float) -> None:
        """The first token came so long after its request was let in."""
        self._expectation_error.observe(predicted_s, ttft_s)

    def predicted_tpot(self, predicted_s: float, tpot_s: float) -> None:
        self._tpot_error.observe(predicted_s, tpot_s)

    def compared(self, latency: Latency, tier: Tier, *, is_kept: bool) -> None:
        """With its budget. A request that failed before its first token has missed that."""
        self._budgets.labels(latency, tier, "held" if is_kept else "missed").inc()

    def turned_away(self, tier: Tier, error: Overloaded) -> None:
        """By too long a queue, or a budget that could not be kept: now, or on an idle fleet either."""
        reason: str = error.latency if isinstance(error, BudgetExceeded) else "queue"
        out_of_reach = "" if error.retry_after_s is not None else "_out_of_reach"
        self._refusals.labels(reason + out_of_reach, tier).inc()

    def next_tokens(self, tier: Tier, itl_s: float, num_tokens: int) -> None:
        self._itl_of[tier].observe(itl_s)
        self._completion_tokens.inc(num_tokens)

    def over(self, tier: Tier, outcome: Outcome, *, tpot_s: float | None) -> None:
        """`tpot_s` is known of every request that had two tokens, however it ended: a stop string's is no worse."""
        self._requests.labels(outcome, tier).inc()
        if tpot_s is not None:
            self._tpot_of[tier].observe(tpot_s)

    def finished(self, *, cached_tokens: int, prefill_s: float | None, exposed_transfer_s: float | None) -> None:
        """What the decoder tells with its last word."""
        self._cached_tokens.inc(cached_tokens)
        if prefill_s is not None:
            self._prefill.observe(prefill_s)
        if exposed_transfer_s is not None:
            self._exposed.observe(exposed_transfer_s)


class _State(Collector):
    """Read, not counted: nothing here is kept between two calls."""

    def __init__(self, dispatcher: Exposed) -> None:
        self._dispatcher = dispatcher

    def collect(self) -> Iterator[Metric]:
        statistics, instances = self._dispatcher.statistics(), self._dispatcher.alive()
        yield GaugeMetricFamily("headrace_running", "Requests at decoders", value=statistics.num_running)
        yield _by_label(GaugeMetricFamily, "headrace_queued", "tier", statistics.num_queued)
        alive = {role: sum(instance.announce.role == role for instance in instances) for role in ROLES}
        yield _by_label(GaugeMetricFamily, "headrace_instances_alive", "role", alive)
        yield _by_label(CounterMetricFamily, "headrace_dispatch_events", "event", statistics.num_events)
        yield _by_label(CounterMetricFamily, "headrace_dropped_messages", "fault", statistics.num_dropped)
        yield from _passed_through(instances)


class PredictionError:
    """How far off, and to which side."""

    def __init__(self, histogram: Histogram) -> None:
        self._later, self._sooner = histogram.labels("later"), histogram.labels("sooner")

    def observe(self, predicted_s: float, seconds: float) -> None:
        came = self._later if seconds >= predicted_s else self._sooner
        came.observe(abs(seconds - predicted_s))


Label = TypeVar("Label", bound=str)
Family = type[GaugeMetricFamily] | type[CounterMetricFamily]


def _by_label(family: Family, name: str, label: str, values: Mapping[Label, float]) -> Metric:
    metric = family(name, f"By {label}", labels=[label])
    for key, value in values.items():
        metric.add_metric([key], value)
    return metric


def _passed_through(instances: Sequence[Instance]) -> Iterator[Metric]:
    """Each name is one family, whoever uses it: of the kind in which it was met first."""
    families: dict[str, tuple[Family, Metric]] = {}
    for label, instance in _labelled(instances).items():
        for name, (family, value) in _figures(instance).items():
            if name not in families:
                families[name] = (family, family(name, "Of an instance", labels=["instance", "role"]))
            kind, metric = families[name]
            if kind is family:
                metric.add_metric([label, instance.announce.role], value)  # type: ignore[attr-defined]
    yield from (metric for _, metric in families.values())


def _labelled(instances: Sequence[Instance]) -> dict[str, Instance]:
    """By names that differ."""
    labelled: dict[str, Instance] = {}
    for instance in instances:
        name = instance.announce.name
        labelled[f"{name}-{instance.uuid[:8]}" if not name or name in labelled else name] = instance
    return labelled


def _figures(instance: Instance) -> dict[str, tuple[Family, float]]:
    status = instance.status
    if status is None:
        return {}
    counts: dict[str, float] = {
        "free_pages": status.num_free_pages,
        "running": status.num_running,
        "waiting": status.num_waiting,
        "queued_tokens": status.num_queued_tokens,
        "draining": status.is_draining,
    }
    if status.prefilling is not None:
        counts["prefill_tokens_per_second"] = status.prefilling.rate
        counts["prefill_step_seconds"] = status.prefilling.step_s
    gauges = {_metric_name(name): (GaugeMetricFamily, float(value)) for name, value in (counts | status.gauges).items()}
    counters = {_metric_name(name): (CounterMetricFamily, value) for name, value in status.counters.items()}
    return {**gauges, **counters}


def _metric_name(name: str) -> str:
    """Without what Prometheus forbids, and without the suffix that it adds to counters."""
    return "headrace_instance_" + re.sub(r"[^a-zA-Z0-9_]", "_", name).removesuffix("_total")
