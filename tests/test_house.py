"""The walls of the house: who may import whom, what stays pure, what loads nothing heavy, what is pinned.

`make lint` runs the import contract of pyproject.toml, which follows chains of imports; here stands the finer table of
direct imports. The checks take the source tree as an argument, so that each is also shown a tree that breaks it.
"""

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src"

EVERYTHING = ("errors", "protocol", "kvcache", "fabric", "messenger", "model", "engine")
ROOMS: dict[str, tuple[str, ...]] = {
    "errors": (),
    "protocol": ("errors",),
    "kvcache": ("errors",),
    "fabric": ("errors",),
    "messenger": (
        *("errors", "protocol", "fabric"),
        *("kvcache.layout", "kvcache.sharding", "kvcache.pages", "kvcache.prefix", "kvcache.reservation"),
    ),
    "model": ("errors", "kvcache"),
    "engine": ("errors", "kvcache", "model"),
    "roles": EVERYTHING,
    "gateway": ("errors", "protocol", "kvcache.layout", "kvcache.prefix"),
    "deploy": (  # who loads families hands their tensors in
        *("errors", "kvcache.layout", "kvcache.sharding", "messenger.aux", "messenger.plan"),
        *("model.shape", "model.shard", "roles.options"),
        *("protocol.messages", "gateway.budgets"),
    ),
    "bench": ("errors", "protocol"),
    "planner": (
        *("errors", "protocol", "bench.workload", "bench.records", "bench.metrics", "bench.verdict"),
        *("kvcache.layout", "kvcache.sharding", "kvcache.prefix", "kvcache.reservation"),
        *("messenger.plan", "messenger.leases"),
        *("engine.schedule", "engine.cost", "engine.requests", "engine.growth"),
        *("model.shape", "model.shard"),
        *("gateway.route", "gateway.forecast", "gateway.admit", "gateway.budgets", "gateway.generation"),
        "gateway.options",
    ),
    "connectors": ("errors", "protocol", "kvcache", "fabric", "messenger"),
    "testing": ("errors", "protocol", "kvcache", "fabric"),
    "cli": (*EVERYTHING, "roles", "gateway", "deploy", "bench", "planner", "connectors"),
    "__main__": ("cli",),
}
"""What each room may import from the others, inside headrace."""

NATIVE = {"fabric._native": "fabric", "fabric._limits": "fabric", "model._cpu": "model"}
"""The native modules, and the only room that may import each."""

PURE = (
    *("kvcache.layout", "kvcache.sharding", "kvcache.prefix", "messenger.plan", "messenger.life"),
    *("engine.cost", "engine.schedule"),
    *("gateway.route", "gateway.forecast", "gateway.admit", "model.shape"),
    *("planner.scenario", "planner.simulate"),
    *("deploy.check", "deploy.transfer", "bench.workload", "bench.metrics"),
)
IMPURE = {"asyncio", "socket", "threading", "time", "os", "torch"}
LIGHT_ROOMS = ("errors", "protocol", "gateway", "deploy", "bench", "planner")
"""Rooms of processes that load neither torch nor a native module."""

BANNED_ENDINGS = ("Manager", "Helper", "Util", "Utils", "Handler", "Processor", "Mixin")
BANNED_BEGINNINGS = ("Base", "Abstract")
BANNED_FILES = {"common", "misc", "util", "utils", "helpers"}


# ---- reading a tree --------------------------------------------------------------------------------------------


def module_files(src: Path) -> dict[str, Path]:
    """Module names inside headrace ("" is the package itself) and their files."""
    package = src / "headrace"
    files = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


def imported_names(path: Path) -> Iterator[str]:
    """Every dotted name that the file imports, anywhere in it; `from a import b` yields a.b."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def inner_imports(path: Path) -> Iterator[str]:
    for name in imported_names(path):
        if name.startswith("headrace."):
            yield name.removeprefix("headrace.")


def lies_in(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


# ---- the checks: each yields what is wrong with a tree ---------------------------------------------------------


def forbidden_imports(src: Path) -> Iterator[str]:
    for module, path in module_files(src).items():
        room = module.partition(".")[0]
        allowed = (*ROOMS.get(room, ()), room) if room else ()
        for name in inner_imports(path):
            if not any(lies_in(name, package) for package in allowed):
                yield f"{module or '__init__'} imports {name}"
            for native, owner in NATIVE.items():
                if lies_in(name, native) and room != owner:
                    yield f"{module} imports {native}"


def rooms_without_a_row(src: Path) -> Iterator[str]:
    yield from sorted({module.partition(".")[0] for module in module_files(src)} - {""} - set(ROOMS))


def impure_imports(src: Path) -> Iterator[str]:
    """Of the pure modules and of everything inside headrace that they import."""
    files = module_files(src)
    for pure in (module for module in PURE if module in files):
        seen: set[str] = set()
        queue = [pure]
        while queue:
            module = queue.pop()
            seen.add(module)
            names = set(imported_names(files[module]))
            yield from (f"{pure}: {module} imports {name}" for name in names if name.partition(".")[0] in IMPURE)
            inner = {
                known for name in inner_imports(files[module]) for known in files if known and lies_in(name, known)
            }
            queue += inner - seen


def bad_names(src: Path) -> Iterator[str]:
    for module, path in module_files(src).items():
        if module.rpartition(".")[2] in BANNED_FILES:
            yield f"{module} says nothing"
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                name = node.name.lstrip("_")
                if name.endswith(BANNED_ENDINGS) or re.match(rf"({'|'.join(BANNED_BEGINNINGS)})[A-Z]", name):
                    yield f"{module}.{node.name}"


CHECKS = {check.__name__: check for check in (forbidden_imports, rooms_without_a_row, impure_imports, bad_names)}

BROKEN_TREES = {
    "forbidden_imports": [
        ("kvcache/pages.py", "from headrace.fabric.interface import Fabric\n"),
        ("protocol/messages.py", "def f() -> None:\n    from headrace import messenger\n"),
        ("messenger/decoder.py", "import headrace.kvcache.pool\n"),
        ("messenger/decoder.py", "from headrace.fabric import _native\n"),
        ("fabric/native.py", "from headrace.testing import LoopbackFabric\n"),
        ("__init__.py", "from headrace.errors import InputError\n"),
    ],
    "rooms_without_a_row": [("attic/__init__.py", ""), ("cellar.py", "")],
    "impure_imports": [
        ("messenger/plan.py", "import time\n"),
        ("kvcache/prefix.py", "from os.path import join\n"),
        ("messenger/plan.py", "from headrace.kvcache.layout import KVLayout\n"),
    ],
    "bad_names": [
        ("fabric/base.py", "class BaseFabric: ...\n"),
        ("kvcache/utils.py", ""),
        ("engine/a.py", "class _PageManager: ...\n"),
    ],
}


@pytest.mark.parametrize("check", CHECKS)
def test_the_house_keeps_its_walls(check: str) -> None:
    assert list(CHECKS[check](SRC)) == []


@pytest.mark.parametrize(("check", "file", "text"), [(c, *tree) for c, trees in BROKEN_TREES.items() for tree in trees])
def test_a_broken_wall_is_seen(tmp_path: Path, check: str, file: str, text: str) -> None:
    package = tmp_path / "headrace"
    for name, content in {"kvcache/layout.py": "import threading\n" * (check == "impure_imports"), file: text}.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(content)
    assert list(CHECKS[check](tmp_path)) != []


def test_every_pure_module_of_a_built_room_exists() -> None:
    files = module_files(SRC)
    assert [pure for pure in PURE if pure.partition(".")[0] in files and pure not in files] == []


def test_the_import_contract_holds() -> None:
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-logo", "--no-cache"]
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    answer = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stdout + answer.stderr


# ---- what gets loaded ------------------------------------------------------------------------------------------

LOADS = """
import importlib, json, sys
found = []
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
    found += [f"{name} loads {heavy}" for heavy in json.loads(sys.argv[2]) if heavy in sys.modules]
print(json.dumps(found))
"""


def heavy_loads(modules: Iterable[str]) -> Any:
    """Imports the modules one after the other in a fresh process; the first to be named is the one to blame."""
    heavy = ["torch", *(f"headrace.{native}" for native in NATIVE)]
    command = [sys.executable, "-c", LOADS, json.dumps(list(modules)), json.dumps(heavy)]
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(answer.stdout)


def test_pure_modules_and_package_files_load_neither_torch_nor_native_code() -> None:
    files = module_files(SRC)
    packages = [module for module, path in files.items() if path.name == "__init__.py" and module != "testing"]
    modules = [*packages, *(pure for pure in PURE if pure in files)]
    assert heavy_loads(f"headrace.{module}".rstrip(".") for module in modules) == []


def test_gateway_deploy_bench_and_planner_load_neither_torch_nor_native_code() -> None:
    light = [module for module in module_files(SRC) if module.partition(".")[0] in LIGHT_ROOMS]
    assert heavy_loads(f"headrace.{module}" for module in light) == []


def test_a_module_that_loads_torch_is_seen() -> None:
    assert heavy_loads(["headrace.errors", "headrace.kvcache.pool"]) == ["headrace.kvcache.pool loads torch"]


# ---- what is pinned --------------------------------------------------------------------------------------------


def test_every_python_package_is_pinned_and_says_why_it_is_there() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    listed = re.findall(r'^    "([a-z][\w-]*)==([\w.]+)",[ ]*(#.*)?$', text, flags=re.MULTILINE)
    table = tomllib.loads(text)
    named = [*table["project"]["dependencies"], *table["project"]["optional-dependencies"]["dev"]]
    assert sorted(f"{name}=={version}" for name, version, _ in listed) == sorted(named)
    assert [name for name, _, reason in listed if not reason] == []


def test_the_isolated_build_and_the_environment_use_the_same_tools() -> None:
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert set(table["build-system"]["requires"]) <= set(table["project"]["optional-dependencies"]["dev"])
