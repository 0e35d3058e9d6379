"""The whole set-up of a checkout, in four stages: system packages, virtual environment, Python packages, native build.

Owns `.venv` and `build/setup.log`. Each stage leaves a stamp in `.venv/.headrace`: a hash of everything that it depends
on. A stage whose stamp agrees is passed over, so a second run takes a fraction of a second, and switching branches
rebuilds only what differs. Standard library only: it runs before anything is installed. Knows nothing of tests.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / "bin" / "python"
STAMPS = VENV / ".headrace"
LOG = ROOT / "build" / "setup.log"
CONSTRAINTS = ROOT / "tools" / "constraints.txt"
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"

HEADERS = {"rdma/fabric.h": "libfabric-dev", "xxhash.h": "libxxhash-dev"}
"""What the native sources include from the system, and the Debian package that has it."""

SIGN_OF_LIFE_S = 15.0


def fail(message: str) -> NoReturn:
    print(f"setup: {message}", file=sys.stderr)
    sys.exit(1)


def last_lines(num_lines: int) -> str:
    return "\n".join(LOG.read_text(errors="replace").splitlines()[-num_lines:])


def run(command: Sequence[str], *, check: bool = True, environment: Mapping[str, str] | None = None) -> None:
    """Run with the output in the log; say every 15 s that it still goes on; show the log's end when it fails."""
    with LOG.open("a") as log:
        print(f"\n$ {' '.join(command)}", file=log, flush=True)
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **(environment or {})}
        )
        began = time.monotonic()
        while True:
            try:
                code = process.wait(timeout=SIGN_OF_LIFE_S)
                break
            except subprocess.TimeoutExpired:
                print(f"         ... {time.monotonic() - began:.0f} s: {last_lines(1).strip()[:90]}", flush=True)
    if code and check:
        print(last_lines(40), file=sys.stderr)
        fail(f"'{' '.join(command)}' ended with {code}; all of its output is in {LOG.relative_to(ROOT)}")


# ---- system packages -------------------------------------------------------------------------------------------


def has_compiler(compiler: str) -> bool:
    probe = [compiler, "-std=c++20", "-fsyntax-only", "-x", "c++", os.devnull]
    return shutil.which(compiler) is not None and subprocess.run(probe, capture_output=True).returncode == 0


def has_header(compiler: str, header: str) -> bool:
    """Asks the compiler, which knows CPATH and multi-arch folders; without one, looks where Debian puts headers."""
    if shutil.which(compiler) is None:
        return (Path("/usr/include") / header).exists()
    probe = [compiler, "-E", "-x", "c++", "-"]
    return subprocess.run(probe, input=f"#include <{header}>\n".encode(), capture_output=True).returncode == 0


def missing_packages() -> list[str]:
    compiler = os.environ.get("CXX", "g++").split()[0]
    missing = [] if has_compiler(compiler) else ["g++"]
    missing += [package for header, package in HEADERS.items() if not has_header(compiler, header)]
    if shutil.which("pkg-config") is None:
        missing.append("pkg-config")
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        missing.append(f"python{VERSION}-dev")
    if sys.prefix == sys.base_prefix and not can_make_venv():
        missing.append(f"python{VERSION}-venv")
    return missing


def can_make_venv() -> bool:
    # Debian ships venv without ensurepip, and then a half-made environment: look for ensurepip itself.
    return subprocess.run([sys.executable, "-c", "import ensurepip, venv"], capture_output=True).returncode == 0


def install_system_packages(missing: list[str]) -> None:
    names = " ".join(missing)
    if shutil.which("apt-get") is None:
        fail(f"this needs what Debian calls {names}, and there is no apt-get here: install them, then run this again")
    prefix: list[str] = []
    if os.geteuid() != 0:
        if shutil.which("sudo") is None:
            fail(f"neither root nor sudo here: ask somebody for 'apt-get install {names}', then run this again")
        prefix = ["sudo"]
    apt = [*prefix, "env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-q"]
    # A stale or foreign package list is no reason to stop: the install itself decides.
    run([*apt, "update"], check=False)
    run([*apt, "install", "-y", "--no-install-recommends", *missing])
    if still := missing_packages():
        fail(f"apt-get installed {names}, and yet {' '.join(still)} cannot be used by {sys.executable} or the compiler")


# ---- what each stage depends on --------------------------------------------------------------------------------


def project() -> dict[str, Any]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        return tomllib.load(file)


def requirements(table: Mapping[str, Any]) -> list[str]:
    return [*table["project"]["dependencies"], *table["project"]["optional-dependencies"]["dev"]]


def native_sources() -> Iterable[Path]:
    yield ROOT / "CMakeLists.txt"
    yield from sorted(path for path in (ROOT / "src").glob("headrace/**/native/**/*") if path.is_file())


def packages_key(table: Mapping[str, Any]) -> str:
    return digest(VERSION, json.dumps(requirements(table)), CONSTRAINTS.read_text())


def native_key(table: Mapping[str, Any]) -> str:
    # Of pyproject only what steers the build: a new lint rule must not compile C++ again.
    steering = {name: table["project"].get(name) for name in ("name", "version", "scripts")}
    parts = [packages_key(table), json.dumps([table["build-system"], table["tool"]["scikit-build"], steering])]
    for path in native_sources():
        parts += [str(path.relative_to(ROOT)), path.read_text()]
    return digest(*parts)


def digest(*parts: str) -> str:
    state = hashlib.sha256()
    for part in parts:
        state.update(part.encode() + b"\0")
    return state.hexdigest()


# ---- stages ----------------------------------------------------------------------------------------------------


def is_stamped(name: str, key: str) -> bool:
    stamp = STAMPS / name
    return stamp.exists() and stamp.read_text() == key


def stage(name: str, title: str, key: str, act: Callable[[], None]) -> None:
    if is_stamped(name, key):
        return
    (STAMPS / name).unlink(missing_ok=True)  # a stage that is interrupted is done again
    print(f"setup: {title} ...", flush=True)
    began = time.monotonic()
    act()
    STAMPS.mkdir(exist_ok=True)
    (STAMPS / name).write_text(key)
    print(f"setup: {title}: {time.monotonic() - began:.1f} s", flush=True)


def make_venv() -> None:
    if not is_usable_venv():
        run([sys.executable, "-m", "venv", "--clear", str(VENV)])


def is_usable_venv() -> bool:
    """An environment that somebody made by hand is kept when its Python is the chosen one and has pip."""
    if not VENV_PYTHON.exists():
        return False
    probe = [str(VENV_PYTHON), "-c", "import pip, sys; print('%d.%d' % sys.version_info[:2])"]
    answer = subprocess.run(probe, capture_output=True, text=True)
    return answer.returncode == 0 and answer.stdout.strip() == VERSION


def install_python_packages(table: Mapping[str, Any]) -> None:
    listed = ROOT / "build" / "requirements.txt"
    listed.write_text("\n".join(requirements(table)) + "\n")
    run([*pip_install(), "--constraint", str(CONSTRAINTS), "--requirement", str(listed)])


def build_native() -> None:
    # cmake and ninja come from the environment where the system has none.
    path = f"{VENV / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    run([*pip_install(), "--no-build-isolation", "--no-deps", "--editable", "."], environment={"PATH": path})


def pip_install() -> list[str]:
    quiet = ["--disable-pip-version-check", "--no-input", "--progress-bar", "off"]
    # Not compiled: a minute of one core for 12,700 files, of which a tenth is ever imported.
    return [str(VENV_PYTHON), "-m", "pip", "install", "--no-compile", *quiet]


def main() -> None:
    began = time.monotonic()
    LOG.parent.mkdir(exist_ok=True)
    LOG.write_text("")
    if missing := missing_packages():
        print(f"setup: system packages: {' '.join(missing)} ...", flush=True)
        install_system_packages(missing)
        print(f"setup: system packages: {time.monotonic() - began:.1f} s", flush=True)
    table = project()
    if not VENV_PYTHON.exists():  # removed, or made of a Python that is gone
        shutil.rmtree(STAMPS, ignore_errors=True)
    stage("venv", f"virtual environment of Python {VERSION}", VERSION, make_venv)
    title = "Python packages (torch is the large one: 0.2 GB as a CPU build, several GB with CUDA)"
    stage("packages", title, packages_key(table), lambda: install_python_packages(table))
    stage("native", "native module", native_key(table), build_native)
    print(f"setup: ready ({time.monotonic() - began:.1f} s)", flush=True)


if __name__ == "__main__":
    main()
