"""Taste that matters, as tests: imports point down, files fit in the head, all is documented."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "txnkv"

# Lowest first. A module may import from its own layer and those below.
LAYERS = [
    {"errors"},
    {"core"},
    {"metrics"},
    {"storage"},
    {"coordinator"},
    {"tables", "topics"},
    {
        "transaction", "client", "remote", "aio", "api", "__init__",
    },
    {"server"},
    {"kafka"},
    {"spark", "cli", "__main__", "testing", "otel"},
]  # fmt: skip

C_LAYERS = ["common", "codec", "rowset", "memory", "log", "tablet"]


def _layer(module: str) -> int:
    return next(level for level, names in enumerate(LAYERS) if module in names)


def _modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def _imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("txnkv"):
            parts = node.module.split(".")
            if len(parts) > 1:
                found.add(parts[1])
            else:
                found |= {alias.name for alias in node.names}
    return {
        name for name in found if (PACKAGE / name).exists() or (PACKAGE / f"{name}.py").exists()
    }


@pytest.mark.parametrize("path", _modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    for other in _imported(path):
        assert _layer(other) <= _layer(own), f"{own} imports {other}, which stands above it"


def test_coordinator_knows_no_tables_and_no_topics() -> None:
    for path in (PACKAGE / "coordinator").glob("*.py"):
        assert not {"tables", "topics"} & _imported(path), path.name


def test_tables_and_topics_know_nothing_of_each_other() -> None:
    for own, other in (("tables", "topics"), ("topics", "tables")):
        for path in (PACKAGE / own).glob("*.py"):
            assert other not in _imported(path), path.name


def test_c_includes_point_down() -> None:
    for path in sorted((ROOT / "csrc").glob("*/*.[ch]")):
        folder = path.parent.name
        if folder not in C_LAYERS:
            continue
        for included in re.findall(r'#include "(\w+)/', path.read_text()):
            assert C_LAYERS.index(included) <= C_LAYERS.index(folder), path


def test_c_core_knows_no_python_and_no_databases() -> None:
    for path in (ROOT / "csrc").glob("*/*.[ch]"):
        others = "lmdb|sqlite" if path.parent.name == "native" else "Python|lmdb|sqlite"
        assert not re.search(rf"#include <({others})", path.read_text()), path


def test_locks_are_made_in_one_place() -> None:
    """Those of another place are not free in a forked child, and nobody watches their order."""
    made = re.compile(
        r"threading\.(Lock|RLock|Condition|Event|Semaphore|BoundedSemaphore|Barrier)\(|"
        r"from threading import|import.* cached_property|functools\.cached_property"
    )
    for path in _modules():
        if path != PACKAGE / "storage" / "locks.py":
            found = made.search(path.read_text())
            assert found is None, f"{path}: {found}: take it from txnkv.storage.locks"


@pytest.mark.parametrize("path", _modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_fit_in_the_head(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 600


def test_public_names_are_documented() -> None:
    import txnkv

    for name in txnkv.__all__:
        assert getattr(txnkv, name).__doc__, name
    for kind in (txnkv.Client, txnkv.Transaction, txnkv.Session, txnkv.Table, txnkv.Scan):
        for name, member in vars(kind).items():
            if callable(member) and not name.startswith("_"):
                assert member.__doc__, f"{kind.__name__}.{name}"


def test_modules_begin_with_what_they_hold() -> None:
    for path in _modules():
        assert ast.get_docstring(ast.parse(path.read_text())), path


def test_every_error_of_the_contract_is_there() -> None:
    import txnkv

    retriable = {"TransactionConflictError", "TransactionLockedError", "UnavailableError"}
    retriable.add("SchemaChangedError")  # a TransactionConflictError
    for name in txnkv.__all__:
        if name.endswith("Error") and name != "RowError":
            error = getattr(txnkv, name)
            assert issubclass(error, txnkv.TxnkvError)
            assert error.retriable == (name in retriable), name
    assert issubclass(txnkv.TransactionTimedOutError, TimeoutError)


def test_files_of_a_store_that_may_not_be_seen_are_not_taken_for_gone() -> None:
    """`Path.exists` and its like say so since Python 3.14; `storage.is_there` raises."""
    for path in sorted(PACKAGE.glob("storage/*.py")) + sorted(PACKAGE.glob("topics/**/*.py")):
        assert not re.search(r"(?<!os\.path)\.exists\(", path.read_text()), path
