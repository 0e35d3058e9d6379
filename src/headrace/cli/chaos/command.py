"""The command itself: its options put together, then the run, then what is shown and written."""

import json
import sys
from dataclasses import asdict
from typing import cast

from headrace.cli import options as opt
from headrace.cli.chaos import options as chaos_opt
from headrace.cli.chaos.states import State
from headrace.cli.logs import configure_logging
from headrace.cli.network import require_endpoint
from headrace.cli.run_directory import running_control


def chaos_command(
    *,
    control: opt.RunningControl = None,
    faults: chaos_opt.Faults = chaos_opt.ALL,
    states: chaos_opt.States = chaos_opt.ALL,
    minutes: chaos_opt.Minutes = None,
    prompt_tokens: chaos_opt.PromptTokens = 900,
    rate: chaos_opt.Rate = 1.5,
    seed: chaos_opt.Seed = 0,
    json_file: chaos_opt.JsonFile = None,
    log_level: opt.LogLevel = "warning",
) -> int:
    """Does harm to a deployment on this machine that serves nobody else, and says what came of it."""
    configure_logging(log_level, "chaos")
    # Function-local: it loads ZeroMQ and numpy, once all is right.
    from headrace.cli.chaos.matrix import ChaosOptions, run_chaos
    from headrace.cli.chaos.report import line, rendered

    options = ChaosOptions(
        control=running_control() if control is None else require_endpoint("control", control, insecure=False),
        faults=faults.names,
        states=cast("tuple[State, ...]", states.names),
        prompt_tokens=prompt_tokens,
        rate=rate,
        seed=seed,
        minutes=minutes,
    )
    run = run_chaos(options, lambda cell: sys.stderr.write(line(cell)))
    if json_file is not None:
        json_file.write_text(json.dumps({**asdict(run), "is_right": run.is_right}, indent=1) + "\n")
    sys.stdout.write(rendered(run))
    return 0 if run.is_right else 1
