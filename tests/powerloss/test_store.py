"""Power loss while a store is written: nothing that was acknowledged is ever gone.

A run is recorded, and the store is opened in states that a disk may be in when the power goes:
at any sync boundary, with what was not synced there, gone or torn. See tools/powerloss/disk.py
for what is taken to be possible.
"""

from __future__ import annotations

import filecmp
from collections.abc import Callable
from pathlib import Path

import pytest

from tools.powerloss.disk import MODELS, Disk
from tools.powerloss.examine import is_volatile
from tools.powerloss.explore import STORE, Loss, explore, losses, record
from tools.powerloss.recording import Recording
from tools.powerloss.states import States
from tools.powerloss.workload import INSERT, Workload

Recordings = Callable[[str], Recording]

OPERATIONS = (INSERT,)


def found(recording: Recording, workload: Workload, chosen: list[Loss]) -> str:
    """All findings, a line each."""
    return "\n".join(map(str, explore(recording, workload, chosen)))


def test_store_at_a_sample_of_moments(new_recording: Recordings) -> None:
    recording = new_recording("run")
    workload = Workload(operations=OPERATIONS, transactions=8)
    log = record(recording, workload)
    assert found(recording, workload, losses(log, range(3), sample=120)) == ""


def test_creation_at_every_moment(new_recording: Recordings) -> None:
    """A store or a table of which nobody was told yet may be there or not, never be in the way."""
    recording = new_recording("run")
    workload = Workload(operations=OPERATIONS, writers=1, transactions=1, bulk_rows=40)
    log = record(recording, workload)
    store = next(position for position, line in log.marks() if line == "store")
    early = [Loss(cut, cut, "strict") for cut in range(0, store + 10)]
    assert found(recording, workload, early) == ""


def test_record_of_a_store_is_complete(new_recording: Recordings, tmp_path: Path) -> None:
    """Else a later way of writing, as through a mapping, would go untested in silence."""
    recording = new_recording("run")
    workload = Workload(operations=OPERATIONS, writers=2, processes=1, transactions=3)
    log = record(recording, workload)
    states = States(Disk(log, str(recording.root)), is_volatile)
    states.write(tmp_path / "all", log.length, 0, "strict", "most")

    def files(root: Path) -> list[str]:
        paths = (str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())
        return sorted(path for path in paths if not is_volatile(path))

    names = files(recording.root)
    assert str(STORE / "status.db") in names
    assert files(tmp_path / "all") == names
    assert filecmp.cmpfiles(tmp_path / "all", recording.root, names, shallow=False)[0] == names


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_store_at_every_boundary(seed: int, new_recording: Recordings) -> None:
    recording = new_recording("run")
    workload = Workload(seed, operations=OPERATIONS, processes=2, transactions=10)
    log = record(recording, workload)
    assert found(recording, workload, losses(log, range(2), MODELS)) == ""
