"""Processes of this machine: which one started which, and whether one is still the same."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path


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
    told = subprocess.run(
        ["ps", "-o", "ppid=,stat=,lstart=,comm=", "-p", str(pid)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "LC_ALL": "C"},
    )
    fields = told.stdout.split(None, 7)
    if len(fields) < 8 or fields[1].startswith("Z"):
        return None
    return Process(pid, int(fields[0]), os.path.basename(fields[7].strip()), " ".join(fields[2:7]))


def jvm() -> Process | None:
    """The nearest Java among the ancestors of this process; without one, its parent."""
    found = parent = find(os.getppid())
    while found is not None and found.name != "java":
        found = find(found.parent) if found.parent > 1 else None
    return found or parent
