"""Whose turn it is."""

from contextlib import ExitStack
from dataclasses import dataclass, field
from math import inf

from hypothesis import given
from hypothesis import strategies as st

from headrace.gateway.forecast import Ahead
from headrace.gateway.line import Line, Turn
from headrace.protocol.messages import Tier


@dataclass
class Woken:
    names: list[str] = field(default_factory=list)

    def turn(self, arrival: int, tier: Tier = "interactive", *, due: float = inf, num_tokens: int = 0) -> Turn:
        return Turn(due, arrival, tier, lambda: self.names.append(f"{tier}-{arrival}"), num_tokens)


def test_only_the_first_of_a_tier_may_try_and_the_next_is_woken_when_it_leaves() -> None:
    line, woken = Line(), Woken()
    first, second = woken.turn(1), woken.turn(2)
    with line.standing(second):
        with line.standing(first):
            assert line.may_try(first) and not line.may_try(second)
            woken.names.clear()
        assert woken.names == ["interactive-2"]
        assert line.may_try(second)


def test_one_that_comes_back_stands_in_front_of_those_who_came_later() -> None:
    line, woken = Line(), Woken()
    early, late = woken.turn(1), woken.turn(2)
    with line.standing(late), line.standing(early):
        assert line.may_try(early) and not line.may_try(late)


def test_tiers_try_side_by_side_until_the_first_lacks_room() -> None:
    line, woken = Line(), Woken()
    interactive, flex = woken.turn(1), woken.turn(2, "flex")
    with line.standing(flex):
        with line.standing(interactive):
            assert line.may_try(interactive) and line.may_try(flex)
            interactive.lacks_room = True
            assert line.may_try(interactive) and not line.may_try(flex)
            woken.names.clear()
        assert woken.names == ["flex-2"] and line.may_try(flex)
    assert len(line) == 0


def test_what_lacked_room_once_does_not_lack_it_for_ever() -> None:
    line, woken = Line(), Woken()
    turn = woken.turn(1)
    with line.standing(turn):
        turn.lacks_room = True
    with line.standing(turn):
        assert not turn.lacks_room


def test_it_counts_by_tier_and_wakes_heads_only() -> None:
    line, woken = Line(), Woken()
    with line.standing(woken.turn(1)), line.standing(woken.turn(2)), line.standing(woken.turn(3, "flex")):
        assert (len(line), line.num_waiting("interactive"), line.num_waiting("flex")) == (3, 2, 1)
        line.wake_heads()
        assert woken.names == ["interactive-1", "flex-3"]
        assert repr(line) == "Line(interactive=2, flex=1)"


def test_who_is_due_first_goes_first_then_by_arrival_and_one_that_is_resumed_before_them() -> None:
    line, woken = Line(), Woken()
    turns = [woken.turn(1), woken.turn(2, due=9.0), woken.turn(3, due=5.0), woken.turn(4, due=-inf), woken.turn(5)]
    order = []
    with ExitStack() as standing:
        left = {id(turn): standing.enter_context(ExitStack()) for turn in turns}
        for turn in turns:
            left[id(turn)].enter_context(line.standing(turn))
        while line:
            (head,) = [turn for turn in turns if id(turn) in left and line.may_try(turn)]
            order.append(head.arrival)
            left.pop(id(head)).close()
    assert order == [4, 3, 2, 1, 5]


def test_who_is_ahead_is_counted_with_the_prompts_and_background_work_is_ahead_of_nobody_else() -> None:
    line, woken = Line(), Woken()
    first = woken.turn(1, due=5.0, num_tokens=100)
    urgent = woken.turn(3, due=4.0, num_tokens=7)
    with line.standing(first), line.standing(woken.turn(2, "flex", num_tokens=1000)):
        assert line.ahead_of(urgent) == Ahead()
        assert line.ahead_of(woken.turn(4, due=6.0)) == Ahead(num_requests=1, num_tokens=100)
        assert line.ahead_of(woken.turn(5, "flex", due=0.0)) == Ahead(num_requests=1, num_tokens=100)
        assert line.ahead_of(woken.turn(6, "flex")) == Ahead(num_requests=2, num_tokens=1100)


MOMENTS = st.sampled_from([-inf, 0.0, 1.0, 2.5, inf])
TURNS = st.lists(st.tuples(MOMENTS, st.sampled_from(["interactive", "flex"]), st.integers(0, 99)), max_size=12)


@given(TURNS)
def test_the_order_by_deadline_is_total(drawn: list[tuple[float, Tier, int]]) -> None:
    turns = [Woken().turn(nth, tier, due=due, num_tokens=num) for nth, (due, tier, num) in enumerate(drawn)]
    for one in turns:
        for other in turns:
            assert (one < other) + (other < one) == (one is not other)
    assert [turn.due for turn in sorted(turns)] == sorted(turn.due for turn in turns)


@given(TURNS, MOMENTS, st.integers(0, 99))
def test_background_work_never_puts_anybody_interactive_further_back(
    drawn: list[tuple[float, Tier, int]], due: float, num_tokens: int
) -> None:
    line = Line()
    turns = [Woken().turn(nth, tier, due=when, num_tokens=num) for nth, (when, tier, num) in enumerate(drawn)]
    with ExitStack() as standing:
        for turn in turns:
            standing.enter_context(line.standing(turn))
        urgent = [turn for turn in turns if turn.tier == "interactive"]
        before = [line.ahead_of(turn) for turn in urgent]
        may = [line.may_try(turn) for turn in urgent]
        with line.standing(Woken().turn(99, "flex", due=due, num_tokens=num_tokens)):
            assert [line.ahead_of(turn) for turn in urgent] == before
            assert [line.may_try(turn) for turn in urgent] == may
