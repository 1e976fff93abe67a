"""The build: of what is there, and with a word for who has no compiler."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def set_up(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "setup.py", "-q", *map(str, words)],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_what_an_earlier_build_left_is_not_installed(tmp_path: Path) -> None:
    gone = tmp_path / "lib" / "txnkv" / "cli" / "of_an_earlier_version.py"
    gone.parent.mkdir(parents=True)
    gone.touch()
    ran = set_up("build_py", "--build-lib", tmp_path / "lib")
    assert ran.returncode == 0, ran.stderr
    assert (gone.parent / "load.py").exists()
    assert not gone.exists()


def test_without_a_compiler_it_says_what_to_install(tmp_path: Path) -> None:
    places = ("--build-lib", tmp_path / "lib", "--build-temp", tmp_path / "temp")
    ran = set_up("build_ext", *places, CC=str(tmp_path / "no-compiler"))
    assert ran.returncode == 1
    assert "apt-get install build-essential python3-dev" in ran.stderr
    assert "no-compiler" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_without_the_gil_it_says_which_python_to_use() -> None:
    code = (
        "import runpy, sys, sysconfig\n"
        "own = sysconfig.get_config_var\n"
        "sysconfig.get_config_var = lambda name: name == 'Py_GIL_DISABLED' or own(name)\n"
        "sys.argv = ['setup.py', '-q', 'build_ext']\n"
        "runpy.run_path('setup.py', run_name='__main__')\n"
    )
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert ran.returncode == 1
    assert 'without a "t" behind the version' in ran.stderr
    assert "Traceback" not in ran.stderr


def test_extensions_built_at_the_same_time_share_no_object(tmp_path: Path) -> None:
    """An object was written by both, and a wheel was linked with one that was not whole."""
    compiler = tmp_path / "cc"
    compiler.write_text(
        '#!/bin/sh\nfor word; do [ "$last" = -o ] && : > "$word" && echo "$word" >> "$0.made"\n'
        "last=$word; done\nexit 0\n"
    )
    compiler.chmod(0o755)
    places = ("--build-lib", tmp_path / "lib", "--build-temp", tmp_path / "temp")
    ran = set_up("build_ext", *places, CC=str(compiler), LDSHARED=f"{compiler} -shared")
    assert ran.returncode == 0, ran.stderr
    made = (tmp_path / "cc.made").read_text().split()
    assert sum(name.endswith("/rowset/bloom.o") for name in made) == 2
    assert len(set(made)) == len(made)


def test_what_one_version_builds_is_right_in_each_that_loads_it() -> None:
    """Of 3.12 and 3.13, formats with `#` fail in 3.11, and what returns None lets go of it."""
    sources = {path.name: path.read_text() for path in sorted(ROOT.glob("csrc/native/*.[ch]"))}
    assert [name for name, text in sources.items() if "<Python.h>" in text] == ["stable_abi.h"]
    assert not [name for name, text in sources.items() if re.search(r'"[^"\n]*[syz]#', text)]
