"""`headrace check`: a deployment file against its model, with no device and no weights; then what is shown of it."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.values import whole_number
from headrace.deploy.file import naming, read_deployment
from headrace.deploy.known import known_config
from headrace.deploy.sizes import MOST_TOKENS
from headrace.errors import InputError
from headrace.model.checkpoint import read_shape
from headrace.model.locate import existing_path
from headrace.model.shape import ModelShape

PANEL = "Check"

DeploymentFile = Annotated[
    Path, typer.Argument(metavar="FILE", help="A deployment, as in deploy/.", show_default=False)
]
ConfigDirectory = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="DIR",
        help="Where the model's config.json is; without it, the file's own model: a directory, or a public one.",
        rich_help_panel=PANEL,
        show_default=False,
    ),
]
PromptTokens = Annotated[
    int | None,
    typer.Option(
        "--prompt-tokens",
        metavar="N",
        help="Of the request whose transfer is shown; without it 4096, or what fits.",
        rich_help_panel=PANEL,
        parser=whole_number(least=2, most=MOST_TOKENS),
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="For machines, instead of tables.", rich_help_panel=PANEL)]


def check_command(
    deployment: DeploymentFile,
    *,
    config: ConfigDirectory = None,
    prompt_tokens: PromptTokens = None,
    as_json: AsJson = False,
) -> None:
    """Whether a deployment fits, what its KV costs on the link; no device and no weights are needed."""
    read = read_deployment(deployment)
    shape = shape_of(read.model, where=f"{deployment}: ") if config is None else _shape_in(config, "config")
    # Function-local: the plan of a transfer loads numpy, and the families' tensors stand beside what computes with
    # them, which loads torch.
    from headrace.cli.check_report import rendered
    from headrace.deploy.check import check_deployment
    from headrace.deploy.transfer import plan_request
    from headrace.model.families import FAMILIES

    with naming(f"{deployment}: "):
        checked = check_deployment(read, shape, FAMILIES[shape.architecture].tensor_shapes)
    request = plan_request(read, checked.kv, checked.pools, prompt_tokens)
    sys.stdout.write(
        json.dumps({**asdict(checked), "request": asdict(request)}, indent=1) + "\n"
        if as_json
        else rendered(checked, request, str(deployment))
    )


def shape_of(model: str, *, where: str = "") -> ModelShape:
    """Of a directory, or a public model by its name; no weights are needed. Raises InputError, of the field `model`
    there."""
    directory = existing_path(model)
    if directory is not None:
        return _shape_in(directory, f"{where}model")
    with naming(where):
        config = known_config(model)
    return ModelShape.from_config(config)


def _shape_in(directory: Path, field: str) -> ModelShape:
    if not (directory / "config.json").is_file():
        raise InputError(field, f"must be a directory with a config.json, is {directory}")
    return read_shape(directory)
