"""The hand-written _cpu.pyi and the built module agree, both ways: functions, classes, methods, parameters."""

import importlib.util
from pathlib import Path

from stub_of_module import built_contents, stub_contents

import headrace.model
from headrace.model import _cpu

STUB = Path(headrace.model.__file__).with_name("_cpu.pyi")


def test_the_stub_names_exactly_the_modules_functions_and_parameters() -> None:
    stub, built = stub_contents(STUB), built_contents(_cpu)
    assert stub.functions == built.functions
    assert len(stub.functions) >= 6  # an empty comparison proves nothing


def test_the_stub_names_exactly_the_classes_methods_properties_and_parameters() -> None:
    stub, built = stub_contents(STUB), built_contents(_cpu)
    assert stub.classes == built.classes
    assert len(stub.classes["Kernels"]) >= 10 and len(stub.classes["Step"]["__init__"] or ()) >= 10


def test_the_module_under_test_is_the_built_one() -> None:
    spec = importlib.util.find_spec("headrace.model._cpu")
    assert spec is not None and spec.origin is not None and spec.origin.endswith(".so")
