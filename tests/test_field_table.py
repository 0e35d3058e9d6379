"""The table of docs/field.md: every fault has a test that is there, or says what is missing."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parent
PAGE = TESTS.parent / "docs" / "field.md"
NAMED = re.compile(r"`([\w/]+\.py)::(test_\w+)`")


def rows(page: str) -> Iterator[tuple[str, str]]:
    """-> fault, and what is said of it."""
    for line in page.splitlines():
        if line.startswith("| ") and not line.startswith("| line |"):
            fault, said = line.strip("| ").split(" | ", 1)
            yield fault, said


def faults_of(page: str, tests: Path) -> Iterator[str]:
    """What is wrong with the table."""
    for fault, said in rows(page):
        named = NAMED.findall(said)
        if not named and not said.startswith("not yet: "):
            yield f"{fault}: no test"
        if said.count("::") != len(named):
            yield f"{fault}: a name that is none"
        for file, test in named:
            if not (tests / file).is_file() or test not in names_in(tests / file):
                yield f"{fault}: {file} has no {test}"


def names_in(file: Path) -> set[str]:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.parse(file.read_text()).body if isinstance(node, functions)}


def test_every_line_of_the_field_names_tests_that_exist_or_says_what_is_missing() -> None:
    page = PAGE.read_text()
    assert len(list(rows(page))) > 40
    assert list(faults_of(page, TESTS)) == []


def test_a_line_without_its_test_is_seen(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text("def test_one() -> None: ...\n")
    page = (
        "| a | `test_a.py::test_one` |\n| b | `test_a.py::test_two` |\n| c | `test_b.py::test_one` |\n| d | later |\n"
    )
    assert list(faults_of(page, tmp_path)) == [
        "b: test_a.py has no test_two",
        "c: test_b.py has no test_one",
        "d: no test",
    ]
