"""The hand-written _limits.pyi and the built module agree, both ways: functions, classes, methods, parameters."""

from pathlib import Path

from stub_of_module import built_contents, stub_contents

import headrace.fabric
from headrace.fabric import _limits

STUB = Path(headrace.fabric.__file__).with_name("_limits.pyi")


def test_the_stub_names_exactly_what_the_module_has() -> None:
    stub, built = stub_contents(STUB), built_contents(_limits)
    assert built == stub
    assert set(stub.classes) == {"CopyLoop", "WakeLoop", "StreamLoop", "WriteLoop"}  # an empty one proves nothing


def test_the_module_under_test_is_the_built_one() -> None:
    assert _limits.__file__ is not None and _limits.__file__.endswith(".so")
