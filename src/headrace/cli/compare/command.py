"""The command itself: its options, and nothing heavy before they are known to be right."""

from headrace.cli import options as opt
from headrace.cli.compare import options as compare_opt
from headrace.cli.logs import configure_logging
from headrace.model.builtin import BUILTIN_NAME

INSTANCE = opt.INSTANCE_DEFAULTS


def compare_command(
    *,
    quick: compare_opt.Quick = False,
    workload: compare_opt.Workloads = None,
    arrivals: compare_opt.Arrivals = None,
    begin: compare_opt.Begin = 0.0,
    rates: compare_opt.Rates = compare_opt.NONE,
    seconds: compare_opt.Seconds = None,
    repetitions: compare_opt.Repetitions = None,
    ttft_ms: compare_opt.TtftMs = None,
    tpot_ms: compare_opt.SloTpotMs = None,
    max_prompt_tokens: compare_opt.MaxPrompt = 2000,
    max_output_tokens: compare_opt.MaxOutput = 128,
    seed: compare_opt.Seed = 1,
    chunks: compare_opt.Chunks = compare_opt.NONE,
    prefillers: compare_opt.Prefillers = compare_opt.NONE,
    link: compare_opt.LinkText = None,
    target: compare_opt.Targets = None,
    model: opt.ModelName = BUILTIN_NAME,
    dtype: opt.Dtype = INSTANCE.dtype,
    kv_memory: opt.KVMemory = INSTANCE.kv_memory_bytes,
    max_running: opt.MaxRunning = INSTANCE.max_running,
    cpus: opt.Cpus = None,
    out: compare_opt.Out = None,
    resume: compare_opt.Resume = False,
    recheck: compare_opt.Recheck = None,
    against: compare_opt.Against = None,
    log_level: opt.LogLevel = "warning",
) -> int:
    """The same arrivals against both architectures at equal devices: should you split, and how?"""
    configure_logging(log_level, "compare")
    # Function-local: they load numpy, and plots.
    from headrace.cli.compare import beginning

    if recheck is not None:
        return beginning.recheck_in(recheck)
    if against is not None:
        return beginning.against(*against)
    given = beginning.Given(
        quick=quick,
        workload=workload or (),
        arrivals=arrivals,
        begin=begin,
        rates=rates.numbers,
        seconds=seconds,
        repetitions=repetitions,
        ttft_ms=ttft_ms,
        tpot_ms=tpot_ms,
        max_prompt_tokens=max_prompt_tokens,
        max_output_tokens=max_output_tokens,
        seed=seed,
        chunks=chunks.numbers,
        prefillers=prefillers.numbers,
        link=link,
        target=target or (),
        model=model,
        dtype=dtype,
        kv_memory=kv_memory,
        max_running=max_running,
        cpus=cpus.numbers if cpus else (),
        out=out,
        resume=resume,
    )
    return beginning.compare(given)
