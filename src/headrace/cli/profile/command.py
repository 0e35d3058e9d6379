"""The command itself: its options, and nothing heavy before they are known to be right."""

from headrace.cli import options as opt
from headrace.cli.compare import options as compare_opt
from headrace.cli.logs import configure_logging
from headrace.cli.profile import options as profile_opt
from headrace.model.builtin import BUILTIN_NAME

INSTANCE = opt.INSTANCE_DEFAULTS


def profile_command(
    *,
    seconds: profile_opt.Seconds = 30.0,
    out: profile_opt.Out = profile_opt.DEFAULT_OUT,
    link: compare_opt.LinkText = None,
    model: opt.ModelName = BUILTIN_NAME,
    dtype: opt.Dtype = INSTANCE.dtype,
    kv_memory: opt.KVMemory = INSTANCE.kv_memory_bytes,
    max_running: opt.MaxRunning = INSTANCE.max_running,
    chunk_tokens: opt.ChunkTokens = INSTANCE.chunk_tokens,
    cpus: opt.Cpus = None,
    log_level: opt.LogLevel = "warning",
) -> int:
    """What steps, gateway and link take on this machine, measured: a file from which deployments are simulated."""
    configure_logging(log_level, "profile")
    # Function-local: it loads numpy.
    from headrace.cli.profile import beginning

    given = beginning.Given(
        seconds=seconds,
        out=out,
        link=link,
        model=model,
        dtype=dtype,
        kv_memory=kv_memory,
        max_running=max_running,
        chunk_tokens=chunk_tokens,
        cpus=cpus.numbers if cpus else (),
    )
    return beginning.profile(given)
