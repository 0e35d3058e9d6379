"""Log lines: their form, what is let through, colour only where somebody looks."""

import io
import logging
import re
import warnings
from collections.abc import Iterator

import pytest

from headrace.cli.logs import configure_logging


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    root, ours = logging.getLogger(), logging.getLogger("headrace")
    handlers, level, our_level = root.handlers[:], root.level, ours.level
    root.handlers.clear()  # pytest's own are not to be closed
    yield
    logging.captureWarnings(False)
    root.handlers[:] = handlers
    root.setLevel(level)
    ours.setLevel(our_level)


def test_a_line_has_time_process_level_and_text() -> None:
    stream = io.StringIO()
    configure_logging("info", "decoder-0", stream)
    logging.getLogger("headrace.roles.decoder").info("model %s", "tiny")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} decoder-0 info  model tiny\n", stream.getvalue())


@pytest.mark.parametrize(
    ("level", "heard"),
    [("debug", ["ours debug", "ours info"]), ("info", ["ours info"]), ("warning", []), ("error", [])],
)
def test_our_level_is_chosen_and_other_libraries_only_warn(level: str, heard: list[str]) -> None:
    stream = io.StringIO()
    configure_logging(level, "gateway", stream)
    logging.getLogger("headrace.gateway").debug("ours debug")
    logging.getLogger("headrace.gateway").info("ours info")
    logging.getLogger("uvicorn").info("theirs info")
    logging.getLogger("uvicorn").warning("theirs warning")
    assert [line.split(maxsplit=4)[-1] for line in stream.getvalue().splitlines()] == [*heard, "theirs warning"]


def test_a_traceback_follows_its_line() -> None:
    stream = io.StringIO()
    configure_logging("info", "gateway", stream)
    try:
        raise RuntimeError("inside")
    except RuntimeError:
        logging.getLogger("headrace").exception("a step failed")
    lines = stream.getvalue().splitlines()
    assert lines[0].endswith("gateway error a step failed") and lines[-1] == "RuntimeError: inside"


def test_a_terminal_gets_colour() -> None:
    stream = Terminal()
    configure_logging("debug", "gateway", stream)
    logging.getLogger("headrace").warning("look")
    logging.getLogger("headrace").info("plain")
    coloured, plain = stream.getvalue().splitlines()
    assert coloured.startswith("\x1b[33m") and coloured.endswith("look\x1b[0m")
    assert "\x1b" not in plain


@pytest.mark.parametrize(("variable", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_a_terminal_may_do_without(variable: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, value)
    stream = Terminal()
    configure_logging("debug", "gateway", stream)
    logging.getLogger("headrace").warning("look")
    assert "\x1b" not in stream.getvalue()


def test_a_python_warning_is_a_line_too() -> None:
    stream = io.StringIO()
    configure_logging("info", "gateway", stream)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)  # catch_warnings has put its own in place
        warnings.warn("old", UserWarning, stacklevel=1)
    assert " gateway warning " in stream.getvalue() and "UserWarning: old" in stream.getvalue()
