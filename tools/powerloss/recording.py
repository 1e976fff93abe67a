"""Runs Python code in a process whose file operations are recorded."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Final

from tools.powerloss.log import Log, read

SOURCES: Final = [Path(__file__).with_name(name) for name in ("record.c", "record_log.c")]
ROOT: Final = Path(__file__).parent.parent.parent
MARKS: Final = "TXNKV_RECORD_MARKS"
_PATIENCE: Final = 600.0
_FLAGS: Final = ("-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared")


class RunFailedError(Exception):
    """The recorded process ended with an error; holds what it wrote to stderr."""


def unavailable() -> str | None:
    """Return why nothing can be recorded here; None when it can."""
    if not sys.platform.startswith("linux") or sys.maxsize < 1 << 32:
        return "recording file operations needs Linux on 64 bits"
    if shutil.which("cc") is None:
        return "recording file operations needs a C compiler, cc"
    return None


def build(folder: Path) -> Path:
    """Compiles the library that is preloaded, and returns its path."""
    library = folder / "record.so"
    subprocess.run(["cc", *_FLAGS, "-o", library, *SOURCES, "-ldl"], check=True)
    return library


class Recording:
    """A folder for one recorded run: the root that is recorded, the log, the marks."""

    def __init__(self, folder: Path, library: Path) -> None:
        """Makes what is needed.

        Args:
            folder: is made; nobody else uses it.
            library: of `build`.
        """
        folder.mkdir(parents=True)
        self.root = folder.resolve() / "root"
        self.root.mkdir()
        self.marks = folder.resolve() / "marks"
        self.marks.touch()
        self.log_path = folder.resolve() / "log"
        self._library = library.resolve()

    def run(self, code: str, *args: object) -> Log:
        """Runs code with `root` (a Path), `mark(line)` and `args` (texts), and reads the log.

        Raises:
            RunFailedError: it ended with an error.
        """
        result = subprocess.run(
            [sys.executable, "-c", _PRELUDE + textwrap.dedent(code), *map(str, args)],
            env={**os.environ, **self._environment()},
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
            timeout=_PATIENCE,
        )
        if result.returncode != 0:
            raise RunFailedError(f"it ended with {result.returncode}: {result.stderr}")
        return read(self.log_path)

    def _environment(self) -> dict[str, str]:
        return {
            "LD_PRELOAD": str(self._library),
            "TXNKV_RECORD_LOG": str(self.log_path),
            "TXNKV_RECORD_ROOT": str(self.root),
            MARKS: str(self.marks),
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        }


_PRELUDE: Final = """
import os, sys
from pathlib import Path
from tools.powerloss.recording import mark
root = Path(os.environ["TXNKV_RECORD_ROOT"])
args = sys.argv[1:]
"""


def mark(line: str) -> None:
    """Puts a line into the record, in a recorded process: what it says is true from now on."""
    descriptor = os.open(os.environ[MARKS], os.O_WRONLY | os.O_APPEND)
    try:
        os.write(descriptor, f"{line}\n".encode())
    finally:
        os.close(descriptor)
