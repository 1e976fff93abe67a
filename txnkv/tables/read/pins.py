"""Pins of a running read: its snapshot and the row sets of its manifest are not collected.

A pin is published in the runtime file before the list of row sets is read; who collects looks at
the pins after it has published a newer list. So either the reader sees the newer list, or the
collector sees the pin.
"""

from __future__ import annotations

from contextlib import suppress

from txnkv.coordinator import Timestamp
from txnkv.errors import ClosedError
from txnkv.storage import Runtime, WhenDropped


class Pins:
    """Pins a snapshot and a manifest version until it is dropped or released."""

    def __init__(self, runtime: Runtime, snapshot: Timestamp, version: int) -> None:
        self.snapshot = snapshot
        self.version = version
        runtime.pin_snapshot(snapshot)
        runtime.pin_manifest(version)
        self._release = WhenDropped(self, _unpin, runtime, snapshot, version)

    def release(self) -> None:
        """Take the pins back. Twice is fine."""
        self._release()


def _unpin(runtime: Runtime, snapshot: Timestamp, version: int) -> None:
    with suppress(ClosedError):
        runtime.unpin(snapshot)
        runtime.unpin_manifest(version)
