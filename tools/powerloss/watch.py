"""Reads while others write, and says what it saw: that too must be there after a power loss.

A commit can be seen before it is durable, if the store lets it: the reader acts on it, power is
lost, and what it acted on never was.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import cycle
from types import TracebackType

import txnkv
from tools.powerloss.recording import mark
from tools.powerloss.workload import TABLES, Workload, Write, history

_AHEAD = 3


class Watcher:
    """A thread that looks for each writer's next transactions, by key and by scan in turn."""

    def __init__(self, client: txnkv.Client, workload: Workload) -> None:
        self._client = client
        self._workload = workload
        self._next = dict.fromkeys(range(workload.all_writers), 0)
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        if error is None and self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            for look in cycle((self._by_key, self._by_scan)):
                if self._stop.is_set():
                    return
                for writer, number in look():
                    if number >= self._next[writer]:
                        mark(f"saw {writer} {number}")
                        self._next[writer] = number + 1
        except BaseException as error:
            self._error = error

    def _by_key(self) -> Iterator[tuple[int, int]]:
        for writer, first in list(self._next.items()):
            for transaction in history(self._workload, writer)[0][first : first + _AHEAD]:
                write = next((each for each in transaction.writes if each.text), None)
                if write is not None and self._has(write):
                    yield writer, transaction.number

    def _has(self, write: Write) -> bool:
        row = self._client.table(write.table).get(write.id)
        return row is not None and row["text"] == write.text

    def _by_scan(self) -> Iterator[tuple[int, int]]:
        for table in TABLES:
            texts = self._client.table(table).scan(columns=["text"]).to_arrow()["text"]
            parts = (text.split("/") for text in texts.to_pylist())
            yield from sorted({(int(writer), int(number)) for writer, number, _ in parts})
