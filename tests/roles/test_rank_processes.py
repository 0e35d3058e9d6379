"""Instances of several ranks, as the command line starts them: what they write, and how they end together."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from role_world import CHUNK, NUM_PAGES, PAGE, World, in_world
from scripted_gateway import until
from tiny_checkpoint import Reference, kv_layout, prompt

from headrace.cli.options import INSTANCE_DEFAULTS

START_S = 40.0
END_S = 2.0
"""Within which an instance that has lost a rank has told its gateway and ended."""


class Lead:
    """An instance that a test ends, or sees end; whatever is left of its processes is killed."""

    def __init__(self, world: World, process: asyncio.subprocess.Process) -> None:
        self._world = world
        self.process = process

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def uuid(self) -> str:
        return next(iter(self._world.gateway.announced))

    async def announced(self) -> None:
        await until(lambda: bool(self._world.gateway.announced), "it has announced itself", START_S)

    async def ranks(self) -> list[int]:
        """The process ids of ranks 1, 2, .., as soon as they are there."""
        await until(lambda: bool(children(self.pid)), "it has started its ranks", START_S)
        return children(self.pid)

    async def ended(self) -> tuple[int, str]:
        """-> its exit status, and what it and its ranks said."""
        assert self.process.stderr is not None
        said = await self.process.stderr.read()  # to its end: no rank holds the other end any more
        return await self.process.wait(), said.decode()


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in found if b"\0rank\0" in Path(f"/proc/{child}/cmdline").read_bytes()]


async def started(world: World, *options: str, role: Sequence[str] = ("decoder", "--colocated")) -> Lead:
    (world.checkpoint / "tokenizer.json").touch()  # the command line wants one, the process does not read it
    kv = kv_layout(world.checkpoint, page_size=PAGE, dtype="fp32")
    words = [
        *(*role, "--model", str(world.checkpoint), "--gateway", world.gateway.endpoint),
        *("--dtype", "fp32", "--page-size", str(PAGE), "--chunk-tokens", str(CHUNK), "--log-level", "warning"),
        *("--kv-memory", str(NUM_PAGES * kv.num_layers * kv.page_bytes)),
        *options,
    ]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "headrace", *words), stderr=asyncio.subprocess.PIPE, start_new_session=True
    )

    async def end() -> None:
        if process.returncode is None:
            process.kill()
        await process.communicate()

    world.exits.push_async_callback(end)
    return Lead(world, process)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("ranks", ["--tp", "--dp"])
def test_two_ranks_write_what_one_writes(ranks: str, checkpoint: Path, tmp_path: Path, reference: Reference) -> None:
    @in_world
    async def play(world: World) -> None:
        lead = await started(world, ranks, "2")
        await lead.announced()
        prompts = [prompt(length) for length in (1, PAGE, 2 * CHUNK + 3, 7)]
        asked = [world.gateway.generate(lead.uuid, token_ids, 12) for token_ids in prompts]
        texts = [await one.text() for one in asked]
        assert texts == [reference.text(token_ids, 12) for token_ids in prompts]
        limits = world.gateway.announced[lead.uuid].limits
        assert limits.pool_tokens == NUM_PAGES * PAGE  # of all ranks, whichever they are
        assert limits.max_running == INSTANCE_DEFAULTS.max_running * (2 if ranks == "--dp" else 1)

    play(checkpoint, tmp_path, reference)


@pytest.mark.parametrize("in_a_step", [False, True])
def test_a_rank_that_is_killed_ends_its_instance_with_one_line_and_the_gateway_hears_goodbye(
    in_a_step: bool, checkpoint: Path, tmp_path: Path, reference: object
) -> None:
    @in_world
    async def play(world: World) -> None:
        lead = await started(world, "--tp", "2")
        await lead.announced()
        (rank,) = await lead.ranks()
        if in_a_step:  # the lead's model thread waits for it
            os.kill(rank, signal.SIGSTOP)
            await world.gateway.accepted(world.gateway.generate(lead.uuid, prompt(9), 4))
            await asyncio.sleep(0.2)
        began = time.monotonic()
        os.kill(rank, signal.SIGKILL)
        ended = await lead.ended()
        assert time.monotonic() - began < END_S
        said = f"headrace: error: rank 1 of 2 (process {rank}) was ended by SIGKILL\n"
        assert ended == (1, said)
        assert world.gateway.said_goodbye == {lead.uuid}

    play(checkpoint, tmp_path, reference)  # type: ignore[arg-type]


@in_world
async def test_a_prefillers_rank_that_is_killed_in_a_step_costs_its_decoder_nothing_but_time(world: World) -> None:
    lead = await started(world, "--tp", "2", role=("prefiller", "--transports", "mapped"))
    await lead.announced()
    prefiller = lead.uuid
    decoder = await world.decoder()
    world.gateway.name_prefillers(decoder.uuid, prefiller)
    await until(lambda: decoder.remote._messenger._prefillers.num_ready == 1, "it is ready")
    (rank,) = await lead.ranks()
    os.kill(rank, signal.SIGSTOP)
    asked = await world.gateway.generate_remotely(decoder.uuid, prefiller, prompt(2 * CHUNK), 5)
    status = world.gateway.status
    await until(lambda: prefiller in status and status[prefiller].gauges["tickets_open"] == 1, "the prompt is there")
    os.kill(rank, signal.SIGKILL)
    await world.gateway.parked(asked)
    assert await asked.text() == world.reference.text(prompt(2 * CHUNK), 5)
    assert (await lead.ended())[0] == 1


@in_world
async def test_a_rank_that_is_killed_while_all_load_ends_the_instance(world: World) -> None:
    lead = await started(world, "--tp", "2")
    (rank,) = await lead.ranks()
    os.kill(rank, signal.SIGKILL)
    assert await lead.ended() == (1, f"headrace: error: rank 1 of 2 (process {rank}) was ended by SIGKILL\n")


@in_world
async def test_a_lead_that_is_killed_takes_its_rank_even_a_stopped_one(world: World) -> None:
    lead = await started(world, "--tp", "2")
    await lead.announced()
    (rank,) = await lead.ranks()
    os.kill(rank, signal.SIGSTOP)
    os.kill(lead.pid, signal.SIGKILL)
    assert await lead.ended() == (-signal.SIGKILL, "")
    await until(lambda: not is_running(rank), "the rank is gone", END_S)


@in_world
async def test_ctrl_c_in_the_middle_of_a_step_ends_all_quietly(world: World) -> None:
    """A terminal sends it to every process of the group; ranks leave it to their lead."""
    lead = await started(world, "--tp", "2")
    await lead.announced()
    (rank,) = await lead.ranks()
    asked = world.gateway.generate(lead.uuid, prompt(9), 400)
    os.kill(rank, signal.SIGINT)
    os.kill(rank, signal.SIGTERM)
    await until(lambda: len(asked.token_ids) > 20, "it writes")
    os.killpg(lead.pid, signal.SIGINT)
    assert await lead.ended() == (0, "")
    assert not is_running(rank)
    await until(lambda: world.gateway.said_goodbye == {lead.uuid}, "goodbye")


@in_world
async def test_what_no_two_ranks_can_share_is_refused_by_the_options_name(world: World) -> None:
    lead = await started(world, "--tp", "3")
    assert await lead.ended() == (
        2,
        "headrace: error: --tp: must divide the model's 2 KV heads or be a multiple of them, is 3\n",
    )
