"""A backup of a store in use: all that was committed at one commit timestamp, and nothing else.

    pin         the manifest (row sets stay) and a snapshot (files of dropped tables stay)
    hold        `log_cuts`: nothing is taken out of logs until they are copied
    status.db   copied by SQLite, as it is at one instant: its last commit is the backup's timestamp
    mark        the store's own status.db names the backup from here on
    logs        up to the offsets that were given by then; from here on they are cut again
    row sets    those that were committed then, and their deletes up to the timestamp
    the list    of all files, with their checksums; the folder gets its name

Everybody else goes on meanwhile: what comes later lies in LMDB behind that, under other row sets,
offsets and stamps, and is left out. What is committed and has not come to LMDB is in status.db: the
commit log, end markers, transactions that are being finalized. So a restored store is in the state
of one whose processes all died at the timestamp, and whoever opens it brings it to its end.

**The mark** tells which backups may be a base. A store that was put back from a copy of its files
gives numbers of row sets again, and so does a copy beside it. One that has the mark comes from what
was backed up, so that a number of the backup is the same row set there.

**A restore** makes a store of a backup, at another place and as another store.

    all files of the backup are compared with its list
    beside the place    FORMAT with an id of its own, status.db, an LMDB environment for each part
    there               opened: transactions that were open are aborted, those that were being
                        finalized come to their end
    rename              the store is there, whole

A backup may be a dump (`dump_files`): then tables and topics are made anew, and filled from its
plain files.

Until the rename nobody has heard of it: a death before leaves a folder that nobody takes for a
store of that name, and the next restore to the place removes it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

import pyarrow as pa

from txnkv.client.indexes import create_index
from txnkv.coordinator import (
    KEEPALIVE_TIME,
    Timestamp,
    held,
    one,
    reach,
    renew,
    warn_ahead,
)
from txnkv.errors import (
    CorruptionError,
    IncompatibleStoreError,
    StorageFullError,
    StoreNotFoundError,
    TxnkvError,
)
from txnkv.storage import (
    LIST,
    STATUS,
    Backup,
    BackupWriter,
    Environments,
    Place,
    Store,
    StoreDirectory,
    backups_at,
    changed_copy,
    declare_fault_point,
    extents,
    fault_point,
    fetching,
    folder_at,
    make_private_directory,
    open_backup,
    place_of,
    put_entries,
    read_copy,
    shielded,
    whole_folder,
    writing,
)
from txnkv.tables import (
    BLOCKS_DB,
    FENCE_DB,
    Partitioning,
    RowSetInfo,
    Schema,
    back_up_tablet,
    committed_row_sets,
    history,
    manifest,
    seconds_of,
    table_catalog,
)
from txnkv.topics import (
    back_up_partition,
    next_offsets,
    restore_messages,
    restore_partition,
    restore_subscriptions,
    restore_topic,
)
from txnkv.transaction import Connection, Instance, Transaction, require_time
from txnkv.transaction import instance as instances

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

declare_fault_point("backup.status", "status.db of a backup is copied, nothing else is")
declare_fault_point("backup.marked", "a store has the mark of a backup that is not there")
declare_fault_point("backup.logs", "status.db and the logs of a backup are copied")
declare_fault_point("backup.renamed", "a backup has its name")


@dataclass(frozen=True)
class BackupReport:
    """The result of `Client.backup`.

    Attributes:
        path: of the backup.
        timestamp: it has all that was committed at or below it.
        files: how many.
        size: bytes of all files.
        linked: bytes of those that an earlier backup had already.
    """

    path: str
    timestamp: Timestamp
    files: int
    size: int
    linked: int


@dataclass(frozen=True)
class _Plan:
    """The contents of a backup, as the copy of status.db says.

    Attributes:
        row_sets: by tablet.
        offsets: the next one, by partition.
    """

    timestamp: Timestamp
    row_sets: dict[int, tuple[RowSetInfo, ...]]
    offsets: dict[int, int]


@shielded
def back_up(
    instance: Instance,
    dest: str | os.PathLike[str],
    base: str | os.PathLike[str] | None,
    progress: Callable[[int, int], None] | None,
    bytes_per_second: float | None,
    filesystem: FileSystem | None = None,
) -> BackupReport:
    """Copy a store; see `Client.backup`."""
    if bytes_per_second is not None and not bytes_per_second > 0:
        raise ValueError(f"bytes_per_second={bytes_per_second}: a number above 0, or None")
    store, place = instance.store, place_of(dest, filesystem)
    earlier = None if base is None else _earlier(base, filesystem, store)
    told, id = _Told(instance, progress), uuid4().hex
    with writing(place, earlier, told.add, bytes_per_second) as writer:
        timestamp = _copy(instance, writer, id)
        writer.finish(
            {
                "id": id,
                "store_id": store.store_id,
                "timestamp": int(timestamp),
                "taken": datetime.now(UTC).isoformat(),
                "features": store.directory.features,
            }
        )
    fault_point("backup.renamed")
    told.end()
    size = sum(file.size for file in writer.files.values())
    return BackupReport(str(place), timestamp, len(writer.files), size, writer.linked)


def _earlier(base: str | os.PathLike[str], filesystem: FileSystem | None, store: Store) -> Backup:
    found = open_backup(place_of(base, filesystem))
    if found.content["store_id"] != store.store_id:
        raise ValueError(
            f"base={str(base)!r} is a backup of another store ({found.content['store_id']}, this "
            f"is {store.store_id}): name one of this store, or none"
        )
    if not _is_marked(store, found.content["id"]):
        raise ValueError(
            f"base={str(base)!r} has the id of this store, which knows nothing of it: the backup "
            "was taken before the store's files were put back from a copy, or of a copy beside "
            "it, or while its disk was full, or by an older txnkv. Name one that was taken of it "
            "since, or none"
        )
    return found


_MARKS: Final = """
CREATE TABLE IF NOT EXISTS backups (    -- of this store: each may be the base of a later one
    id  TEXT PRIMARY KEY                -- as its list has it
) WITHOUT ROWID
"""


def _mark(store: Store, id: str) -> None:
    """Name a backup in the store, once all is there that the backup will have."""
    with suppress(StorageFullError), store.status.write() as cur:  # it is no base then
        cur.execute(_MARKS)
        cur.execute("INSERT INTO backups VALUES (?)", (id,))
    fault_point("backup.marked")


def _is_marked(store: Store, id: str) -> bool:
    with store.status.read() as cur:
        if cur.execute("SELECT 1 FROM sqlite_schema WHERE name = 'backups'").get is None:
            return False
        return cur.execute("SELECT 1 FROM backups WHERE id = ?", (id,)).get is not None


def _copy(instance: Instance, backup: BackupWriter, name: str) -> Timestamp:
    runtime = instance.store.runtime
    _, snapshot = history.hold_latest(instance.coordinator)
    pins = [snapshot]
    try:
        with instance.store.status.read() as cur:
            (version,) = one(cur, "SELECT manifest_version FROM clock")
        pins.append(runtime.hold_manifest(version))
        plan = _copy_logs(instance, backup, name)
        for id, infos in plan.row_sets.items():
            tablet = instance.engine.tablet(id)
            assert tablet is not None, f"the table of tablet {id} is purged under a snapshot"
            back_up_tablet(tablet, infos, plan.timestamp, backup)
    finally:
        for pin in pins:
            pin.end()
    return plan.timestamp


def _copy_logs(instance: Instance, backup: BackupWriter, name: str) -> _Plan:
    store, topics = instance.store, instance.topics
    with store.log_cuts():
        store.status.backup_to(backup.path(STATUS))
        backup.add(STATUS)
        fault_point("backup.status")
        _mark(store, name)  # not before the copy: whoever has it has what is in that
        with read_copy(backup.path(STATUS)) as cur:
            plan = _planned(cur)
        for id, upto in plan.offsets.items():
            partition = topics.partition(id)
            assert partition is not None, f"the topic of partition {id} is purged under a snapshot"
            back_up_partition(topics, partition, upto, backup)
    fault_point("backup.logs")
    return plan


def _planned(cur: Any) -> _Plan:
    for part in held.parts(cur).values():
        raise held.refusal(
            part.error,
            "There is no backup of a store with a part that is damaged: restore its files, or give "
            "up what is lost with `txnkv repair`. `txnkv check` says more",
        )
    (timestamp,) = one(cur, "SELECT last_commit FROM clock")
    return _Plan(Timestamp(timestamp), committed_row_sets(cur), next_offsets(cur))


class _Told:
    """Progress in bytes, of what the store's files have now."""

    def __init__(self, instance: Instance, tell: Callable[[int, int], None] | None) -> None:
        self._tell = tell or (lambda _done, _total: None)
        self._done = 0
        self._total = 1 if tell is None else _bytes_of(instance)

    def add(self, count: int) -> None:
        """So many more are done."""
        self._done += count
        self._tell(self._done, max(self._total, self._done))

    def end(self) -> None:
        """All is done, however much it was."""
        self._tell(self._done, self._done)


def _bytes_of(instance: Instance) -> int:
    store, total = instance.store, 0
    with store.status.read() as cur:
        for question in (
            "SELECT page_count * page_size FROM pragma_page_count, pragma_page_size",
            "SELECT coalesce(sum(bytes), 0) FROM row_sets WHERE state = 2",
        ):
            total += int(one(cur, question)[0])
        ids = list(next_offsets(cur))
    for id in ids:
        try:
            partition = instance.topics.partition(id)
            if partition is not None and partition.exists:
                with partition.environment.read() as txn:
                    total += sum(segment.bytes for segment in partition.log.segments(txn))
        except TxnkvError:
            pass  # the copy of it will say so
    return total


# -- restoring -------------------------------------------------------------------------

declare_fault_point("restore.part", "a part of a restored store is filled, durable")
declare_fault_point("restore.filled", "all parts of a restored store are filled")
declare_fault_point("restore.opened", "a restored store was opened, it has not its name")
declare_fault_point("restore.renamed", "a restored store has its name")


@dataclass(frozen=True)
class RestoreReport:
    """The result of `restore`.

    Attributes:
        path: of the store.
        store_id: its own.
        timestamp: it has all that was committed at or below it.
        backup: the folder that it was restored from.
        size: bytes of the backup.
    """

    path: str
    store_id: str
    timestamp: Timestamp
    backup: str
    size: int


@shielded
def restore(
    src: str | os.PathLike[str],
    dest: str | os.PathLike[str],
    *,
    at: Timestamp | datetime | None = None,
    filesystem: FileSystem | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> RestoreReport:
    """Make a store of a backup or a dump; see `Client.backup` and `txnkv.dump`.

    It has exactly what was committed at the backup's timestamp. It is another store: tokens,
    checkpoints of streams and copies of the original are refused by it, and it has other ids for
    transactions.

    Args:
        src: a backup or a dump; or a folder with some of one store, of which the latest is taken.
            A path, or an address as of `Client.backup`.
        dest: where the store is to be: nothing is there, or an empty folder.
        at: of the backups, the latest one that was taken at or before this.
        filesystem: of pyarrow, in which `src` is a path.
        progress: called with (bytes done, bytes in all).

    Raises:
        StoreNotFoundError: there is no backup at `src`, or none as early as `at`; or `dest` leads
            over a file.
        NotSupportedError: this user may not write there.
        IncompatibleStoreError: `src` is something else, or a backup of a newer version.
        CorruptionError: a file of the backup is damaged or missing; it is named. Nothing was made.
            Also the list of one in the folder, unless `at` is the very timestamp of another.
        ValueError: there is something at `dest`, it lies in `src` or in a store, or no folder can
            have that name; or `at` has no time zone.
        StorageFullError: no room; nothing is left of it.
        UnavailableError: another process restores to `dest`, or the disk failed.
    """
    place, source = folder_at(dest), place_of(src, filesystem)
    backup = _chosen(source, at)
    if isinstance(source, Path) and place.is_relative_to(source) and (source / LIST).exists():
        raise ValueError(f"{place} lies in the backup {source}: name a folder outside")
    total, done = 2 * backup.size, 0

    def told(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    with whole_folder(place, "a restored store") as folder, fetching(place) as fetched:
        backup.verify(told, fetched)
        if backup.content.get("kind") == DUMP:
            store_id = _Undump(folder, backup, told).run()
        else:
            store_id = _fill_all(folder, backup, told)
        fault_point("restore.opened")
    fault_point("restore.renamed")
    timestamp = Timestamp(backup.content["timestamp"])
    return RestoreReport(str(place), store_id, timestamp, backup.place, backup.size)


def _fill_all(folder: Path, backup: Backup, told: Callable[[int], None]) -> str:
    made = StoreDirectory.open(folder)
    for feature in backup.content.get("features", ()):
        made.add_feature(feature)
    shutil.copyfile(backup.path(STATUS), made.status_path)
    made.status_path.chmod(0o600)
    backup.release([STATUS])
    told(backup.files[STATUS].size)
    found = _fill(made, backup, told)
    with changed_copy(made.status_path) as cur:
        renew(cur)
        manifest.forget_replaced(cur)
        cur.execute("DELETE FROM extents")
        for name, extent in found.items():
            extents.replace(cur, name, extent)
    fault_point("restore.filled")
    with _opened_aside(folder, create=False):
        pass
    return made.store_id


def _chosen(src: Place, at: Timestamp | datetime | None) -> Backup:
    if at is not None:
        require_time(at)
    found, damaged = backups_at(src)
    if isinstance(at, datetime):
        at = Timestamp.from_datetime(at)
        warn_ahead(max((each.content["timestamp"] for each in found), default=0), str(src))
    if len({each.content["store_id"] for each in found}) > 1:
        raise ValueError(f"{src} has backups of several stores: name one of them")
    if damaged and all(each.content["timestamp"] != at for each in found):
        raise CorruptionError(
            f"{damaged[0]}. Nobody knows when it was taken, it may be the one that is wanted: name "
            "one of the others itself, or give the very timestamp of one as at="
        )
    early = [each for each in found if at is None or each.content["timestamp"] <= at]
    if not early:
        first = min(each.content["timestamp"] for each in found)
        raise StoreNotFoundError(
            f"no backup at {src} was taken at or before {_words(at)}: the first one is of "
            f"{_words(first)}"
        )
    return max(early, key=lambda each: (each.content["timestamp"], each.content["taken"]))


def _words(timestamp: int | None) -> str:
    return Timestamp(timestamp or 0).datetime.astimezone(UTC).isoformat(timespec="seconds")


def _fill(
    made: StoreDirectory, backup: Backup, told: Callable[[int], None]
) -> dict[str, extents.Extent]:
    """Make an environment for each part that the backup has, and say how far each was written."""
    parts: dict[str, list[str]] = {}
    for name in sorted(backup.files, key=_in_order):
        if name != STATUS:
            parts.setdefault(name.rpartition("/")[0], []).append(name)
    with read_copy(made.status_path) as cur:
        offsets = next_offsets(cur)
    environments = Environments(made)
    found = {}
    try:
        for part, names in parts.items():
            kind, _, id = part.partition("/")
            try:
                if kind == "logs":
                    restore_partition(environments, int(id), offsets[int(id)], backup, names)
                else:
                    _fill_tablet(environments, part, backup, names)
            except (KeyError, ValueError) as error:
                raise CorruptionError(
                    f"{backup.place}/{part} does not belong to its {STATUS}: {error!r}. "
                    "Take another backup"
                ) from None
            found[part] = environments.get(part).extent()
            environments.get(part).close()
            told(sum(backup.files[name].size for name in names))
            backup.release(names)
            fault_point("restore.part")
    finally:
        environments.close_all()
    return found


def _in_order(name: str) -> tuple[str, int, str]:
    """By part; in it row sets and segments by number, so that keys come ascending."""
    part, _, last = name.rpartition("/")
    return part, int(last) if last.isdigit() else 1 << 63, last


def _fill_tablet(
    environments: Environments, part: str, backup: Backup, names: Sequence[str]
) -> None:
    environment = environments.get(part, databases=(BLOCKS_DB, FENCE_DB))
    for name in names:
        put_entries(environment, backup.entries(name))


@contextmanager
def _opened_aside(folder: Path, *, create: bool) -> Iterator[Instance]:
    """Open a store that gets its place and name when this has ended."""
    instance = instances.acquire(folder, create, False)
    try:
        yield instance
    finally:
        instances.release(instance)
    # Of this place, and of this process.
    shutil.rmtree(folder / "runtime")
    make_private_directory(folder / "runtime")


# -- of a dump -------------------------------------------------------------------------

DUMP: Final = "dump"
"""The kind of a backup that is a dump."""
CONTENT: Final = "dump.json"
DUMP_VERSION: Final = 1


class _Undump:
    """A store on its way out of a dump."""

    def __init__(self, folder: Path, backup: Backup, told: Callable[[int], None]) -> None:
        self._folder = folder
        self._backup = backup
        self._told = told
        self._timestamp = Timestamp(backup.content["timestamp"])

    def run(self) -> str:
        """Make all of it; returns the store's id."""
        content = json.loads(self._backup.path(CONTENT).read_bytes())
        if content["version"] > DUMP_VERSION:
            raise IncompatibleStoreError(
                f"{self._backup.place} is a dump of version {content['version']}, this reads up "
                f"to {DUMP_VERSION}: restore it with the txnkv that wrote it"
            )
        with _opened_aside(self._folder, create=True) as instance:
            last = self._timestamp
            self._reach(instance, last)
            connection = Connection(instance, KEEPALIVE_TIME)
            for document in content["tables"]:
                self._table(connection, document)
            topics = instance.topics
            made = [restore_topic(topics, document) for document in content["topics"]]
            for topic, document in zip(made, content["topics"], strict=True):
                for partition, each in zip(
                    topics.partitions(topic), document["partitions"], strict=True
                ):
                    batches = self._batches(each)
                    bounds = each["start"], each["end"]
                    end = restore_messages(topics, partition, *bounds, batches, self._timestamp)
                    last = max(last, Timestamp(end))
                    fault_point("restore.part")
                restore_subscriptions(topics, topic, document["subscriptions"])
            self._reach(instance, last)
            for app_id, (version, source) in content["applications"].items():
                with Transaction.begin(connection) as txn:
                    txn.mark_applied(app_id, version, source)
            with instance.store.status.write() as cur:
                history.begin(cur)  # a dump has nothing of the time before it
            connection.is_open = False
            return instance.store.store_id

    def _table(self, connection: Connection, document: dict[str, Any]) -> None:
        schema = Schema.from_json(json.dumps(document["schema"]))
        partitioning = Partitioning.from_json(schema, json.dumps(document["partitioning"]))
        engine = connection.instance.engine
        kept = seconds_of(document.get("history"))
        info = engine.create(document["name"], schema, partitioning, kept)
        with Transaction.begin(connection, timeout=None) as txn:
            reader = pa.RecordBatchReader.from_batches(schema.arrow, self._batches(document))
            txn.write(info.name, reader, "insert")
        for columns, unique in document["indexes"]:
            create_index(connection, engine.get(info.name), columns, unique=unique)
        with engine.store.status.write() as cur:
            table_catalog.reserve_row_ids(cur, info, document["next_id"] - 1)  # from 1 on
        fault_point("restore.part")

    def _batches(self, document: dict[str, Any]) -> Iterator[pa.RecordBatch]:
        """The rows of a file."""
        from pyarrow import parquet  # it takes a while

        rows, path = 0, self._backup.path(document["file"])
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                yield batch
                rows += batch.num_rows
        if rows != document["rows"]:
            raise CorruptionError(
                f"{path} has {rows:,} rows, {CONTENT} says {document['rows']:,}: dump again"
            )
        self._told(self._backup.files[document["file"]].size)
        self._backup.release([document["file"]])

    def _reach(self, instance: Instance, timestamp: Timestamp) -> None:
        """Have snapshots and all that comes later be at or behind a timestamp."""
        with instance.store.status.write() as cur:
            reach(cur, timestamp)
