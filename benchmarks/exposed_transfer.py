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
import shutil
import statistics
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from _client import random_prompt, require
from _deployment import Deployment, InstanceSpec
from _endpoint import positive
from _gateway_log import waterfalls

from headrace.cli.machine import describe_machine

KV_BYTES_PER_TOKEN = 30 * 2 * 3 * 64 * 2  # layers, K and V, heads, head_dim, bf16
BURST = "256kb"
NAMES = {"prefiller": ("headrace-p", "10.177.0.1"), "decoder": ("headrace-d", "10.177.0.2")}


@dataclass(frozen=True)
class Told:
    prefill_s: float
    exposed_s: float


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


@contextmanager
def link() -> Iterator[None]:
    """Two namespaces, a veth pair, both ends up. SystemExit says what is denied here."""
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        raise SystemExit(f"skipped: needs {' and '.join(missing)} (iproute2)")
    try:
        for name, _ in NAMES.values():
            run("ip", "netns", "add", name)
        (one, address), (other, its_address) = NAMES.values()
        run("ip", "link", "add", "veth0", "netns", one, "type", "veth", "peer", "name", "veth0", "netns", other)
        for name, its in ((one, address), (other, its_address)):
            run("ip", "-n", name, "addr", "add", f"{its}/24", "dev", "veth0")
            run("ip", "-n", name, "link", "set", "veth0", "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
        yield
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"skipped: {' '.join(error.cmd)}: {error.stderr.strip()}") from error
    finally:
        for name, _ in NAMES.values():
            subprocess.run(("ip", "netns", "delete", name), capture_output=True)


def shape(bytes_per_s: float) -> None:
    for name, _ in NAMES.values():
        rate = f"{int(8 * bytes_per_s)}bit"
        # A queue that holds a second of it: what is too much waits, and is not dropped.
        limit = str(int(bytes_per_s))
        run(
            *["tc", "-n"],
            name,
            *["qdisc", "replace", "dev", "veth0", "root", "tbf", "rate"],
            rate,
            "burst",
            BURST,
            "limit",
            limit,
        )


def unshape() -> None:
    for name, _ in NAMES.values():
        subprocess.run(("tc", "-n", name, "qdisc", "del", "dev", "veth0", "root"), capture_output=True)


def deployment(transfer: str, num_tokens: int) -> Deployment:
    def spec(role: str, core: str, *options: str) -> InstanceSpec:
        namespace, address = NAMES[role]
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
    ms = waterfalls(running.log())[stream.id]
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
    with link():
        for number in range(arguments.runs):
            for transfer, of_transfer in told.items():
                unshape()
                with deployment(transfer, arguments.tokens) as running:
                    warm = [asyncio.run(ask(running, arguments.tokens, 10 * number + seed)) for seed in range(3)]
                    prefill_s = statistics.median(one.prefill_s for one in warm[1:])
                    num_bytes = (arguments.tokens - 1) * KV_BYTES_PER_TOKEN
                    rate = num_bytes / (arguments.share * prefill_s)
                    shape(rate)
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
