"""How an instance stands, as its Status message: counts for routing, gauges and counters for /metrics. Owns nothing."""

from collections.abc import Mapping, Sequence

from headrace.engine.cost import PrefillSpeed
from headrace.engine.measured_cost import CostStatistics
from headrace.fabric.interface import FabricStatistics
from headrace.kvcache.pages import PagePool
from headrace.messenger.prefiller import PrefillerMessenger
from headrace.protocol.control import Decoding, Prefilling, Status
from headrace.roles.groups import Groups
from headrace.roles.instance import Instance
from headrace.roles.remote_prefill import RemotePrefill


def decoder_status(instance: Instance, groups: Groups, remote: RemotePrefill | None, *, is_draining: bool) -> Status:
    """Of all its groups together."""
    counts = groups.statistics()
    costs = groups.costs.statistics()
    gauges = _page_gauges(instance.pools) | _prediction_gauges(costs)
    counters: dict[str, float] = {
        "steps_total": counts.num_steps,
        "prefill_tokens_total": counts.num_prefill_tokens,
        "decode_tokens_total": counts.num_decode_tokens,
        "cached_tokens_total": counts.num_cached_tokens,
        "preemptions_total": counts.num_preemptions,
        "requests_finished_total": counts.num_finished,
        "long_steps_planned_total": costs.num_long_planned,
        "long_steps_unforeseen_total": costs.num_long_unforeseen,
        "pages_evicted_total": sum(pages.statistics().num_evicted for pages in instance.pools),
    }
    if remote is not None:
        tickets, fabric = remote.statistics()
        gauges["prefillers_ready"] = tickets.num_prefillers_ready
        gauges["tickets_open"] = tickets.num_open
        gauges["tickets_revoking"] = tickets.num_revoking
        counters |= {
            "tickets_ready_total": tickets.num_ready,
            "revokes_total": tickets.num_revokes,
            "wrong_bytes_total": tickets.num_wrong_bytes,
            "strange_messages_total": tickets.num_strange_messages,
            **_by_reason("tickets_failed", tickets.num_failed),
            **_fabric_counters(fabric),
        }
    return Status(
        sender=instance.identity.uuid,
        num_free_pages=sum(pages.num_free_or_cached for pages in instance.pools),
        num_running=counts.num_decoding + counts.num_prefilling + counts.num_fetching,
        num_waiting=counts.num_waiting + counts.num_parked,
        num_queued_tokens=counts.num_waiting_tokens,
        num_interactive_tokens=counts.num_interactive_tokens,
        prefilling=_prefilling(groups.prefill_speed),
        decoding=_decoding(groups, num_interactive=counts.num_interactive),
        is_draining=is_draining,
        gauges=gauges,
        counters=counters,
    )


def prefiller_status(
    instance: Instance,
    messenger: PrefillerMessenger,
    fabric: FabricStatistics,
    *,
    num_steps: int,
    num_prefill_tokens: int,
    prefill_speed: PrefillSpeed | None,
    is_draining: bool,
) -> Status:
    tickets = messenger.statistics()
    return Status(
        sender=instance.identity.uuid,
        num_free_pages=sum(pages.num_free_or_cached for pages in instance.pools),
        num_running=tickets.num_tickets,
        num_waiting=0,
        num_queued_tokens=tickets.num_leased_tokens,
        num_interactive_tokens=tickets.num_interactive_tokens,
        prefilling=_prefilling(prefill_speed),
        decoding=None,
        is_draining=is_draining,
        gauges={
            **_page_gauges(instance.pools),
            "tickets_open": tickets.num_tickets,
            "pages_held_by_decoders": tickets.num_held_pages,
        },
        counters={
            "steps_total": num_steps,
            "prefill_tokens_total": num_prefill_tokens,
            "pages_evicted_total": sum(pages.statistics().num_evicted for pages in instance.pools),
            "tickets_accepted_total": tickets.num_accepted,
            "tickets_closed_total": tickets.num_closed,
            "strange_messages_total": tickets.num_strange_messages,
            **_by_reason("tickets_refused", tickets.num_refused),
            **{f"kv_bytes_sent_rank{rank}_total": sent for rank, sent in enumerate(tickets.num_bytes_sent)},
            **_fabric_counters(fabric),
        },
    )


def _prefilling(speed: PrefillSpeed | None) -> Prefilling | None:
    if speed is None:
        return None
    return Prefilling(step_s=speed.step_s, rate=speed.rate, chunk_tokens=speed.chunk_tokens)


def _decoding(groups: Groups, *, num_interactive: int) -> Decoding | None:
    cost, size = groups.costs.cost, groups.decode_size
    if cost is None:
        return None
    return Decoding(
        step_s=cost.step_s,
        row_s=cost.row_s,
        key_s=cost.key_s,
        num_rows=size.rows,
        num_keys=size.keys,
        num_interactive=num_interactive,
    )


def _page_gauges(pools: Sequence[PagePool]) -> dict[str, float]:
    counts = [pages.statistics() for pages in pools]
    return {
        "pages": sum(one.num_pages for one in counts),
        "pages_free": sum(one.num_free for one in counts),
        "pages_held": sum(one.num_held for one in counts),
        "pages_cached": sum(one.num_cached for one in counts),
        "pages_quarantined": sum(one.num_quarantined for one in counts),
    }


def _prediction_gauges(costs: CostStatistics) -> dict[str, float]:
    """Left out before there are some."""
    errors = {"step_prediction_error_p50": costs.error_p50, "step_prediction_error_p90": costs.error_p90}
    return {name: error for name, error in errors.items() if error is not None}


def _by_reason(name: str, counts: Mapping[str, int]) -> dict[str, float]:
    return {f"{name}_{reason}_total": count for reason, count in counts.items()}


def _fabric_counters(fabric: FabricStatistics) -> dict[str, float]:
    return {
        "fabric_writes_total": fabric.num_writes_completed,
        "fabric_writes_failed_total": fabric.num_writes_failed,
        "fabric_bytes_posted_total": fabric.num_bytes_posted,
        "fabric_arrivals_total": fabric.num_arrivals,
        "fabric_surplus_total": fabric.num_surplus,
    }
