"""The command line as a whole: it runs a command, and says in one line on stderr how that failed.

Exit status: 0, 1 for a failure, 2 for what the person can put right, 130 for Ctrl-C before anything ran. A traceback is
shown where the mistake is ours, or at --log-level debug.
"""

import gc
import logging
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import typer

from headrace.cli.commands import app
from headrace.cli.failure import tell
from headrace.cli.supervisor import ChildEnded
from headrace.errors import HeadraceError, InputError


def main() -> None:
    """The command `headrace`."""
    status = run(sys.argv[1:])
    # Once is enough: the interpreter would look for rings through all that torch has made several times more before it
    # ends, half of the 0.5 s of CPU that its end takes, and a `serve` ends several processes at once.
    gc.collect()
    gc.freeze()
    sys.exit(status)


def run(arguments: Sequence[str]) -> int:
    """-> the exit status."""
    try:
        status: int | None = app(arguments, standalone_mode=False, prog_name="headrace")
    except typer.TyperException as error:
        return _usage_error(error)
    except (HeadraceError, OSError, ExceptionGroup) as error:
        cause = _first_expected(error)
        if cause is None:
            raise
        if logging.getLogger("headrace").isEnabledFor(logging.DEBUG):
            logging.getLogger(__name__).debug("the error in full", exc_info=error)
        tell(_as_option(cause))
        return cause.status if isinstance(cause, ChildEnded) else 2 if isinstance(cause, InputError) else 1
    return status or 0


def _usage_error(error: typer.TyperException) -> int:
    if text := _usage_text(error):  # else `headrace` alone: its help was shown
        tell(text)
    return 2


def _usage_text(error: typer.TyperException) -> str:
    if isinstance(error, typer.BadParameter) and error.param is not None:
        return f"{error.param.opts[0]}: {error.message or 'must be given'}"  # without a message it is missing
    text = error.message[:1].lower() + error.message[1:].rstrip(".")
    nearest = getattr(error, "possibilities", None)  # of an unknown option, whose class typer keeps to itself
    return f"{text}; did you mean {' or '.join(nearest)}?" if nearest else text


def _first_expected(error: Exception) -> HeadraceError | OSError | None:
    """What a person is told. None where anything in it is our own mistake, whose traceback is wanted."""
    leaves = list(_leaves(error))
    expected = [leaf for leaf in leaves if isinstance(leaf, HeadraceError | OSError)]
    return expected[0] if len(expected) == len(leaves) else None


def _leaves(error: Exception) -> Iterator[Exception]:
    if isinstance(error, ExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def _as_option(error: HeadraceError | OSError) -> str:
    """A field of the same name as an option is shown as the option."""
    text = str(error)
    if isinstance(error, InputError) and (option := _option_names().get(error.field)):
        return option + text.removeprefix(error.field)
    return text


def _option_names() -> dict[str, str]:
    names: dict[str, str] = {}
    commands: list[Any] = [typer.main.get_command(app)]
    while commands:
        command = commands.pop()
        names |= {param.name: param.opts[0] for param in command.params}
        commands += getattr(command, "commands", {}).values()
    return names
