"""A supervisor in a process of its own, run as a script: DIRECTORY RUN_DIRECTORY NAME=BEHAVIOUR.. Its exit status is
0 where all ended in time."""

import asyncio
import logging
import sys
from pathlib import Path

from supervised import noted, scripted

from headrace.cli.supervisor import Supervisor

logging.basicConfig(level=logging.INFO, format="%(message)s")
directory, run_directory = Path(sys.argv[1]), Path(sys.argv[2])
children = [scripted(directory, name, behaviour) for name, _, behaviour in (arg.partition("=") for arg in sys.argv[3:])]


async def bring_up() -> None:
    for child in children:
        while not noted(directory, child.name, "pids"):
            await asyncio.sleep(0.01)
    (directory / "up").touch()


sys.exit(not asyncio.run(Supervisor(children, run_directory).run(bring_up)))
