"""Power loss while a store is written: nothing that was acknowledged is ever gone.

A run is recorded, and the store is opened in states that a disk may be in when the power goes:
at any sync boundary, with what was not synced there, gone or torn. See tools/powerloss/disk.py
for what is taken to be possible.
"""

from __future__ import annotations

import filecmp
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest

from tools.powerloss.disk import Disk
from tools.powerloss.examine import Promised, is_volatile
from tools.powerloss.explore import STORE, Loss, explore, losses, record, record_recovery
from tools.powerloss.recording import Recording
from tools.powerloss.states import States
from tools.powerloss.workload import TABLES, Workload

Recordings = Callable[[str], Recording]


def found(
    recording: Recording,
    workload: Workload,
    chosen: list[Loss],
    promised: Promised | None = None,
) -> str:
    """All findings, a line each."""
    return "\n".join(map(str, explore(recording, workload, chosen, promised=promised)))


def test_store_at_a_sample_of_moments(new_recording: Recordings) -> None:
    recording = new_recording("run")
    workload = Workload(pipelines=1, transactions=8)
    log = record(recording, workload)
    assert found(recording, workload, losses(log, range(3), sample=20)) == ""


def test_creation_at_every_moment(new_recording: Recordings) -> None:
    """A store or a table of which nobody was told yet may be there or not, never be in the way."""
    recording = new_recording("run")
    workload = Workload(writers=1, transactions=1, bulk_rows=40)
    log = record(recording, workload)
    store = next(position for position, line in log.marks() if line == "store")
    early = [Loss(cut, cut, "strict") for cut in range(0, store + 10, 3)]
    assert found(recording, workload, early) == ""


def test_record_of_a_store_is_complete(new_recording: Recordings, tmp_path: Path) -> None:
    """Else a later way of writing, as through a mapping, would go untested in silence."""
    recording = new_recording("run")
    workload = Workload(writers=2, processes=1, transactions=3)
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


PLANTS = {
    "commits are told before the sync": """
        from txnkv.storage.sqlite_connection import WalFile
        WalFile.sync = lambda self: None
        """,
    "readers do not wait for the sync": """
        import time
        from txnkv.storage.runtime import Runtime
        from txnkv.storage.sqlite_connection import WalFile
        sync = WalFile.sync
        def sync_late(wal):
            time.sleep(0.05)  # a reader is to come in between
            sync(wal)
        WalFile.sync = sync_late
        Runtime.all_synced = lambda runtime: True
        """,
    "row sets are not synced": """
        import lmdb
        real = lmdb.open
        lmdb.open = lambda *args, **options: real(*args, **(options | {"sync": False}))
        """,
    "names of tablets are not synced": """
        from txnkv.storage import lmdb_open
        lmdb_open.sync_directory = lambda path: None
        """,
}


@pytest.mark.parametrize(
    "plant",
    [
        pytest.param(plant, id=name, marks=[] if "before the sync" in name else [pytest.mark.slow])
        for name, plant in PLANTS.items()
    ],
)
def test_planted_fault_is_found(plant: str, new_recording: Recordings) -> None:
    """Else all the tests of this file would show nothing."""
    assert any(is_found(plant, new_recording(f"run {number}"), number) for number in range(6))


def is_found(plant: str, recording: Recording, seed: int) -> bool:
    """By this run; whether a reader comes in at the right moment is a matter of chance."""
    workload = Workload(seed, writers=1, processes=1, transactions=6, upkeep=2)
    log = record(recording, workload, plant)
    told: dict[str, int] = {}
    for position, line in log.marks():
        word, _, transaction = line.partition(" ")
        if word in ("done", "saw"):
            told.setdefault(transaction, position + 1)
    chosen = [Loss(cut, number, "strict") for cut in told.values() for number in range(4)]
    return bool(explore(recording, workload, chosen, enough=1))


def losses_in_recovery(
    new_recording: Recordings, scratch: Path, *, states: int, sample: int
) -> Iterator[str]:
    """Yield problems after the power went a second time, while the store opened after a first."""
    first = new_recording("first")
    workload = Workload(processes=1, transactions=6, upkeep=2)
    log = record(first, workload)
    store = next(position for position, line in log.marks() if line == f"table {TABLES[-1]}")
    late = [loss for loss in losses(log, [0]) if loss.cut > store]
    for loss in Random(states).sample(late, states):
        name = f"{loss.cut}-{loss.model}"
        States(Disk(log, str(first.root)), is_volatile).write(
            scratch / name, loss.cut, loss.seed, loss.model
        )
        second = new_recording(f"second-{name}")
        again = record_recovery(second, scratch / name, workload)
        put = next(position for position, line in again.marks() if line == "put")
        chosen = [each for each in losses(again, range(3)) if each.cut > put]
        chosen = Random(0).sample(chosen, min(sample, len(chosen)))
        promised = Promised.by(log.marks(), loss.cut)
        yield found(second, workload, sorted(chosen), promised)


def test_second_loss_in_recovery(new_recording: Recordings, tmp_path: Path) -> None:
    assert [*losses_in_recovery(new_recording, tmp_path, states=1, sample=10)] == [""]


@pytest.mark.slow
def test_second_losses_in_many_recoveries(new_recording: Recordings, tmp_path: Path) -> None:
    results = [*losses_in_recovery(new_recording, tmp_path, states=20, sample=100)]
    assert results == [""] * 20


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_store_at_every_boundary(seed: int, new_recording: Recordings) -> None:
    recording = new_recording("run")
    workload = Workload(seed, pipelines=1, processes=2, transactions=5, upkeep=2)
    log = record(recording, workload)
    assert found(recording, workload, losses(log, [seed])) == ""
