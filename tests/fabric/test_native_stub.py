"""The hand-written _native.pyi and the built module agree, both ways: names, methods, properties, parameters."""

import importlib.util
from pathlib import Path

from stub_of_module import built_contents, stub_contents

import headrace.fabric
from headrace.fabric import _native

STUB = Path(headrace.fabric.__file__).with_name("_native.pyi")


def test_the_stub_names_exactly_the_modules_classes() -> None:
    stub, built = stub_contents(STUB), built_contents(_native)
    assert set(built.classes) == set(stub.classes)
    assert built.functions == stub.functions


def test_the_stub_names_exactly_the_methods_properties_and_parameters() -> None:
    stub, built = stub_contents(STUB), built_contents(_native)
    for name, members in stub.classes.items():
        assert members == built.classes[name], name
    assert sum(map(len, stub.classes.values())) >= 40  # an empty comparison proves nothing


def test_the_module_under_test_is_the_built_one() -> None:
    spec = importlib.util.find_spec("headrace.fabric._native")
    assert spec is not None and spec.origin is not None and spec.origin.endswith(".so")
