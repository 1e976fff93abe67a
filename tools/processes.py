"""The processes of this machine, with what descends from them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass


@dataclass(frozen=True)
class Proc:
    """A process that is there."""

    pid: int
    parent: int
    command: str


def processes() -> dict[int, Proc]:
    """All of this machine, by their ids; those that are dead and not yet awaited left out."""
    # Each column is an option: of a list, BSDs take all behind the first = for a title.
    columns = ["-o", "pid=", "-o", "ppid=", "-o", "stat=", "-o", "command="]
    command = ["ps", "-A", "-ww", *columns]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {}
    for line in told.splitlines():
        fields = line.split(None, 3)
        if len(fields) == 4 and not fields[2].startswith("Z"):
            found[int(fields[0])] = Proc(int(fields[0]), int(fields[1]), fields[3])
    return found


def tree(root: int) -> list[Proc]:
    """A process and all that descend from it, parents first."""
    there = processes()
    found = [there[root]] if root in there else []
    for parent in found:  # it grows
        found += [each for each in there.values() if each.parent == parent.pid]
    return found


def send(signal_: int, some: Sequence[Proc]) -> None:
    """A signal to each; those that are gone are gone."""
    for each in some:
        with suppress(ProcessLookupError):
            os.kill(each.pid, signal_)
