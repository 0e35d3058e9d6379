"""An engine with a latency budget: what it learns from its steps, how long they then take, and who waits for whom.

The machine is scripted: each step takes what COST says of its rows, and the clock moves by that.
"""

from collections.abc import Sequence

import pytest
from scripted_model import VOCABULARY, World, make_request

from headrace.engine.cost import PrefillSpeed, StepCost, StepSize
from headrace.engine.measured_cost import MeasuredCost
from headrace.engine.schedule import MIN_CHUNK
from headrace.engine.step import Step, StepRow

COST = StepCost(step_s=0.010, row_s=0.002, key_s=0.00001, token_s=0.001, pair_s=0.0)
PROMPT = 1000


def size_of(rows: Sequence[StepRow]) -> StepSize:
    """Rows of one token are taken for decode rows: prompts here have more."""
    size = StepSize()
    for row in (step_row.row for step_row in rows):
        end = row.begin + len(row.token_ids)
        size = size.with_row(end) if len(row.token_ids) == 1 else size.with_chunk(row.begin, end)
    return size


def known_costs() -> MeasuredCost:
    """As after a calibration."""
    costs = MeasuredCost()
    for rows in (0, 1, 8):
        for tokens in (0, 16, 64, 256):
            for keys in (10, 1000):
                size = StepSize(rows=rows, keys=rows * keys).with_chunk(keys, keys + tokens)
                costs.learn(size, COST.predict(size))
    costs.fit()
    return costs


class Machine(World):
    def __init__(
        self, *, costs: MeasuredCost | None = None, tpot_s: float | None = None, max_stall_s: float | None = None
    ) -> None:
        super().__init__(
            num_pages=1000,
            page_size=16,
            chunk_tokens=256,
            max_running=32,
            max_model_len=4000,
            tpot_s=tpot_s,
            max_stall_s=max_stall_s,
            costs=known_costs() if costs is None else costs,
        )
        self.step_s = lambda rows: COST.predict(size_of(rows))

    def decoding(self, name: str, num_tokens: int = 100) -> None:
        """One that decodes now, and for long."""
        self.start(make_request(name, prompt(num_tokens, name), 2000))
        while self.engine.statistics().num_prefilling:
            assert self.step() is not None

    def steps_until_all_decode(self) -> list[tuple[Step, float]]:
        """Each with what it took."""
        steps = []
        while self.engine.statistics().num_prefilling:
            before = self.now
            step = self.step()
            assert step is not None
            steps.append((step, self.now - before))
        return steps


def prompt(num_tokens: int, name: str) -> list[int]:
    """Those of two names share no prefix."""
    first = sum(name.encode())
    return [(first + 7 * number) % VOCABULARY for number in range(num_tokens)]


def chunk_tokens(steps: Sequence[tuple[Step, float]]) -> list[int]:
    return [size_of(step.rows).chunk_tokens for step, _ in steps]


# ---- stalls ----------------------------------------------------------------------------------------------------


def test_without_a_budget_a_long_prompt_stalls_the_others_for_whole_chunks() -> None:
    machine = Machine()
    machine.decoding("a")
    machine.start(make_request("long", prompt(PROMPT, "long")))
    steps = machine.steps_until_all_decode()
    assert chunk_tokens(steps) == [256, 256, 256, 231]
    assert max(took for _, took in steps) > 0.25


def test_a_stall_budget_cuts_the_chunks_beside_those_who_decode() -> None:
    machine = Machine(max_stall_s=0.1)
    machine.decoding("a")
    machine.start(make_request("long", prompt(PROMPT, "long")))
    steps = machine.steps_until_all_decode()
    assert set(chunk_tokens(steps)[:-1]) == {80, 64}  # the deeper, the fewer
    assert all(0.08 < took <= 0.1 for _, took in steps[:-1])
    assert all(size_of(step.rows).rows == 1 for step, _ in steps)
    assert machine.engine.costs.statistics().num_long_planned == 0


def test_where_nobody_decodes_a_prompt_is_computed_in_whole_chunks() -> None:
    machine = Machine(max_stall_s=0.1, tpot_s=0.1)
    machine.start(make_request("long", prompt(PROMPT, "long")))
    assert chunk_tokens(machine.steps_until_all_decode()) == [256, 256, 256, 231]


def test_a_budget_that_cannot_be_kept_is_missed_by_the_least_chunk_and_counted() -> None:
    machine = Machine(max_stall_s=0.005)
    machine.decoding("a")
    machine.start(make_request("long", prompt(100, "long")))
    before = machine.engine.costs.statistics()
    steps = machine.steps_until_all_decode()
    assert chunk_tokens(steps) == [MIN_CHUNK] * 6 + [3]
    told = machine.engine.costs.statistics()
    assert told.num_long_planned - before.num_long_planned == len(steps)
    assert told.num_long_unforeseen == 0


def test_steps_that_take_longer_than_foreseen_are_counted_and_chunks_become_smaller() -> None:
    machine = Machine(max_stall_s=0.1)
    machine.decoding("a")
    machine.step_s = lambda rows: 2 * COST.predict(size_of(rows))
    machine.start(make_request("long", prompt(1900, "long")))
    steps = machine.steps_until_all_decode()
    assert machine.engine.costs.statistics().num_long_unforeseen > 5
    assert steps[0][1] > 0.15
    assert 0.05 < steps[-2][1] <= 0.1


def test_an_engine_that_knows_nothing_yet_learns_from_its_first_steps() -> None:
    machine = Machine(costs=MeasuredCost(), max_stall_s=0.1)
    machine.decoding("a", 500)
    for length in (900, 800, 700):
        machine.start(make_request(f"{length}", prompt(length, f"{length}")))
        steps = machine.steps_until_all_decode()
    assert max(took for _, took in steps) <= 0.1


# ---- who enters ------------------------------------------------------------------------------------------------


def admitted(machine: Machine, num_requests: int, num_tokens: int = 100) -> int:
    """How many enter, one after the other; each decodes before the next one comes."""
    for number in range(num_requests):
        request = make_request(f"{number}", prompt(num_tokens, f"{number}"), 2000)
        if machine.engine.try_admit(request) is None:
            return number
        machine.engine.start(request.request_id)
        machine.steps_until_all_decode()
    return num_requests


def test_the_batch_grows_until_a_decode_step_fills_the_tpot_budget() -> None:
    assert admitted(Machine(), 20) == 20
    machine = Machine(tpot_s=0.025)
    assert admitted(machine, 20) == 4
    before = machine.now
    machine.step()
    assert machine.now - before <= 0.025


def test_one_runs_whatever_the_tpot_budget_and_the_next_one_runs_after_it() -> None:
    machine = Machine(tpot_s=0.001)
    assert admitted(machine, 3) == 1
    machine.engine.abort("0")
    assert machine.engine.try_admit(make_request("next", prompt(50, "next"))) is not None


def test_those_that_will_decode_count_as_much_as_those_that_do() -> None:
    """Else any number could enter while their KV is on its way."""
    machine = Machine(tpot_s=0.025)
    for number in range(4):
        machine.fetch(make_request(f"{number}", prompt(110, f"{number}"), 2000))
    assert machine.engine.try_admit(make_request("next", prompt(110, "next"))) is None


def test_nobody_who_decodes_is_thrown_out_when_steps_become_too_long() -> None:
    machine = Machine(tpot_s=0.025)
    admitted(machine, 20)
    machine.step_s = lambda rows: 3 * COST.predict(size_of(rows))
    for _ in range(200):
        step = machine.step()
        assert step is not None and step.num_draws == 4
    assert machine.engine.try_admit(make_request("next", prompt(50, "next"))) is None
    statistics = machine.engine.statistics()
    assert (statistics.num_decoding, statistics.num_preemptions) == (4, 0)
    assert machine.engine.costs.statistics().num_long_planned > 100


def test_one_that_waits_for_a_place_in_the_batch_gets_it_when_another_ends() -> None:
    machine = Machine(tpot_s=0.0165)
    machine.decoding("a")
    request = make_request("b", prompt(60, "b"), 5)
    pages = machine.fetch(request)
    machine.engine.fetch_failed("b")
    machine.pool.release(pages)
    machine.decoding("c", 20)
    machine.engine.wait_for_room("b")
    for _ in range(3):
        step = machine.step()
        assert step is not None and step.num_draws == 2
    assert machine.engine.statistics().num_waiting == 1
    machine.engine.abort("a")
    machine.engine.abort("c")
    machine.run()
    machine.expect_text(request)


@pytest.mark.parametrize("bounds", [{"tpot_s": 0.03}, {"max_stall_s": 0.03}, {"tpot_s": 0.03, "max_stall_s": 0.03}])
def test_under_any_budget_every_request_ends_with_its_text(bounds: dict[str, float]) -> None:
    machine = Machine(**bounds)
    requests = [make_request(f"{number}", prompt(30 + 90 * number, f"{number}"), 20) for number in range(10)]
    outside = list(requests)
    for _ in range(2000):
        while outside and machine.engine.try_admit(outside[0]) is not None:
            machine.engine.start(outside.pop(0).request_id)
        if machine.step() is None:
            break
    for request in requests:
        machine.expect_text(request)
    machine.expect_empty()


# ---- what it would prefill -------------------------------------------------------------------------------------


def speed(machine: Machine) -> PrefillSpeed:
    told = machine.engine.prefill_speed
    assert told is not None
    return told


def test_the_speed_of_one_more_prompt_is_what_the_budget_leaves_beside_the_rows() -> None:
    machine = Machine(max_stall_s=0.1)
    assert speed(machine).rate == pytest.approx(256 / (0.010 + 0.256), rel=0.02)
    assert speed(machine).step_s == pytest.approx(0.010, rel=0.02)
    for nth in range(8):
        machine.decoding(f"r{nth}")
    assert 0 < speed(machine).rate <= 64 / 0.09  # 0.1 s less the step and eight rows
    assert speed(machine).step_s > 0.026  # it takes part in theirs
    tight = Machine(max_stall_s=0.02)
    tight.decoding("a")
    assert speed(tight).rate == 0


def test_the_speed_leaves_the_margin_that_the_schedule_leaves() -> None:
    machine = Machine(max_stall_s=0.1)
    machine.decoding("a")
    costs, mixed = machine.engine.costs, StepSize().with_row(100).with_chunk(0, 64)
    for _ in range(20):
        costs.observe(mixed, 1.5 * COST.predict(mixed))
    assert costs.margin > 1.1 and costs.cost is not None
    without = costs.cost.prefill_speed(StepSize().with_row(100), chunk_tokens=256, bound_s=0.1)
    assert 0 < speed(machine).rate < without.rate


def test_the_load_of_a_decoder_is_everybody_who_holds_pages_whether_he_decodes_yet_or_not() -> None:
    machine = Machine(max_stall_s=0.1)
    assert machine.engine.decode_size == StepSize()
    machine.decoding("a")
    machine.start(make_request("b", prompt(40, "b"), tier="flex"))
    assert machine.engine.decode_size.rows == 2 and machine.engine.decode_size.keys > 40
    assert machine.engine.statistics().num_interactive == 1


def test_before_a_chunk_was_measured_no_speed_is_known() -> None:
    costs = MeasuredCost()
    machine = Machine(costs=costs)
    assert machine.engine.prefill_speed is None
    for _ in range(100):
        costs.learn(StepSize().with_row(10), 0.012)
    assert machine.engine.prefill_speed is None
    for nth in range(100):
        num_tokens = 64 + nth
        costs.learn(StepSize().with_chunk(0, num_tokens), 0.012 + 0.001 * num_tokens)
    assert speed(machine).rate == pytest.approx(256 / (0.012 + 0.256), rel=0.1)
