"""The options that only `headrace plan` has: what each takes, and what it is for."""

from pathlib import Path
from typing import Annotated

from headrace.cli.compare.options import number
from headrace.cli.options import option
from headrace.cli.values import milliseconds, one_of, whole_number
from headrace.deploy.sizes import MOST_TOKENS

PANEL = "What is wanted"
DEVICES_PANEL = "Devices and link"
ANSWER_PANEL = "Answer"
MOST_RATE = 100_000.0

MODEL, DEVICE, LINK = "meta-llama/Llama-3.1-70B", "h100", "400gbit"

Model = Annotated[
    str | None,
    option(
        *("--model", "NAME|DIR", "A public model by its hub id, or a directory with its config.json.", DEVICES_PANEL),
        show_default=MODEL,
    ),
]
Device = Annotated[
    str | None,
    option(
        *("--device", "NAME", "Of all instances: a100, h100, h200, b200, or of --hardware.", DEVICES_PANEL),
        show_default=DEVICE,
    ),
]
DecodeDevice = Annotated[
    str | None,
    option(
        *("--decode-device", "NAME", "Another device for decoders; --device is then the prefillers'.", DEVICES_PANEL),
        show_default=False,
    ),
]
Link = Annotated[
    str | None,
    option(
        *("--link", "NAME", "Between hosts, of each device: 1gbit to 3200gbit, or of --hardware.", DEVICES_PANEL),
        show_default=LINK,
    ),
]
ProfileFile = Annotated[
    Path | None,
    option(
        *("--profile", "FILE", "Build with what `headrace profile` measured, not with devices of a list."),
        DEVICES_PANEL,
        show_default=False,
    ),
]
HardwareFile = Annotated[
    Path | None,
    option(
        *("--hardware", "FILE", "Devices, efficiencies, links, prices of one's own (TOML)."),
        DEVICES_PANEL,
        show_default=False,
    ),
]
Rate = Annotated[float, option("--rate", "N", "Requests a second.", PANEL, parser=number(least=0.001, most=MOST_RATE))]
Workload = Annotated[str, option("--workload", "NAME|FILE", "short, long, mixed, or a trace file.", PANEL)]
TtftMs = Annotated[float, option("--ttft-ms", "MS", "Budget of the first token.", PANEL, parser=milliseconds)]
TpotMs = Annotated[
    float,
    option("--tpot-ms", "MS", "Budget of a further token, on average over a request.", PANEL, parser=milliseconds),
]
Attainment = Annotated[
    int,
    option(
        *("--attainment", "90|99", "Percent of the requests that are to keep both.", PANEL),
        parser=whole_number(least=50, most=100),
    ),
]
Objective = Annotated[
    str,
    option(
        *("--least", "devices|cost|power", "What is to be least.", PANEL), parser=one_of("devices", "cost", "power")
    ),
]
Headroom = Annotated[
    bool,
    option("--n-1", None, "It is to hold also with one instance of each pool gone.", PANEL),
]
MaxPrompt = Annotated[
    int,
    option(
        *("--max-prompt-tokens", "N", "Longer prompts are clipped, and the answer says how many.", PANEL),
        parser=whole_number(least=1, most=MOST_TOKENS),
        show_default="as the model takes",
    ),
]
MaxOutput = Annotated[
    int,
    option(
        *("--max-output-tokens", "N", "The same of answers.", PANEL),
        parser=whole_number(least=2, most=MOST_TOKENS),
        show_default="as the model takes",
    ),
]
Out = Annotated[
    Path | None,
    option(
        *("--out", "DIR", "Write the plan there as a page with plots, and as JSON.", ANSWER_PANEL), show_default=False
    ),
]
Write = Annotated[
    Path | None,
    option(
        *("--write", "FILE", "Write the answer as a deployment for `headrace serve --deployment` and `check`."),
        ANSWER_PANEL,
        show_default=False,
    ),
]
