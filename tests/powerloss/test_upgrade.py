"""Power loss while a store of an older version is brought up to date."""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from random import Random

import txnkv
from tools.powerloss.disk import Disk
from tools.powerloss.examine import is_volatile
from tools.powerloss.recording import Recording
from tools.powerloss.states import States
from txnkv.storage.directory import FORMAT_VERSION

OLD = Path(__file__).parent.parent / "format/stores/store-v1.tar.xz"

UPGRADE = """
import txnkv
from tools.powerloss.run import copy_durably
copy_durably(Path(args[0]), root)
mark("put")
txnkv.connect(root / "store").close()
mark("upgraded")
"""


def test_upgrade(new_recording: Callable[[str], Recording], tmp_path: Path) -> None:
    with tarfile.open(OLD) as archive:
        archive.extractall(tmp_path / "old", filter="data")
    recording = new_recording("run")
    log = recording.run(UPGRADE, tmp_path / "old")
    (put, _), (upgraded, _) = log.marks()
    states = States(Disk(log, str(recording.root)), is_volatile)
    cuts = [cut for cut in log.boundaries() if cut > put]
    expected = None
    for cut in sorted(Random(0).choices(cuts, k=40)):
        states.write(tmp_path / "state", cut, cut, "strict")
        store = tmp_path / "state/store"
        if cut > upgraded:
            assert f'"version": {FORMAT_VERSION}' in (store / "FORMAT").read_text()
        with txnkv.connect(store, create=False) as client:
            assert client.check().problems == []
            counts = [client.table(name).count() for name in client.tables()]
            expected = expected or counts
            assert counts == expected
            with client.transaction() as txn:
                txn.insert("ranged", (1, "one more"))
        shutil.rmtree(tmp_path / "state")
