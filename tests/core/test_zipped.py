"""txnkv out of a zip file, from which the system loads no native code by itself."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

PROGRAM = """
import sys, tempfile
sys.path.insert(0, sys.argv[1])
import txnkv
with txnkv.connect(sys.argv[2]) as client:
    table = client.create_table("t", txnkv.Schema({"id": "int64"}, primary_key=["id"]))
    with client.transaction() as txn:
        txn.insert(table, {"id": 1})
    print(txnkv.__file__, table.get(1))
"""


def run(archive: Path, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, archive, tmp_path / "store"],
        env=os.environ | {"TMPDIR": str(scratch)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not list(scratch.iterdir())
    return done


def test_it_runs_and_leaves_no_file(packed: Path, tmp_path: Path) -> None:
    done = run(packed, tmp_path)
    assert done.stdout == f"{packed}/txnkv/__init__.py {{'id': 1}}\n", done.stderr


def test_one_of_another_platform_says_what_to_do(packed: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.zip"
    with zipfile.ZipFile(packed) as source, zipfile.ZipFile(other, "w") as target:
        for name in source.namelist():
            base, dot, _ = name.partition(".")
            renamed = f"{base}{dot}cp311-win_amd64.pyd" if name.endswith(".so") else name
            target.writestr(renamed, source.read(name))
    done = run(other, tmp_path)
    assert done.returncode == 1
    told = done.stderr.splitlines()[-1]
    assert told.startswith(f"ImportError: {other} has no C core for this Python on this platform:")


def test_a_checkout_that_is_not_built_says_so(packed: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    with zipfile.ZipFile(packed) as source:
        source.extractall(plain, [name for name in source.namelist() if name.endswith(".py")])
    done = run(plain, tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "ImportError: the C core of txnkv is not built: pip install ."
    )
