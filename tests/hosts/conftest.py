"""Fresh hosts for every test, and a plain word at the end about those that could not be made."""

from collections.abc import Iterator

import pytest
from two_hosts import TwoHosts


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    """Not joined yet."""
    with TwoHosts() as made:
        yield made


@pytest.fixture
def linked(hosts: TwoHosts) -> TwoHosts:
    """Joined by a veth pair."""
    hosts.join()
    return hosts


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = [report for report in terminalreporter.stats.get("skipped", []) if "tests/hosts/" in report.nodeid]
    reasons = {report.longrepr[2].removeprefix("Skipped: ") for report in skipped if isinstance(report.longrepr, tuple)}
    if reasons:
        terminalreporter.section("two hosts", sep="=", yellow=True)
        terminalreporter.write_line(f"{len(skipped)} of the tests across two hosts could NOT be run here:")
        for reason in sorted(reasons):
            terminalreporter.write_line(f"  {reason}")
