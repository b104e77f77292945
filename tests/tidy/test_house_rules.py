"""House rules, read from the source: what a review would otherwise have to look for every time."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
LINES_MAX, FUNCTION_LINES_MAX = 600, 70
# What is nobody's to import: package -> packages that it must not know, directly or through others of ours.
FORBIDDEN = {
    "forebay.ipc": {"forebay.kvstore", "forebay.workers", "forebay.models", "forebay.kernels", "torch", "numpy"},
    "forebay.kvstore": {"forebay.workers", "forebay.models", "forebay.kernels", "forebay.cli", "torch"},
    "forebay.tiers": {"forebay.workers", "forebay.models", "forebay.kernels", "forebay.cli", "torch"},
    "forebay.events": {"forebay.workers", "forebay.models", "forebay.kernels", "forebay.cli", "torch"},
    "forebay.scheduler": {"forebay.workers", "forebay.models", "forebay.kernels", "forebay.cli", "torch"},
    "forebay.kernels": {"forebay.workers", "forebay.models", "forebay.kvstore", "forebay.cli"},
    "forebay.models": {"forebay.workers", "forebay.scheduler", "forebay.kvstore", "forebay.cli"},
    "forebay.workers": {"forebay.cli"},
}
# Serialisers that run what they read, and code from text.
UNSAFE_MODULES = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
UNSAFE_CALLS = {"eval", "exec", "torch.load", "os.system", "yaml.load", "numpy.load", "np.load"}
# Spelt in pieces, so that this file isn't what it looks for.
WILDCARDS = ("0.0.0" + ".0", "tcp://" + "*", "shell=" + "True")
MACHINE_PATHS = re.compile(r"(?<![\w.])/(?:" + "|".join(("home", "root", "work", "Users", "scratch")) + r")/\w")


def tracked(*patterns: str) -> list[Path]:
    """Files of the repository, tracked or about to be; everything below if this is no git checkout."""
    command = ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard", *patterns]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode != 0:
        return [path for pattern in patterns for path in ROOT.rglob(pattern) if ".venv" not in path.parts]
    return [ROOT / line for line in found.stdout.splitlines() if (ROOT / line).is_file()]


SOURCES = tracked("*.py")
PACKAGE = [path for path in SOURCES if path.is_relative_to(ROOT / "forebay")]


def name_of(path: Path) -> str:
    """`forebay.kvstore.core` for its file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def shown(path: Path, node: ast.AST | None = None) -> str:
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def nodes(paths: list[Path]) -> Iterator[tuple[Path, ast.AST]]:
    for path in paths:
        for node in ast.walk(tree(path)):
            yield path, node


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def test_nothing_is_unpickled_and_no_text_is_run() -> None:
    wrong = []
    for path, node in nodes(SOURCES):
        if isinstance(node, ast.Import):
            names = {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {(node.module or "").split(".")[0]}
        else:
            names = set()
        if names & UNSAFE_MODULES:
            wrong.append(shown(path, node))
        if isinstance(node, ast.Call):
            called = dotted(node.func)
            if called in UNSAFE_CALLS or called.rsplit(".", 1)[-1] in ("recv_pyobj", "send_pyobj"):
                wrong.append(f"{shown(path, node)}: {called}")
    assert not wrong, wrong


def test_nothing_listens_to_everybody_and_no_shell_is_started() -> None:
    wrong = []
    for path, node in nodes(SOURCES):
        text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
        if any(wildcard in text for wildcard in WILDCARDS[:2]) and not path.is_relative_to(ROOT / "tests"):
            wrong.append(f"{shown(path, node)}: {text[:60]!r}")
        if isinstance(node, ast.keyword) and node.arg == "shell" and not _is_false(node.value):
            wrong.append(shown(path, node.value))
    assert not wrong, wrong


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def test_no_machine_is_named_by_its_paths() -> None:
    wrong = []
    for path in tracked("*.py", "*.md", "*.toml", "*.txt", "Makefile", ".ci/*"):
        if path == Path(__file__).resolve():
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if MACHINE_PATHS.search(line):
                wrong.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}")
    assert not wrong, wrong


def test_long_files_say_why_at_their_top() -> None:
    wrong = [
        shown(path) for path in SOURCES
        if len(lines := path.read_text(encoding="utf-8").splitlines()) > LINES_MAX
        and "one file because" not in "\n".join(lines[:20]).lower()
    ]  # fmt: skip
    assert not wrong, f"over {LINES_MAX} lines and no 'one file because ...' in the first 20: {wrong}"


def test_functions_are_short() -> None:
    wrong = [
        f"{shown(path, node)}: {node.name}, {length} lines"
        for path, node in nodes(SOURCES)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and (length := (node.end_lineno or node.lineno) - node.lineno + 1) > FUNCTION_LINES_MAX
    ]
    assert not wrong, wrong


def test_everything_public_has_a_docstring() -> None:
    wrong = []
    for path in PACKAGE:
        if tree(path).body and not ast.get_docstring(tree(path)):
            wrong.append(shown(path))
        wrong += [f"{shown(path, node)}: {node.name}" for node in _public(tree(path)) if not _documented(node)]
    assert not wrong, wrong


Documentable = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def _public(scope: ast.Module | ast.ClassDef) -> Iterator[Documentable]:
    # A method of a class with bases may do what its base says that it does.
    derived = isinstance(scope, ast.ClassDef) and bool(scope.bases)
    for node in scope.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and not node.name.startswith("_"):
            if isinstance(node, ast.ClassDef):
                yield node
                yield from _public(node)
            elif not derived:
                yield node


def _documented(node: Documentable) -> bool:
    if ast.get_docstring(node):
        return True
    if isinstance(node, ast.ClassDef):
        # A message whose fields are its whole story.
        return all(isinstance(child, (ast.AnnAssign, ast.Pass)) for child in node.body)
    names = {dotted(d.func) if isinstance(d, ast.Call) else dotted(d) for d in node.decorator_list}
    return bool(names & {"property", "cached_property", "overload", "functools.cached_property"})


def test_the_tests_environment_has_every_extra() -> None:
    """Tests skip what isn't installed, so an extra that got lost there would be missed by nobody."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    brought, left = set[str](), ["test"]
    while left:
        name = left.pop()
        brought.add(name)
        named = [Requirement(line) for line in extras[name]]
        left += [extra for line in named if line.name == project["name"] for extra in line.extras - brought]
    # Ray is tested by `make test-ray` alone: a cluster of it takes minutes to start, end and start again.
    assert brought == set(extras) - {"ray"}


def test_no_exception_is_swallowed_silently() -> None:
    wrong = []
    for path, node in nodes(SOURCES):
        if not isinstance(node, ast.ExceptHandler):
            continue
        broad = node.type is None or dotted(node.type) in ("Exception", "BaseException")
        if broad and all(isinstance(child, (ast.Pass, ast.Continue)) for child in node.body):
            wrong.append(shown(path, node))
    assert not wrong, wrong


def test_no_unfinished_work_is_marked() -> None:
    marks = re.compile(r"#.*\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK")) + r")\b")
    wrong = [
        f"{shown(path)}: {line.strip()[:80]}"
        for path in SOURCES
        for line in path.read_text(encoding="utf-8").splitlines()
        if marks.search(line)
    ]
    assert not wrong, wrong


def test_the_files_that_begin_first_are_there() -> None:
    named = (ROOT / "tests" / "long_files.txt").read_text(encoding="utf-8").splitlines()
    assert [name for name in named if not (ROOT / name).is_file()] == [] and len(set(named)) == len(named)


@pytest.mark.parametrize("package", FORBIDDEN)
def test_import_arrows_point_one_way(package: str) -> None:
    prefix = package + "."
    wrong = []
    for path in PACKAGE:
        name = name_of(path)
        if name != package and not name.startswith(prefix):
            continue
        for node in ast.walk(tree(path)):
            for imported in _imported(node):
                if any(imported == bad or imported.startswith(bad + ".") for bad in FORBIDDEN[package]):
                    wrong.append(f"{shown(path, node)}: {imported}")
    assert not wrong, wrong


def test_nothing_imports_the_workers_but_the_command_line() -> None:
    wrong = []
    for path in PACKAGE:
        name = name_of(path)
        # The router speaks the front end's HTTP, with its errors and its limits.
        if name.startswith(("forebay.workers", "forebay.cli", "forebay.testing", "forebay.router")):
            continue
        wrong += [
            shown(path, node) for node in ast.walk(tree(path))
            if any(imported.startswith("forebay.workers") for imported in _imported(node))
        ]  # fmt: skip
    assert not wrong, wrong


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
        return [node.module]
    return []


@pytest.mark.parametrize(
    "module",
    ["forebay.kvstore.daemon", "forebay.kvstore.client", "forebay.tiers.process", "forebay.tiers.fs.tier",
     "forebay.events.publisher", "forebay.scheduler.batch", "forebay.cli.main", "forebay.cli.stat", "forebay.cli.fsck"],
)  # fmt: skip
def test_the_store_and_its_tools_run_where_no_torch_is(module: str) -> None:
    # In a process of its own: what this one has imported already would hide what they import.
    code = (
        f"import importlib, sys; importlib.import_module({module!r}); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'fastapi', 'tokenizers')))"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
