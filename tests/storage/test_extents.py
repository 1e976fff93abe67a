"""Records of how far files are written, by which one of an earlier time is known."""

from __future__ import annotations

from pathlib import Path

import txnkv
from tests import internals
from txnkv.storage import extents


def test_the_furthest_of_a_file_is_known_of_it(tmp_path: Path) -> None:
    """Processes record at their leisure what they have written; a file may be another by then."""
    name = "logs/1"
    with txnkv.connect(tmp_path / "store") as client:
        topic = client.create_topic("events")
        client.run(lambda txn: txn.send(topic, b"m"))
        internals.flush(client)
        store = internals.store(client)
        noted = store.environments._extents
        assert noted is not None
        noted.record_rest()
        with store.status.read() as cur:
            known = extents.find(cur, name)
        assert known is not None
        for each in (
            extents.Extent(known.identity, known.written - 1),
            extents.Extent(extents.new_identity(), known.written + 1),
        ):
            noted.note(name, each)
            noted.record_rest()
            with store.status.read() as cur:
                assert extents.find(cur, name) == known
