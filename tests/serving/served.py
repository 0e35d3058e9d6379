"""`headrace serve` as a test sees it: a process with children, asked over HTTP by the official client.

Owns the process until it has ended, with all of its children; whatever a test leaves behind fails it.
"""

import asyncio
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx2
import openai

START_S = 90.0
STOP_S = 20.0


@dataclass(frozen=True)
class Completion:
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int


class Served:
    """`with Served(model, "--decoders", "2") as served:`; `name` is what requests call the model."""

    def __init__(self, model: Path, *options: str, log_level: str = "info") -> None:
        self.name = "served"
        log, name = tempfile.mkstemp(prefix="headrace-served-", suffix=".log")
        self._log = Path(name)
        words = ["serve", "--model", str(model), "--served-name", self.name, "--port", "0", "--log-level", log_level]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "headrace", *words, *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        os.close(log)
        self.url = ""

    def __enter__(self) -> Self:
        timer = threading.Timer(START_S, self.process.kill)
        timer.start()
        try:
            assert self.process.stdout is not None
            for line in self.process.stdout:
                if found := re.search(r"at (http://\S+?);", line):
                    self.url = found[1]
                if self.url and line == "\n" and "curl" in self._said:
                    break
                self._said += line
            assert self.url, f"serve ended with {self.process.wait()}, or was too slow:\n{self.log()}"
        except BaseException:
            self._end(signal.SIGKILL)
            self._log.unlink()
            raise
        finally:
            timer.cancel()
        instances = {name for name in self.pids() if not name.startswith("gateway")}
        self.wait_until(lambda: {name for name, _ in self.gauges()} >= instances, "every instance tells its state")
        return self

    _said = ""

    @property
    def greeting(self) -> str:
        """What it printed when it was ready."""
        return self._said

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            print(self.log())
        if self.process.poll() is None:
            status = self.stop()
            assert kind is not None or status == 0, f"serve ended with {status}:\n{self.log()}"
        self._log.unlink()

    def stop(self, number: signal.Signals = signal.SIGINT) -> int:
        """-> its exit status, when it and all processes below it are gone, and their files in /dev/shm."""
        pids = _pids_below(self.process.pid)
        status = self._end(number)
        left = [pid for pid in pids if _is_running(pid)]
        assert not left, f"still running after {number.name}: {left}\n{self.log()}"
        files = [name for name in os.listdir("/dev/shm") if name.startswith("headrace-shm-")]
        left_files = [name for name in files if int(name.split("-")[3]) in pids]  # others have theirs
        assert not left_files, f"still there after {number.name}: {left_files}\n{self.log()}"
        return status

    def _end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        try:
            status = self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        finally:
            if self.process.stdout is not None:
                self.process.stdout.close()
        return status

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    # ---- its processes -----------------------------------------------------------------------------------------

    @property
    def control(self) -> str:
        """Where the gateway hears operators: of several the first, control.sock and not control-1.sock."""
        return max(re.findall(r"control at (ipc://\S+)", self.log()))

    def operate(self, *words: str) -> str:
        """A command of an operator, which succeeds -> what it says."""
        command = [sys.executable, "-m", "headrace", *words, "--control", self.control]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert answer.returncode == 0, f"{answer.stderr}\n{self.log()}"
        return answer.stdout

    def pids(self) -> dict[str, int]:
        """By name: gateway, prefiller-0, ..."""
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and _parent(int(entry.name)) == self.process.pid:
                words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
                if "--name" in words:
                    found[words[words.index("--name") + 1]] = int(entry.name)
        return found

    # ---- asked -------------------------------------------------------------------------------------------------

    def client(self, timeout_s: float = 120.0) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=timeout_s)

    def async_client(self, timeout_s: float = 600.0) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=timeout_s)

    def complete(self, token_ids: Sequence[int], max_tokens: int, **fields: Any) -> Completion:
        """Greedy, past any end of text, unless `fields` say otherwise."""
        with self.client() as client:
            return as_completion(client.completions.create(**self.request(token_ids, max_tokens, **fields)))

    def complete_all(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, *, at_once: int, **fields: Any
    ) -> list[Completion]:
        """The same for many, so many of them at once."""

        async def all_of_them() -> list[Completion]:
            turn = asyncio.Semaphore(at_once)
            async with self.async_client() as client:

                async def one(prompt: Sequence[int]) -> Completion:
                    async with turn:
                        request = self.request(prompt, max_tokens, **fields)
                        return as_completion(await client.completions.create(**request))

                return await asyncio.gather(*(one(prompt) for prompt in prompts))

        return asyncio.run(all_of_them())

    def request(self, token_ids: Sequence[int], max_tokens: int, **fields: Any) -> dict[str, Any]:
        body = {"ignore_eos": True, "return_token_ids": True, **fields}
        temperature = body.pop("temperature", 0.0)
        return {
            "model": self.name,
            "prompt": list(token_ids),
            "max_tokens": max_tokens,
            "temperature": temperature,
            "extra_body": body,
        }

    def gauges(self) -> dict[tuple[str, str], float]:
        """Instances' gauges and counters, by (instance, name)."""
        text = httpx2.get(f"{self.url}/metrics").text
        found = {}
        for line in text.splitlines():
            if match := re.match(r'headrace_instance_(\w+)\{instance="([^"]+)",role="\w+"\} (\S+)', line):
                found[match[2], match[1]] = float(match[3])
        return found

    def num_events(self, event: str) -> float:
        """What the gateway was told while it placed requests, such as no_room."""
        found = re.search(
            rf'headrace_dispatch_events_total\{{event="{event}"\}} (\S+)', httpx2.get(f"{self.url}/metrics").text
        )
        return float(found[1]) if found else 0.0

    def wait_until(self, holds: Callable[[], bool], what: str, within_s: float = 10.0) -> None:
        until = time.monotonic() + within_s
        while not holds():
            assert time.monotonic() < until, f"not within {within_s} s: {what}\n{self.gauges()}\n{self.log()}"
            time.sleep(0.1)

    def wait_idle(self, within_s: float = 10.0) -> None:
        """No page held or quarantined, no ticket open, on any instance, as each says itself."""

        def is_idle() -> bool:
            gauges = self.gauges()
            busy = ("pages_held", "pages_quarantined", "tickets_open", "pages_held_by_decoders")
            return all(value == 0 for (_, name), value in gauges.items() if name in busy)

        self.wait_until(is_idle, "pages are free and tickets closed", within_s)


def as_completion(answer: Any) -> Completion:
    (choice,) = answer.choices
    details = answer.usage.prompt_tokens_details
    return Completion(
        token_ids=tuple(choice.model_extra["token_ids"]),
        text=choice.text,
        finish_reason=choice.finish_reason,
        prompt_tokens=answer.usage.prompt_tokens,
        cached_tokens=details.cached_tokens if details is not None and details.cached_tokens is not None else -1,
    )


def _pids_below(pid: int) -> list[int]:
    """Children, theirs (the ranks of an instance), and so on."""
    parents = {int(entry.name): _parent(int(entry.name)) for entry in Path("/proc").iterdir() if entry.name.isdigit()}
    found = [pid]
    for above in found:
        found += [child for child, parent in parents.items() if parent == above]
    return found[1:]


def _parent(pid: int) -> int:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[1])


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))
