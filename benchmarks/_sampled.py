"""headrace, sampled: the command line as it is, and a look at the main thread's stack at every millisecond of CPU time.

    python _sampled.py FILE WORDS ..     as `headrace WORDS ..`; SIGUSR1 begins the samples, their counts go to FILE

A sample is taken where the interpreter next runs Python: time in C counts for the line that called it. It belongs to
the innermost frame that one of the `PARTS` names.
"""

import json
import signal
import sys
from collections import Counter
from pathlib import Path
from types import FrameType

SAMPLE_S = 0.001

PARTS = {
    "HTTP: parse and write": ("/uvicorn/", "/gateway/server.py"),
    "routes": ("/starlette/", "/front/app.py", "/front/connection.py"),
    "body: JSON and fields": ("/front/openai_requests.py", "/front/openai_fields.py", "/pydantic/"),
    "chat template": ("/front/chat.py", "/jinja2/"),
    "tokenise": ("/front/intake.py", "/front/vocabulary.py:encode"),
    "detokenise": ("/front/text.py", "/front/vocabulary.py"),
    "choices": ("/front/choices.py",),
    "control socket": ("/zmq/", "/dispatch/control.py", "/protocol/control.py"),
    "routing": (
        "/gateway/route.py",
        "/dispatch/observed.py",
        "/dispatch/affinity.py",
        "/dispatch/door.py",
        "/kvcache/",
    ),
    "figures": ("/dispatch/figures.py", "/dispatch/metrics.py", "/prometheus_client/", "/logging/"),
    "answer: JSON and events": ("/front/answers.py", "/front/openai_answers.py"),
    "tasks and time-outs": ("/asyncio/", "/contextlib.py"),
    "life and messages": ("/headrace/gateway/",),
}
REST = "loop"


def main() -> None:
    samples = Samples()
    signal.signal(signal.SIGUSR1, samples.begin)
    signal.signal(signal.SIGPROF, samples.take)
    file, *words = sys.argv[1:]
    sys.argv = ["headrace", *words]
    from headrace.cli.app import main as headrace

    try:
        headrace()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        Path(file).write_text(json.dumps(samples.told()))


class Samples:
    def __init__(self) -> None:
        self._parts: Counter[str] = Counter()
        self._places: Counter[str] = Counter()

    def begin(self, number: int, frame: FrameType | None) -> None:
        signal.setitimer(signal.ITIMER_PROF, SAMPLE_S, SAMPLE_S)

    def take(self, number: int, frame: FrameType | None) -> None:
        if frame is not None:
            self._places[_place(frame)] += 1
        self._parts[_part(frame)] += 1

    def told(self) -> dict[str, list[tuple[str, int]]]:
        return {"parts": self._parts.most_common(), "places": self._places.most_common(40)}


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_code.co_name}"


def _part(frame: FrameType | None) -> str:
    while frame is not None:
        place = _place(frame)
        for part, marks in PARTS.items():
            if any(mark in place for mark in marks):
                return part
        frame = frame.f_back
    return REST


if __name__ == "__main__":
    main()
