"""The command itself: its options put together, then checks, then the run, then what is shown and written."""

import json
import sys
from dataclasses import asdict
from typing import cast

from headrace.cli import options as opt
from headrace.cli.fetching import fetch_model
from headrace.cli.logs import configure_logging
from headrace.cli.network import require_free_port
from headrace.cli.profile_step import options as profile_opt
from headrace.cli.profile_step.plan import HOST, ProfileOptions, plan_profile
from headrace.cli.profile_step.report import rendered
from headrace.cli.run_directory import private_directory
from headrace.kvcache.layout import KVDtype
from headrace.model.builtin import BUILTIN_NAME
from headrace.model.options import KernelChoice

INSTANCE = opt.INSTANCE_DEFAULTS
INTERRUPTED = 130


def profile_step_command(
    *,
    model: opt.ModelName = BUILTIN_NAME,
    dtype: opt.Dtype = INSTANCE.dtype,
    kernels: opt.Kernels = INSTANCE.kernels,
    threads: opt.Threads = INSTANCE.threads,
    cpus: opt.Cpus = None,
    streams: profile_opt.Streams = profile_opt.DEFAULT_STREAMS,
    kv_len: profile_opt.KVLen = 300,
    steps: profile_opt.Steps = 64,
    temperature: profile_opt.Temperature = 0.0,
    json_file: profile_opt.JsonFile = None,
    log_level: opt.LogLevel = "warning",
) -> int:
    """Where the time of a decode step goes, measured on the real model; starts and ends all that it needs."""
    configure_logging(log_level, "profile-step")
    options = ProfileOptions(
        model=model,
        dtype=cast("KVDtype", dtype),
        kernels=cast("KernelChoice", kernels),
        threads=threads,
        cpus=opt.cpus_of(cpus.numbers if cpus else (), num_threads=threads),
        streams=streams.numbers,
        kv_len=kv_len,
        num_steps=steps,
        temperature=temperature,
        json_file=json_file,
        log_level=log_level,
    )
    return profile_step(options)


def profile_step(options: ProfileOptions) -> int:
    """-> the exit status. Raises InputError, ChildEnded, StreamsFailed."""
    port = require_free_port(HOST, 0)
    model_dir = fetch_model(options.model)
    with private_directory() as directory:
        plan = plan_profile(options, model_dir=model_dir, directory=directory, port=port)
        # Function-local: it loads torch, once all is right.
        from headrace.cli.profile_step.run import run_profile

        profile = run_profile(plan)
    if profile is None:
        return INTERRUPTED
    if options.json_file is not None:
        options.json_file.write_text(json.dumps(asdict(profile), indent=1) + "\n")
    sys.stdout.write(rendered(profile))
    return 0
