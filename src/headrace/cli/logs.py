"""How log lines look: time, process, level, text. Set once, when a process knows its options.

    2026-01-31 14:03:22.123 decoder-0 info  decoder decoder-0: model smollm2-135m-instruct ..

Other libraries are heard from warnings on.
"""

import logging
import os
import sys
from typing import Final, TextIO

LEVELS: Final = ("debug", "info", "warning", "error")
DEFAULT_LEVEL: Final = "info"

COLOURS: Final = {logging.DEBUG: "2", logging.WARNING: "33", logging.ERROR: "31", logging.CRITICAL: "31;1"}
"""ANSI codes: faint, yellow, red. Info is as the terminal writes."""


class LogLine(logging.Formatter):
    """One record as a line; a traceback follows on its own lines."""

    default_msec_format = "%s.%03d"

    def __init__(self, process: str, *, coloured: bool) -> None:
        super().__init__()
        self._process = process
        self._coloured = coloured

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (logging's name)
        level = record.levelname.lower()
        line = f"{self.formatTime(record)} {self._process} {level:<5} {record.message}"
        colour = COLOURS.get(record.levelno) if self._coloured else None
        return f"\x1b[{colour}m{line}\x1b[0m" if colour else line


def configure_logging(level: str, process: str, stream: TextIO = sys.stderr) -> None:
    lines = logging.StreamHandler(stream)
    lines.setFormatter(LogLine(process, coloured=shows_colour(stream)))
    logging.basicConfig(handlers=[lines], level=logging.WARNING, force=True)
    logging.getLogger("headrace").setLevel(level.upper())
    logging.captureWarnings(True)


def shows_colour(stream: TextIO) -> bool:
    """Source: no-color.org for NO_COLOR."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
