"""Java: a check that it can run Spark, before Spark fails with pages of text, and its process, of
which this one descends.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from txnkv.errors import NotSupportedError

MINIMUM: Final = 17
NAME: Final = "java"
_VERSION: Final = re.compile(r'version "(\d+)(?:\.(\d+))?')


def require_java() -> int:
    """The major version of the Java that Spark will start.

    Raises:
        NotSupportedError: there is none, or it is older than 17.
    """
    home = os.environ.get("JAVA_HOME")
    program = os.path.join(home, "bin", "java") if home else shutil.which("java")
    if program is None or not os.path.exists(program):
        where = f"JAVA_HOME is {home}" if home else "there is no java on PATH"
        raise NotSupportedError(
            f"Spark needs Java {MINIMUM} or later, and {where}: install one, or set JAVA_HOME"
        )
    told = subprocess.run([program, "-version"], capture_output=True, text=True, check=False)
    found = _VERSION.search(told.stderr + told.stdout)
    major = int(found[2] if found and found[1] == "1" and found[2] else found[1]) if found else 0
    if major < MINIMUM:
        raise NotSupportedError(
            f"Spark needs Java {MINIMUM} or later, and {program} is "
            f"{major or 'of an unknown version'}: install a newer one, or set JAVA_HOME"
        )
    return major


# -- processes of this machine ---------------------------------------------------------


@dataclass(frozen=True)
class Process:
    """A running process.

    Attributes:
        started: when; with the pid it names a process that is never another later.
    """

    pid: int
    parent: int
    name: str
    started: str


def find(pid: int) -> Process | None:
    """A process that runs, or None."""
    proc = Path("/proc/self/stat")
    return _from_proc(pid) if proc.exists() else _from_ps(pid)


def _from_proc(pid: int) -> Process | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The name stands in parentheses and may hold anything, also parentheses.
    name = text[text.index("(") + 1 : text.rindex(")")]
    fields = text[text.rindex(")") + 2 :].split()
    if fields[0] in "ZX":
        return None
    return Process(pid, int(fields[1]), name, fields[19])


def _from_ps(pid: int) -> Process | None:
    # Each column is an option: of a list, BSDs take all behind the first = for a title.
    told = subprocess.run(
        ["ps", "-o", "ppid=", "-o", "stat=", "-o", "lstart=", "-o", "comm=", "-p", str(pid)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "LC_ALL": "C"},
    )
    fields = told.stdout.split(None, 7)
    if len(fields) < 8 or fields[1].startswith("Z"):
        return None
    return Process(pid, int(fields[0]), os.path.basename(fields[7].strip()), " ".join(fields[2:7]))


_INIT: Final = 1
_first_seen: Final[dict[int, Process | None]] = {}  # by the process that looked


def jvm() -> Process | None:
    """The nearest Java among the ancestors that this process had when it first asked; without one,
    its parent. None where it was an orphan by then: init's, which never ends.
    """
    here = os.getpid()
    if here not in _first_seen:
        _first_seen.clear()  # it was forked from who knew another
        _first_seen[here] = _nearest()
    return _first_seen[here]


def _nearest() -> Process | None:
    found = parent = find(os.getppid())
    while found is not None and found.name != NAME:
        found = find(found.parent) if found.parent else None
    return found or (None if parent is None or parent.pid == _INIT else parent)
