"""The command itself: its options, and nothing heavy before they are known to be right."""

from headrace.cli.compare import options as compare_opt
from headrace.cli.plan import options as plan_opt
from headrace.deploy.sizes import MOST_TOKENS
from headrace.errors import InputError


def plan_command(
    *,
    rate: plan_opt.Rate,
    ttft_ms: plan_opt.TtftMs,
    tpot_ms: plan_opt.TpotMs,
    model: plan_opt.Model = None,
    workload: plan_opt.Workload = "mixed",
    arrivals: compare_opt.Arrivals = None,
    begin: compare_opt.Begin = 0.0,
    max_prompt_tokens: plan_opt.MaxPrompt = MOST_TOKENS,
    max_output_tokens: plan_opt.MaxOutput = MOST_TOKENS,
    attainment: plan_opt.Attainment = 90,
    least: plan_opt.Objective = "devices",
    n_1: plan_opt.Headroom = False,
    device: plan_opt.Device = None,
    decode_device: plan_opt.DecodeDevice = None,
    link: plan_opt.Link = None,
    hardware: plan_opt.HardwareFile = None,
    profile: plan_opt.ProfileFile = None,
    seed: compare_opt.Seed = 1,
    out: plan_opt.Out = None,
    write: plan_opt.Write = None,
) -> int:
    """Which deployment holds both budgets at the least cost, split or not: simulated, with its error."""
    for name, value in (("model", model), ("device", device), ("decode_device", decode_device), ("link", link)):
        if profile is not None and value is not None:
            raise InputError(name, "must not be given with --profile, which says what was measured")
    # Function-local: it loads numpy, and plots.
    from headrace.cli.plan import planning

    return planning.plan(
        planning.Given(
            model=model or plan_opt.MODEL,
            rate=rate,
            ttft_s=ttft_ms / 1e3,
            tpot_s=tpot_ms / 1e3,
            workload=workload,
            arrivals=arrivals,
            begin_s=begin,
            max_prompt_tokens=max_prompt_tokens,
            max_output_tokens=max_output_tokens,
            target=attainment / 100,
            objective=least,
            with_one_less=n_1,
            device=device or plan_opt.DEVICE,
            decode_device=decode_device or device or plan_opt.DEVICE,
            link=link or plan_opt.LINK,
            hardware=hardware,
            profile=profile,
            seed=seed,
            out=out,
            write=write,
        )
    )
