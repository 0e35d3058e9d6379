"""Whose turn it is."""

from dataclasses import dataclass, field

from headrace.gateway.line import Line, Turn
from headrace.protocol.messages import Tier


@dataclass
class Woken:
    names: list[str] = field(default_factory=list)

    def turn(self, arrival: int, tier: Tier = "interactive") -> Turn:
        return Turn(arrival, tier, lambda: self.names.append(f"{tier}-{arrival}"))


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
