"""Power loss while messages are sent: nothing that was acknowledged is ever gone."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tools.powerloss.disk import Disk
from tools.powerloss.examine import is_volatile
from tools.powerloss.explore import STORE, losses
from tools.powerloss.recording import Recording
from tools.powerloss.states import States
from tools.powerloss.topics import examine
from txnkv.coordinator.maintenance import Maintenance

RUN = """
from tools.powerloss.topics import run
from txnkv.coordinator.maintenance import Maintenance
Maintenance.start = lambda self: None
run(root / "data" / "store")
"""


@pytest.mark.parametrize("plant", [False, True], ids=["sound", "planted fault"])
def test_topics_at_a_sample_of_moments(
    new_recording: Callable[[str], Recording],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    plant: bool,
) -> None:
    """A log that is durable before the offsets in it were given must be found out."""
    monkeypatch.setattr(Maintenance, "start", lambda self: None)
    fault = (
        "from txnkv.storage.status_db import StatusDatabase\n"
        "from txnkv.storage.wal import WalFile\n"
        "WalFile.sync = lambda self: None\n"
    )
    recording = new_recording("run")
    log = recording.run((fault if plant else "") + RUN)
    states = States(Disk(log, str(recording.root)), is_volatile)
    marks = log.marks()
    (made,) = (position for position, line in marks if line == "made")
    chosen = [loss for loss in losses(log, range(3), sample=120) if loss.cut > made]
    found = []
    for loss in chosen:
        folder = tmp_path / "state"
        states.write(folder, loss.cut, loss.seed, loss.model)
        told = [line for position, line in marks if position < loss.cut]
        found += [f"{loss}: {problem}" for problem in examine(folder / STORE, told)]
        shutil.rmtree(folder)
        if plant and found:
            break
    assert bool(found) == plant, "\n".join(found[:20])
