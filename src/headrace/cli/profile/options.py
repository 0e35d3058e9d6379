"""The options that only `headrace profile` has."""

from pathlib import Path
from typing import Annotated, Final

from headrace.cli.compare.options import number
from headrace.cli.options import option

PANEL = "Profile"
DEFAULT_OUT: Final = Path("profile.json")

Seconds = Annotated[
    float, option("--seconds", "N", "Of load, for each of both arms.", PANEL, parser=number(least=2, most=3600))
]
Out = Annotated[Path, option("--out", "FILE", "Where the profile is written.", PANEL)]
