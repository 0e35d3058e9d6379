"""The hand-written _native.pyi and the built module agree, both ways: names, methods, properties, parameters."""

import ast
import importlib.util
import re
from pathlib import Path

import headrace.fabric
from headrace.fabric import _native

STUB = Path(headrace.fabric.__file__).with_name("_native.pyi")


def stub_classes() -> dict[str, ast.ClassDef]:
    tree = ast.parse(STUB.read_text())
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")}


def is_property(node: ast.FunctionDef) -> bool:
    return any(isinstance(mark, ast.Name) and mark.id == "property" for mark in node.decorator_list)


def stub_members(node: ast.ClassDef) -> dict[str, list[str] | None]:
    """Parameter names of each method, None for a property."""
    functions = [each for each in node.body if isinstance(each, ast.FunctionDef)]
    return {each.name: None if is_property(each) else [arg.arg for arg in each.args.args] for each in functions}


def built_members(kind: type) -> dict[str, list[str] | None]:
    found: dict[str, list[str] | None] = {}
    for name, member in vars(kind).items():
        if name.startswith("_") and name != "__init__":
            continue
        signatures = getattr(member, "__nb_signature__", None)
        if signatures is None:
            if hasattr(member, "fget"):
                found[name] = None  # else the slot of a class that Python cannot make
            continue
        assert len(signatures) == 1, f"{name} is overloaded"
        # nanobind's default values and types need not parse: "\\0" marks a default, types may name C++ classes.
        text = re.sub(r"[^\w(),:\[\]|. \->*=]", "", signatures[0][0])
        definition = ast.parse(f"{text}: ...").body[0]
        assert isinstance(definition, ast.FunctionDef)
        found[name] = [arg.arg for arg in definition.args.posonlyargs + definition.args.args]
    return found


def test_the_stub_names_exactly_the_modules_classes() -> None:
    built = {name for name in vars(_native) if not name.startswith("_")}
    assert built == set(stub_classes())


def test_the_stub_names_exactly_the_methods_properties_and_parameters() -> None:
    for name, node in stub_classes().items():
        stub, built = stub_members(node), built_members(getattr(_native, name))
        assert stub == built, name
        assert len(stub) >= 10  # an empty comparison proves nothing


def test_the_module_under_test_is_the_built_one() -> None:
    spec = importlib.util.find_spec("headrace.fabric._native")
    assert spec is not None and spec.origin is not None and spec.origin.endswith(".so")
