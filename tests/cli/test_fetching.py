"""How the fetching of a model is shown: a bar on a terminal, lines elsewhere, nothing where nothing is fetched."""

import io
from pathlib import Path

import pytest

from headrace.cli.fetching import Bars, Lines, fetch_model, shown
from headrace.errors import InputError


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_model_of_an_unknown_kind_is_refused_at_once(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "model.safetensors"):
        (tmp_path / name).touch()
    (tmp_path / "config.json").write_text('{"architectures": ["Mamba"]}')
    with pytest.raises(InputError, match="^architectures: must be"):
        fetch_model(str(tmp_path))


def test_nothing_is_written_where_nothing_is_fetched() -> None:
    for stream in (io.StringIO(), Terminal()):
        with shown(stream):
            pass
        assert stream.getvalue() == ""


def test_lines_come_at_the_beginning_every_five_seconds_and_at_the_end() -> None:
    stream = io.StringIO()
    now = 0.0
    lines = Lines(stream, clock=lambda: now)
    for done in range(101):
        now += 0.25
        lines("fetching tiny", done * 1_000_000, 100_000_000)
    lines("fetching tiny", 100_000_000, 100_000_000)  # told already
    assert stream.getvalue().splitlines() == [
        f"headrace: fetching tiny: {done}% of 100.0 MB" for done in (0, 20, 40, 60, 80, 100)
    ]


def test_each_stage_has_its_own_lines() -> None:
    stream = io.StringIO()
    lines = Lines(stream, clock=lambda: 0.0)
    for stage in ("fetching tiny", "converting tiny"):
        for done in (0, 5, 10):
            lines(stage, done, 10)
    assert [line.rpartition(":")[0] for line in stream.getvalue().splitlines()] == [
        "headrace: fetching tiny",
        "headrace: fetching tiny",
        "headrace: converting tiny",
        "headrace: converting tiny",
    ]


def test_a_terminal_gets_a_bar_and_its_cursor_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()

    def fetch_and_interrupt() -> None:
        with shown(stream) as progress:
            assert isinstance(progress, Bars)
            progress("fetching tiny", 0, 10_000_000)
            progress("fetching tiny", 10_000_000, 10_000_000)
            progress("converting tiny", 1, 2)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_and_interrupt()
    text = stream.getvalue()
    assert "fetching tiny" in text and "10.0/10.0 MB" in text and "converting tiny" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
