"""How a process ended, in words. Pure."""

import signal


def described(status: int) -> str:
    """`status` as subprocess has it: negative for the number of the signal that ended it."""
    if status >= 0:
        return f"ended with status {status}"
    names = {number.value: number.name for number in signal.Signals}
    return f"was ended by {names.get(-status, f'signal {-status}')}"
