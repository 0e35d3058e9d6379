"""The relay's delay line, with no device: these tests need no rights, and run with all others."""

import random

from relay import DelayLine


def line(*, delay_s: float = 5.0, loss: float = 0.0, seed: int = 1) -> DelayLine:
    return DelayLine(delay_s=delay_s, loss=loss, rng=random.Random(seed))


def test_packets_come_out_in_order_when_their_delay_is_over() -> None:
    made = line()
    made.put(b"a", 0.0)
    made.put(b"b", 1.0)
    assert made.next_due == 5.0
    assert made.take_due(4.9) == []
    assert made.take_due(5.0) == [b"a"]
    assert made.take_due(60.0) == [b"b"]
    assert made.next_due is None
    assert (made.num_passed, made.num_lost) == (2, 0)


def test_a_seeded_fraction_is_lost() -> None:
    def survivors(seed: int) -> list[bytes]:
        made = line(loss=0.1, seed=seed)
        for number in range(10_000):
            made.put(number.to_bytes(2, "little"), 0.0)
        return made.take_due(5.0)

    assert survivors(1) == survivors(1) != survivors(2)
    assert 8_800 < len(survivors(1)) < 9_200


def test_a_stopped_line_loses_what_is_on_the_way_and_what_comes() -> None:
    made = line()
    made.put(b"on the way", 0.0)
    made.stop()
    made.put(b"comes", 1.0)
    made.stopped = False
    made.put(b"later", 2.0)
    assert made.take_due(60.0) == [b"later"]
    assert made.num_lost == 2
