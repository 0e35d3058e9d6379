"""`headrace fabric selftest`: is this link as good as its machines allow? Exit status 0, or 1 below a floor."""

import json
import sys

from headrace.cli.fabric import measure_options as opt
from headrace.cli.fabric.measure import INTERRUPTED, measure_all
from headrace.cli.fabric.measure_report import described_verdicts, rendered_verdicts
from headrace.fabric.measure.plan import FULL, QUICK
from headrace.fabric.measure.verdict import FLOOR, judge

HERE = opt.Far()


def selftest_command(
    *,
    peer: opt.Peer = HERE,
    token: opt.Token = None,
    quick: opt.Quick = False,
    floor: opt.Floor = FLOOR,
    as_json: opt.AsJson = False,
) -> int:
    """Measure every transport beside the machine's limits: bare copies, sockets, libfabric writes of the same pages.

    Exit status 1 where a transport fails, carries wrong bytes, is below the floor, or is busy with nothing to do.
    """
    plan, place = QUICK if quick else FULL, opt.place_of(peer, token)
    try:
        measured = measure_all(plan, place, peer=str(peer), as_json=as_json)
    except KeyboardInterrupt:
        return INTERRUPTED
    verdicts = [judge(each, floor) for each in measured.transports]
    if as_json:
        told = measured.described | described_verdicts(verdicts, floor)
        sys.stdout.write(json.dumps(told, indent=1) + "\n")
    else:
        sys.stdout.write(rendered_verdicts(verdicts, floor))
    return 0 if all(verdict.is_ok for verdict in verdicts) else 1
