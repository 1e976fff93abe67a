"""Power loss while messages are sent: nothing that was acknowledged is ever gone."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tools.powerloss.disk import Disk
from tools.powerloss.examine import is_volatile
from tools.powerloss.explore import STORE, Loss, losses
from tools.powerloss.recording import Recording
from tools.powerloss.states import States
from tools.powerloss.topics import examine
from txnkv.coordinator.maintenance import Maintenance
from txnkv.transaction import instance

RUN = """
from tools.powerloss.topics import run
from txnkv.coordinator.maintenance import Maintenance
Maintenance.start = lambda self: None
run(root / "data" / "store")
"""
UNSYNCED = """
from txnkv.storage.sqlite_connection import WalFile
WalFile.sync = lambda self: None
"""
LATE = """
from txnkv.storage.sqlite_connection import WalFile

class Late:
    def __init__(self, wal):
        self.result = wal.sync
        self.cancel = lambda: False

WalFile.begin_sync = lambda self: Late(self)
"""


class _Losses:
    """A recorded run, and what is wrong after a loss in it."""

    def __init__(self, recording: Recording, plant: str, folder: Path) -> None:
        self._log = recording.run(plant + RUN)
        self._states = States(Disk(self._log, str(recording.root)), is_volatile)
        self._folder = folder

    def chosen(self, sample: int | None) -> Iterator[Loss]:
        (made,) = (position for position, line in self._log.marks() if line == "made")
        for loss in losses(self._log, range(3), sample=sample):
            if loss.cut > made:
                yield loss

    def problems(self, loss: Loss) -> list[str]:
        self._states.write(self._folder, loss.cut, loss.seed, loss.model)
        told = [line for position, line in self._log.marks() if position < loss.cut]
        found = [f"{loss}: {problem}" for problem in examine(self._folder / STORE, told)]
        shutil.rmtree(self._folder)
        return found


@pytest.mark.parametrize("plant", [False, True], ids=["sound", "planted fault"])
def test_topics_at_a_sample_of_moments(
    new_recording: Callable[[str], Recording],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    plant: bool,
) -> None:
    """The planted fault, acknowledging before status.db is durable, must be found out."""
    monkeypatch.setattr(Maintenance, "start", lambda self: None)
    run = _Losses(new_recording("run"), UNSYNCED if plant else "", tmp_path / "state")
    found: list[str] = []
    for loss in run.chosen(120 if plant else 60):
        found += run.problems(loss)
        if plant and found:
            break
    assert bool(found) == plant, "\n".join(found[:20])


def test_logs_that_are_ahead_of_their_offsets(
    new_recording: Callable[[str], Recording], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log is durable and the reservation is not: if nobody looked, `check` would tell. As
    the store is opened, all is well.
    """
    monkeypatch.setattr(Maintenance, "start", lambda self: None)
    run = _Losses(new_recording("run"), LATE, tmp_path / "state")
    ahead = 0
    for loss in run.chosen(300):
        with monkeypatch.context() as careless:
            careless.setattr(instance, "regain", lambda engine: None)
            found = run.problems(loss)
        if found:
            assert run.problems(loss) == []
            ahead += 1
        if ahead == 3:
            return
    assert ahead > 0
