"""Modules that are loaded with txnkv, and when: by their set, since times are the machine's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import txnkv

SLOW = {
    "asyncio", "click", "importlib.metadata", "numpy", "opentelemetry", "pandas", "polars",
    "prometheus_client", "pyarrow.compute", "pyarrow.dataset", "pyarrow.parquet", "pyspark", "rich",
}  # fmt: skip


def python(program: str, *args: object) -> str:
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, args)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout


def loaded_by(program: str, *args: object) -> set[str]:
    told = "\nimport sys, json; print(json.dumps(list(sys.modules)))"
    return set(json.loads(python(program + told, *args).splitlines()[-1]))


def test_importing_and_the_version_load_no_other_module() -> None:
    """Neither waits for anything: what they load beside Python's own start is counted."""
    bare = loaded_by("")
    assert loaded_by("import txnkv; txnkv.__version__") - bare == {"txnkv"}
    version = "import sys; sys.argv = ['txnkv', '--version']\nfrom txnkv.__main__ import main"
    assert loaded_by(version + "; main()") - bare == {"txnkv", "txnkv.__main__"}
    assert python(version + "; main()") == f"txnkv, version {txnkv.__version__}\n"


def test_opening_a_store_loads_what_that_takes(tmp_path: Path) -> None:
    program = "import sys, txnkv; txnkv.connect(sys.argv[1]).close()"
    numpy = {"numpy"}  # which pyarrow itself imports where it is installed
    assert not loaded_by(program, tmp_path / "store") & (SLOW - numpy)


def test_small_transactions_load_no_pandas(tmp_path: Path) -> None:
    program = """
import sys, txnkv
client = txnkv.connect(sys.argv[1])
table = client.create_table("t", txnkv.Schema({"id": "int64"}, primary_key=["id"]))
with client.transaction() as txn:
    txn.insert(table, {"id": 1})
assert table.get(1) == {"id": 1}
client.close()
"""
    assert not loaded_by(program, tmp_path / "store") & {"pandas", "pyarrow.compute"}


def test_commands_load_what_they_show_with(tmp_path: Path) -> None:
    def loaded(*words: object) -> set[str]:
        command = ["txnkv", *map(str, words)]
        program = f"import sys\nsys.argv = {command}\nfrom txnkv.cli import main\n"
        return loaded_by(program + "try: main()\nexcept SystemExit: sys.stdout.flush()")

    slow = SLOW - {"click", "numpy"}
    assert not loaded("--version") & (slow | {"pyarrow", "apsw", "lmdb"})
    store = tmp_path / "store"
    with txnkv.connect(store) as client:
        table = client.create_table("t", txnkv.Schema({"id": "int64", "s": "string"}, ["id"]))
        table.insert((1, "text"))
    shown = loaded("count", store, "t")
    assert not shown & {"rich", "asyncio", "duckdb", "pyarrow.parquet"}


@pytest.mark.parametrize(
    "first",
    [
        *("aio", "cli", "errors", "api"),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("client", "tables", "topics", "transaction")
        ),
    ],
)
def test_any_module_may_be_the_first(first: str) -> None:
    program = f"import txnkv.{first}, txnkv; print(txnkv.connect.__module__, txnkv.aio.__name__)"
    assert python(program) == "txnkv.remote.address txnkv.aio\n"


def test_names_are_listed_and_unknown_ones_refused() -> None:
    assert {"connect", "aio", "TxnkvError", "__version__"} <= set(dir(txnkv))
    assert all(getattr(txnkv, name) is not None for name in txnkv.__all__)
    assert (
        python("from txnkv import *; print(aio.connect.__module__)") == "txnkv.aio.async_client\n"
    )
    with pytest.raises(AttributeError, match="'txnkv' has no attribute 'conect'"):
        txnkv.conect  # noqa: B018
