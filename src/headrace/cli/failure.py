"""How a process says that it cannot go on: one line, where the person or the supervisor reads it.

A person reads stderr. A supervisor names a file in the environment: of several processes that fail for the same
reason it passes one line on.
"""

import os
import sys
from pathlib import Path

ERROR_FILE = "HEADRACE_ERROR_FILE"
"""The environment variable. An instance's ranks inherit it; what fails there they tell their lead instead."""


def tell(text: str) -> None:
    line = " ".join(text.split())
    error_file = os.environ.get(ERROR_FILE)
    if error_file is None:
        sys.stderr.write(f"headrace: error: {line}\n")
    else:
        Path(error_file).write_text(line)
