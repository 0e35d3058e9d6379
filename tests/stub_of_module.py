"""A hand-written .pyi and the native module that was built, each as names and parameters, so that they can be compared.

Both sides in one form: classes with their members, functions beside them; a property is None.
"""

import ast
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

Members = dict[str, list[str] | None]
"""Parameter names of each function or method, None for a property."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    functions: Members
    classes: dict[str, Members]


def stub_contents(path: Path) -> Contents:
    body = [node for node in ast.parse(path.read_text()).body if not getattr(node, "name", "_").startswith("_")]
    classes = {node.name: _stub_members(node.body, "self") for node in body if isinstance(node, ast.ClassDef)}
    return Contents(functions=_stub_members(body), classes=classes)


def built_contents(module: ModuleType) -> Contents:
    public = {name: member for name, member in vars(module).items() if not name.startswith("_")}
    classes = {name: _built_members(vars(member)) for name, member in public.items() if isinstance(member, type)}
    return Contents(functions=_built_members({k: v for k, v in public.items() if k not in classes}), classes=classes)


def _stub_members(body: Iterable[ast.stmt], *first: str) -> Members:
    functions = [node for node in body if isinstance(node, ast.FunctionDef)]
    assert all(_positional(node)[: len(first)] == [*first] for node in functions)
    return {node.name: None if _is_property(node) else _parameters(node) for node in functions}


def _built_members(members: dict[str, Callable[..., object]]) -> Members:
    found: Members = {}
    for name, member in members.items():
        if name.startswith("_") and name != "__init__":
            continue
        signatures = getattr(member, "__nb_signature__", None)
        if signatures is None:
            if hasattr(member, "fget"):
                found[name] = None  # else the slot of a class that Python cannot make
            continue
        assert len(signatures) == 1, f"{name} is overloaded"
        definition = ast.parse(f"{_parsable(signatures[0][0])}: ...").body[0]
        assert isinstance(definition, ast.FunctionDef)
        found[name] = _parameters(definition)
    return found


def _parsable(signature: str) -> str:
    """nanobind's types and defaults need not parse: what stands in brackets goes, and whatever marks a default."""
    while (without := re.sub(r"\[[^\[\]]*\]", "", signature)) != signature:
        signature = without
    return re.sub(r"[^\w(),:|. \->*=]", "", signature)


def _parameters(node: ast.FunctionDef) -> list[str]:
    """Keyword-only ones behind a star."""
    keywords = [arg.arg for arg in node.args.kwonlyargs]
    return _positional(node) + (["*", *keywords] if keywords else [])


def _positional(node: ast.FunctionDef) -> list[str]:
    return [arg.arg for arg in node.args.posonlyargs + node.args.args]


def _is_property(node: ast.FunctionDef) -> bool:
    return any(isinstance(mark, ast.Name) and mark.id == "property" for mark in node.decorator_list)
