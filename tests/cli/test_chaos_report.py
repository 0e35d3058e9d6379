"""The table of a run: what was right, wrong or not done, and how it ends."""

from headrace.cli.chaos.cell import Cell
from headrace.cli.chaos.matrix import Run
from headrace.cli.chaos.report import line, rendered

RIGHT = Cell(
    fault="link-cut", state="decoding", num_requests=5, num_hit=1, kinds={"right": 5}, recovery_s=0.25, took_s=7.2
)
MISSED = Cell(fault="link-cut", state="starting", note="not hit: too short to be seen", num_requests=2, took_s=3.0)
WRONG = Cell(
    fault="gateway-killed",
    state="waiting",
    num_requests=4,
    kinds={"right": 1, "lost": 1, "failed": 2},
    wrongs=["lost: after 3 tokens"],
    leaked_pages=2,
)


def rows(run: Run) -> list[list[str]]:
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in rendered(run).splitlines() if row[:1] == "|"]


def test_a_run_without_a_wrong_is_right_and_says_what_it_missed() -> None:
    run = Run(deployment="tiny: decoder-0", num_left_out=1, cells=[RIGHT, MISSED])
    assert run.is_right
    assert rows(run)[2] == ["link-cut, decoding", "5", "1", "0", "0", "0", "0", "0.25", "0", "right"]
    assert rows(run)[3][-1] == "not hit: too short to be seen"
    told = rendered(run)
    assert "link-cut: TCP connections of the pair shut down" in told
    assert (
        "\n1 of 2 cells done, 7 requests, 0 wrong, lost or repeated, 0 pages leaked, slowest recovery 0.25 s; " in told
    )
    assert told.endswith("; nothing wrong\n")


def test_what_is_wrong_is_counted_told_and_decides() -> None:
    run = Run(deployment="tiny: decoder-0", num_left_out=0, cells=[WRONG], wrongs=["it did not become whole"])
    assert not run.is_right
    assert rows(run)[2] == ["gateway-killed, waiting", "4", "0", "1", "2", "0", "0", "-", "2", "wrong"]
    assert rendered(run).endswith(
        "wrong:\n  gateway-killed, waiting: lost: after 3 tokens\n  it did not become whole\n"
    )


def test_each_cell_is_told_as_it_ends() -> None:
    assert line(RIGHT) == "link-cut, decoding: 5 requests, right (7 s)\n"
    assert line(MISSED) == "link-cut, starting: 2 requests, not hit: too short to be seen (3 s)\n"
    assert line(WRONG) == "gateway-killed, waiting: 4 requests, lost: after 3 tokens (0 s)\n"
