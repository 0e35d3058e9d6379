"""`headrace fabric bench`: the cells of the self-test, chosen one by one, with no verdict on them."""

import json
import sys

from headrace.cli.fabric import measure_options as opt
from headrace.cli.fabric.measure import INTERRUPTED, measure_all
from headrace.cli.values import TransportNames
from headrace.fabric.measure.plan import FULL, Plan

HERE, ALL = opt.Far(), TransportNames(())


def bench_command(
    *,
    peer: opt.Peer = HERE,
    token: opt.Token = None,
    sizes: opt.PageSizes = opt.DEFAULT_SIZES,
    transports: opt.Transports = ALL,
    num_bytes: opt.BytesPerRun = FULL.num_bytes,
    runs: opt.Runs = FULL.num_pairs,
    imms: opt.Imms = FULL.num_rounds,
    as_json: opt.AsJson = False,
) -> int:
    """Measure chosen page sizes and transports beside the bare loops.

    Exit status 1 where a transport fails or carries wrong bytes; how fast it is, is yours to judge.
    """
    plan = Plan(
        transports=transports.names,
        page_sizes=sizes.num_bytes,
        num_bytes=num_bytes,
        num_pairs=runs,
        num_rounds=imms,
        rest_s=FULL.rest_s if imms else 0.0,
    )
    try:
        measured = measure_all(plan, opt.place_of(peer, token), peer=str(peer), as_json=as_json)
    except KeyboardInterrupt:
        return INTERRUPTED
    if as_json:
        sys.stdout.write(json.dumps(measured.described, indent=1) + "\n")
    are_well = all(each.error is None and all(rates.is_whole for rates in each.pages) for each in measured.transports)
    return 0 if are_well else 1
