"""A dump: a store in plain files, for other programs, and for a txnkv that reads no old stores.

    BACKUP                the files with their bytes and checksums
    dump.json             tables and topics: columns, keys, options, offsets, subscriptions
    tables/0.parquet      the rows of a table by their keys
    topics/0-3.parquet    the messages of a topic's partition 3 by their offsets

All of it is of one instant. Rows could be read at a snapshot; cursors, options and the end of a log
are kept as they are now, and not as they were. So a dump is made of a quiet store:

    backup      beside the place: what is committed now, while others go on
    restore     of it, too: what was open is aborted, and nobody else has it
    dump        read from that; then both go

That takes the space of the store twice for as long as it lasts, and no second way to one instant.

Kept are rows, schemas and partitioning, topics with their options, messages at their offsets with
keys, headers and times, subscriptions with positions, versions of applications. Not kept are the
past (a restored store begins with the dump's instant), transactions and the ids of those that sent,
producers with what they sent last, and how often a message was delivered.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import pyarrow as pa

from txnkv.client.backup import CONTENT, DUMP, DUMP_VERSION, back_up, restore
from txnkv.client.client import Client
from txnkv.client.opening import connect
from txnkv.client.table import Table
from txnkv.coordinator import Timestamp, one
from txnkv.core import gathered
from txnkv.errors import NotSupportedError
from txnkv.storage import (
    BackupWriter,
    declare_fault_point,
    fault_point,
    folder_at,
    go_on,
    make_private_file,
    shielded,
    whole_folder,
)
from txnkv.tables import Schema
from txnkv.topics import dumped_messages, topic_document
from txnkv.transaction import Instance

declare_fault_point("dump.copied", "a quiet copy of the store is there, nothing is dumped")
declare_fault_point("dump.renamed", "a dump has its name")

_GROUP_ROWS: Final = 1 << 17
_GROUP_BYTES: Final = 32 << 20
"""Rows and bytes of a row group, about."""
_PARTS: Final = 1000
"""The parts that progress is counted in."""


@dataclass(frozen=True)
class DumpReport:
    """The result of `dump`.

    Attributes:
        path: of the dump.
        timestamp: it has all that was committed at or below it.
        tables, rows, topics, messages: how many.
        size: bytes of all files.
    """

    path: str
    timestamp: Timestamp
    tables: int
    rows: int
    topics: int
    messages: int
    size: int


@shielded
def dump(
    src: str | os.PathLike[str] | Client,
    dest: str | os.PathLike[str],
    *,
    progress: Callable[[int, int], None] | None = None,
) -> DumpReport:
    """Write a store to plain files, Parquet and JSON; `txnkv.restore` makes a store of them.

    All that is committed now, at one timestamp, while others go on. For as long as it takes there
    is a copy of the store beside the files.

    Args:
        src: a store's directory, or a client of it.
        dest: nothing is there, or an empty folder.
        progress: called with (parts done, of how many).

    Raises:
        StoreNotFoundError: there is no store at `src`, or `dest` leads over a file.
        ValueError: `dest` has files, is a mount point, lies in a store or is no name of a folder.
        CorruptionError, StorageFullError: a part is damaged, or no room; nothing is left.
        NotSupportedError: the client reads only, or the store is on another host, or this user may
            not write at `dest`.
    """
    with ExitStack() as stack:
        client = src if isinstance(src, Client) else connect(src, create=False)
        if client is not src:
            stack.enter_context(client)
        if client.elsewhere is not None:
            raise NotSupportedError("a dump is made on the store's host: `txnkv dump` there")
        client.require_writable()
        return _dump(client.instance, folder_at(dest), progress)


def _dump(
    instance: Instance, place: Path, progress: Callable[[int, int], None] | None
) -> DumpReport:
    tell = progress or (lambda _done, _total: None)

    def share(first: int, last: int) -> Callable[[int, int], None]:
        return lambda done, total: tell(first + (last - first) * done // max(total, 1), _PARTS)

    with whole_folder(place, "a dump") as folder:
        aside = folder / "aside"
        taken = back_up(instance, aside / "backup", None, share(0, 250), None)
        restore(aside / "backup", aside / "store", progress=share(250, 500))
        shutil.rmtree(aside / "backup")
        fault_point("dump.copied")
        with connect(aside / "store", read_only=True) as quiet:
            writer = _DumpWriter(quiet, folder, share(500, _PARTS))
            writer.run()
        shutil.rmtree(aside)
        writer.finish(instance.store.store_id, taken.timestamp)
    fault_point("dump.renamed")
    tell(_PARTS, _PARTS)
    return writer.report(str(place), taken.timestamp)


class _DumpWriter:
    """A quiet store on its way into plain files."""

    def __init__(self, client: Client, folder: Path, tell: Callable[[int, int], None]) -> None:
        self._client = client
        self._topics = client.instance.topics
        self._backup = BackupWriter(folder, None, lambda _: None, None)
        self._tell = tell
        self._rows = self._messages = 0
        self._total = 0
        self._content: dict[str, Any] = {}

    def run(self) -> None:
        """Write the files of all tables and topics."""
        tables = [self._client.table(name) for name in self._client.tables()]
        documents = [
            topic_document(self._topics, self._topics.get(name)) for name in self._client.topics()
        ]
        partitions = [each for document in documents for each in document["partitions"]]
        self._total = sum(table.count() for table in tables)
        self._total += sum(each["end"] - each["start"] for each in partitions)
        self._content = {
            "version": DUMP_VERSION,
            "tables": [self._table(n, table) for n, table in enumerate(tables)],
            "topics": documents,
            "applications": {
                app_id: (applied.version, applied.source)
                for app_id, applied in self._client.applications().items()
            },
        }
        for n, document in enumerate(documents):
            self._write_messages(n, document)

    def finish(self, store_id: str, timestamp: Timestamp) -> None:
        """Write what is in the files, and the list of them."""
        made = {"store_id": store_id, "timestamp": int(timestamp)}
        made["taken"] = datetime.now(UTC).isoformat()
        path = self._backup.path(CONTENT)
        make_private_file(path)
        path.write_text(json.dumps({**made, **self._content}, indent=1, ensure_ascii=False) + "\n")
        self._backup.add(CONTENT)
        self._backup.finish({"id": uuid4().hex, "kind": DUMP, **made})

    def report(self, path: str, timestamp: Timestamp) -> DumpReport:
        """Say what was written."""
        size = sum(file.size for file in self._backup.files.values())
        tables, topics = len(self._content["tables"]), len(self._content["topics"])
        return DumpReport(path, timestamp, tables, self._rows, topics, self._messages, size)

    def _table(self, n: int, table: Table) -> dict[str, Any]:
        schema = table.schema
        plain = Schema(schema.columns, schema.primary_key, schema.ttl)  # without what it was before
        with self._client.instance.store.status.read() as cur:
            (next_id,) = one(cur, "SELECT next_row_id FROM tables WHERE id = ?", (table.info.id,))
        scan = table.scan(ordered=True)
        file, rows = f"tables/{n}.parquet", self._rows
        written = self._write(file, f"table {table.name!r}", schema.arrow, scan.to_batches())
        self._rows = rows + written
        return {
            "name": table.name,
            "file": file,
            "rows": written,
            "schema": json.loads(plain.to_json()),
            "partitioning": json.loads(table.info.partitioning.to_json()),
            "next_id": next_id,
            "history": "unlimited" if table.history == math.inf else table.history,
            "indexes": [
                (each.columns, each.unique) for each in table.indexes if each.state == "ready"
            ],
        }

    def _write_messages(self, n: int, document: dict[str, Any]) -> None:
        topics = self._topics
        partitions = topics.partitions(topics.get(document["name"]))
        for partition, each in zip(partitions, document["partitions"], strict=True):
            found = dumped_messages(topics, partition, each["start"], each["end"])
            each["file"] = f"topics/{n}-{partition.number}.parquet"
            each["rows"] = self._write(each["file"], f"topic {document['name']!r}", *found)
            self._messages += each["rows"]

    def _write(
        self, name: str, what: str, schema: pa.Schema, batches: Iterable[pa.RecordBatch]
    ) -> int:
        from pyarrow import parquet  # it takes a while

        rows, path = 0, self._backup.path(name)
        make_private_file(path)
        try:
            made = parquet.ParquetWriter(path, schema, compression="zstd")
        except OSError as error:
            if error.errno is not None:
                raise
            columns = ", ".join(f"{field.name} {field.type}" for field in schema)
            raise NotSupportedError(
                f"{what} has a column that Parquet has not, of {columns} ({error}): take a backup, "
                "which has all"
            ) from None
        with made as writer:
            for some in gathered(batches, _GROUP_ROWS, _GROUP_BYTES):
                go_on()
                table = pa.Table.from_batches(some, schema)
                writer.write_table(table, row_group_size=table.num_rows)
                rows += table.num_rows
                self._tell(min(self._rows + self._messages + rows, self._total), self._total)
        self._backup.add(name)
        return rows
