"""The engine's link as what carries pages and words, so that it can take turns with the bare ones."""

from headrace.fabric.limits import wire
from headrace.fabric.limits.placement import Placement
from headrace.fabric.limits.records import LinkRun, RoundTrips
from headrace.fabric.measure import questions as q
from headrace.fabric.measure.records import Rest
from headrace.fabric.measure.sides import Sides, expected


class EngineLink:
    """Two engines that have joined each other. Pages go from the first to the second side.

    On `one_clock` a run lasts until the last page has arrived, which is when a bare copy ends; otherwise until the
    sender knows that, as on the bare links.
    """

    name = "engine"

    def __init__(self, sides: Sides, transport: str, *, one_clock: bool) -> None:
        self._sides = sides
        self._one_clock = one_clock
        question = q.Open(transport=transport)
        ours, theirs = (expected(q.Opened, answer) for answer in sides.ask(question, question))
        admitted = sides.ask(q.Admit(address=theirs.address), q.Admit(address=ours.address))
        to_them, to_us = (expected(q.Admitted, answer) for answer in admitted)
        sides.ask(q.Join(descriptor=to_us.descriptor), q.Join(descriptor=to_them.descriptor))

    def run(self, placement: Placement) -> LinkRun:
        src, dst = q.wired(placement.src_offsets), q.wired(placement.dst_offsets)
        write = q.WritePages(src_offsets=src, dst_offsets=dst, page_bytes=placement.page_bytes)
        first, second = self._sides.ask(write, q.ReceivePages(num_pages=placement.num_pages))
        wrote, received = expected(q.Wrote, first), expected(q.Received, second)
        ended_ns = received.reached_ns if self._one_clock else wrote.answered_ns
        return LinkRun(
            num_bytes=placement.num_bytes,
            seconds=(ended_ns - wrote.began_ns) / 1e9,
            sender_cpu_s=wrote.cpu_ns / 1e9,
            receiver_cpu_s=received.cpu_ns / 1e9,
        )

    def carries_whole(self, placement: Placement) -> bool:
        """Whether one run brings every page as it is, and changes nothing beside them."""
        src, dst, page_bytes = q.wired(placement.src_offsets), q.wired(placement.dst_offsets), placement.page_bytes
        self._sides.ask_second(q.Poison(), wire.Done)
        self.run(placement)
        digests = self._sides.ask(
            q.DigestPages(offsets=src, page_bytes=page_bytes), q.DigestPages(offsets=dst, page_bytes=page_bytes)
        )
        sent, came = (expected(q.Digested, answer).digest for answer in digests)
        changed = self._sides.ask_second(q.CountChanged(offsets=dst, page_bytes=page_bytes), q.Changed)
        return sent == came and changed.num_bytes == 0

    def rounds(self, by: q.RoundsBy, num_rounds: int, pause_s: float) -> RoundTrips:
        ping = q.Ping(by=by, num_rounds=num_rounds, pause_ns=round(pause_s * 1e9))
        times, _ = self._sides.ask(ping, q.Pong(by=by, num_rounds=num_rounds))
        return _round_trips(times, num_rounds)

    def submits(self, placement: Placement, num_rounds: int) -> tuple[RoundTrips, RoundTrips]:
        """Of the submitting call, and from the last arrival to the coroutine that waits."""
        src, dst = q.wired(placement.src_offsets), q.wired(placement.dst_offsets)
        submit = q.SubmitPages(src_offsets=src, dst_offsets=dst, page_bytes=placement.page_bytes, num_rounds=num_rounds)
        collect = q.CollectPages(num_pages=placement.num_pages, num_rounds=num_rounds)
        submitted, collected = self._sides.ask(submit, collect)
        return _round_trips(submitted, num_rounds), _round_trips(collected, num_rounds)

    def rest(self, seconds: float) -> Rest:
        question = q.Idle(ns=round(seconds * 1e9))
        idled = [expected(q.Idled, answer) for answer in self._sides.ask(question, question)]
        return Rest(
            seconds=seconds,
            process=max(each.cpu_ns / each.ns for each in idled),
            owner=max(each.owner_cpu_ns / each.ns for each in idled),
        )


def _round_trips(answer: q.Answer, num_rounds: int) -> RoundTrips:
    times = expected(wire.Times, answer)
    return RoundTrips(num_rounds=num_rounds, p50_ns=times.p50_ns, p99_ns=times.p99_ns)
