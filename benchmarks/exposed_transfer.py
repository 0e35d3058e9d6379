"""What of the transfer a client waits for: layer by layer against all after the prefill, on a link that is shaped.

Two network namespaces, a prefiller in one and a decoder in the other, between them a veth pair with a token bucket
(tbf) at each end. The prefill time of a prompt is measured first, on the unshaped link; the rate is then set so that
the prompt's whole KV takes `--share` of that time. One chunk, digests off. Exposed: from the prompt's last layer
computed to its last byte at the decoder (fetch less prefiller queue and prefill, as the gateway's waterfall has it).
Both ways take turns, each on processes of its own, the prefix caches cold. Needs root, `ip` and `tc`.

    python benchmarks/exposed_transfer.py [--runs 5] [--tokens 1000] [--share 0.7]
"""

import argparse
import asyncio
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from _client import random_prompt, require
from _deployment import Deployment, InstanceSpec
from _endpoint import positive

from headrace.cli.compare.arms import Side
from headrace.cli.compare.gateway_log import read_parts
from headrace.cli.compare.link import Ends, laid
from headrace.cli.machine import describe_machine
from headrace.errors import InputError

KV_BYTES_PER_TOKEN = 30 * 2 * 3 * 64 * 2  # layers, K and V, heads, head_dim, bf16
SIDES: dict[str, Side] = {"prefiller": "prefillers", "decoder": "decoders"}


@dataclass(frozen=True)
class Told:
    prefill_s: float
    exposed_s: float


@contextmanager
def link() -> Iterator[Ends]:
    """SystemExit says what is denied here."""
    try:
        with laid(None) as ends:
            yield ends
    except InputError as error:
        raise SystemExit(f"skipped: {error}") from error


def deployment(transfer: str, num_tokens: int, ends: Ends) -> Deployment:
    def spec(role: str, core: str, *options: str) -> InstanceSpec:
        namespace, address = ends.namespaces[SIDES[role]], ends.addresses[SIDES[role]]
        return InstanceSpec(
            role,
            cores=core,
            netns=namespace,
            options=("--fabric-host", address, "--insecure", "--require-provider", "tcp", *options),
        )

    return Deployment(
        [
            spec("prefiller", "1", "--transfer", transfer, "--chunk-tokens", str(num_tokens)),
            spec("decoder", "0", "--no-verify-kv"),
        ],
        log_level="debug",
        gateway_cores="0",
    )


async def ask(running: Deployment, num_tokens: int, seed: int) -> Told:
    stream = await running.complete(random_prompt(num_tokens, seed), 2)
    require([stream])
    ms = read_parts(running.log())[stream.id]
    return Told(prefill_s=ms["prefill"] / 1e3, exposed_s=ms["exposed transfer"] / 1e3)


def median(values: Sequence[float]) -> str:
    return f"{1e3 * statistics.median(values):.0f} ms ({1e3 * min(values):.0f}-{1e3 * max(values):.0f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=positive, default=5)
    parser.add_argument("--tokens", type=positive, default=1000)
    parser.add_argument("--share", type=float, default=0.7)
    arguments = parser.parse_args()
    print(describe_machine())
    told: dict[str, list[Told]] = {"layers": [], "whole": []}
    with link() as ends:
        for number in range(arguments.runs):
            for transfer, of_transfer in told.items():
                ends.unshape()
                with deployment(transfer, arguments.tokens, ends) as running:
                    warm = [asyncio.run(ask(running, arguments.tokens, 10 * number + seed)) for seed in range(3)]
                    prefill_s = statistics.median(one.prefill_s for one in warm[1:])
                    num_bytes = (arguments.tokens - 1) * KV_BYTES_PER_TOKEN
                    rate = num_bytes / (arguments.share * prefill_s)
                    ends.shape(8 * rate)
                    one = asyncio.run(ask(running, arguments.tokens, 10 * number + 5))
                    of_transfer.append(one)
                print(
                    f"{transfer}: prefill {1e3 * one.prefill_s:.0f} ms, KV {num_bytes / 1e6:.1f} MB at "
                    f"{8e-6 * rate:.0f} Mbit/s = {1e3 * num_bytes / rate:.0f} ms, exposed {1e3 * one.exposed_s:.0f} ms",
                    flush=True,
                )
    exposed = {name: [one.exposed_s for one in of_transfer] for name, of_transfer in told.items()}
    for name, values in exposed.items():
        print(f"--transfer {name}: exposed {median(values)}, prefill {median([one.prefill_s for one in told[name]])}")
    ratio = statistics.median(exposed["layers"]) / statistics.median(exposed["whole"])
    print(f"layer by layer exposes {ratio:.2f} of what a transfer after the prefill does")


if __name__ == "__main__":
    main()
