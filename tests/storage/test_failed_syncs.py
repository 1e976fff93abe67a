"""Syncs of several threads at once, of which the system tells one that the disk failed."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from txnkv.errors import UnavailableError
from txnkv.storage import GATE, Store


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside other work"])
def test_nothing_is_durable_by_a_sync_during_which_another_failed(
    store: Store, monkeypatch: pytest.MonkeyPatch, beside: bool
) -> None:
    status, runtime = store.status, store.runtime
    with status.write(sync=False) as cursor:
        cursor.execute("INSERT INTO t VALUES (1, 1)")
    inside, failed = threading.Event(), threading.Event()

    def fdatasync(_: int) -> None:
        if threading.current_thread() is threading.main_thread():
            assert inside.wait(60)
            raise OSError(5, "the disk failed")
        if not inside.is_set():
            inside.set()
            assert failed.wait(60)

    def sync() -> None:
        if beside:
            with GATE.use():
                status.begin_sync()()
        else:
            status.sync()

    monkeypatch.setattr("os.fdatasync", fdatasync)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(sync)
        with pytest.raises(UnavailableError, match="the disk failed"):
            status.sync()
        assert not runtime.all_synced()
        failed.set()
        other.result(60)
    assert runtime.to_sync() is not None  # it was moved into the database
    assert runtime.all_synced()
