"""A whole store: numbers about it, its transactions, a check of everything in it, compaction on
demand, and what it has lost, accepted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from txnkv.client.indexes import check_indexes, refuse_index_part
from txnkv.coordinator import (
    FAILING,
    Loss,
    Timestamp,
    TxnId,
    TxnState,
    held,
    latest_snapshot,
    one,
    payload,
    raise_first,
    status_table,
)
from txnkv.errors import (
    ClosedError,
    TableNotFoundError,
    TopicNotFoundError,
    TxnkvError,
)
from txnkv.storage import require_of_store, shrink
from txnkv.tables import (
    Counted,
    ReadView,
    RowSetInfo,
    TableEngine,
    TableInfo,
    Tablet,
    check_row_set,
    check_together,
    history,
    manifest,
    row_set_ids,
    scan,
    table_catalog,
)
from txnkv.tables import accept_loss as accept_tablet
from txnkv.topics import accept_loss as accept_log
from txnkv.topics import check_partition, live_partition_ids, topic_stats
from txnkv.topics import topic_catalog as topics
from txnkv.transaction import Instance


def store_stats(instance: Instance) -> dict[str, Any]:
    """Numbers about a store; sizes in bytes."""
    engine, store = instance.engine, instance.store
    with store.status.read() as cur:
        latest = latest_snapshot(cur)
        states = dict(cur.execute("SELECT state, count(*) FROM transactions GROUP BY state"))
        names = table_catalog.names(cur)
        staged = one(
            cur,
            "SELECT count(*), coalesce(sum(bytes), 0) FROM row_sets "
            "WHERE state < ? AND txn_id IS NOT NULL",
            (manifest.COMMITTED,),
        )
        retired = one(
            cur,
            "SELECT count(*), coalesce(sum(bytes), 0) FROM row_sets WHERE state = ?",
            (manifest.RETIRED,),
        )
        unfinished = one(
            cur,
            "SELECT count(*) FROM row_sets WHERE state = ? AND txn_id IS NULL",
            (manifest.WRITING,),
        )
        flushed, floor = one(cur, "SELECT flushed_ts, history_floor FROM clock")
        log = one(
            cur,
            "SELECT count(*), coalesce(sum(length(payload)), 0) FROM commit_log "
            "WHERE commit_ts > ?",
            (flushed,),
        )
        lease = cur.execute("SELECT term, owner_slot, owner_start FROM lease").fetchone()
    sends = instance.topics.staged.files()
    tables = {}
    snapshot, pin = history.hold_latest(instance.coordinator)
    try:
        for name in names:
            with suppress(TableNotFoundError):  # another process dropped it
                tables[name] = _table_stats(engine, engine.get(name), ReadView(snapshot))
    finally:
        pin.end()
    root = Path(store.directory.path)
    return {
        "path": str(root),
        "store_id": store.store_id,
        "snapshot": int(latest),
        "tables": tables,
        "topics": topic_stats(instance.topics),
        "transactions": {TxnState(state).name: count for state, count in states.items()},
        "staged_row_sets": staged[0],
        "staged_bytes": staged[1],
        "staged_files": len(sends),
        "staged_file_bytes": sum(file.bytes for file in sends),
        "retired_row_sets": retired[0],
        "retired_bytes": retired[1],
        "maintenance_row_sets": unfinished[0],
        "log_commits": log[0],
        "log_bytes": log[1],
        "flushed": flushed,
        "history_floor": floor,
        "oldest_snapshot": history.oldest_read(store, latest),
        "files_bytes": sum(
            _file_size(Path(folder, name)) for folder, _, names in os.walk(root) for name in names
        ),
        "leader_term": None if lease is None else lease[0],
        "leader_pid": None if lease is None else store.runtime.pid(lease[1], lease[2]),
        "open_environments": store.environments.open_count,
    }


def _table_stats(engine: TableEngine, info: TableInfo, view: ReadView) -> dict[str, Any]:
    row_sets = [seen for t in engine.tablets(info) for seen in t.reload().infos]
    asked = scan.request(info, [], None, False, None)
    return {
        "rows": _count_rows(engine, asked, view),
        "bytes": sum(seen.size for seen in row_sets),
        "tablets": len(info.tablets),
        "row_sets": len(row_sets),
        "row_versions": sum(seen.rows for seen in row_sets),
        "deleted_versions": sum(seen.deleted for seen in row_sets),
    }


def _count_rows(engine: TableEngine, asked: scan.Request, view: ReadView) -> int | None:
    """The rows of a table; None when it is damaged or closed where they are counted."""
    try:
        return scan.count(engine, asked, view)
    except FAILING:
        return None


def _file_size(file: Path) -> int:
    try:
        return file.stat().st_blocks * 512 if file.is_file() else 0
    except (FileNotFoundError, PermissionError):
        return 0


# -- check -----------------------------------------------------------------------------


@dataclass
class CheckReport(Counted):
    """The findings of `check`.

    Attributes:
        commits: in the commit log.
        partitions: of topics.
        staged_files: of messages that wait for the end of a job.
        problems: one line each; empty when the store is whole.
    """

    commits: int = 0
    partitions: int = 0
    staged_files: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems


def check_store(
    instance: Instance, progress: Callable[[int, int], None] | None = None
) -> CheckReport:
    """Read every block of every committed or staged row set, every batch of topics and of staged
    files, and the status database.

    Raises:
        StoreNotFoundError: the store was removed, moved or replaced while it is open.
    """
    instance.store.require_there()
    report = CheckReport()
    runtime, status = instance.store.runtime, instance.store.status
    with status.read() as cur:
        version = one(cur, "SELECT manifest_version FROM clock")[0]
    # Before the row sets are listed, so that none of them is collected under our eyes.
    pin = runtime.hold_manifest(version)
    try:
        _check(instance, report, progress)
    finally:
        pin.end()
    return report


def _check(
    instance: Instance, report: CheckReport, progress: Callable[[int, int], None] | None
) -> None:
    engine, store = instance.engine, instance.store
    with store.status.read() as cur:
        _check_status(cur, report)
        _check_log(instance, cur, report)
        _check_held(cur, report)
        # The files of a dropped table go before its rows do.
        ids = sorted(table_catalog.live_tablets(cur))
    work: list[tuple[Tablet, RowSetInfo]] = []
    for id in ids:
        tablet = engine.tablet(id)
        if tablet is None:
            continue
        with store.status.read() as cur:
            infos = manifest.readable(cur, id)
        work += [(tablet, info) for info in infos]
        for found in (_together(instance, tablet), _unknown_row_sets(instance, tablet)):
            report.problems += _of_live(instance, payload.TABLET, id, _said(tablet.label, found))
    for done, (tablet, info) in enumerate(work):
        if progress is not None:
            progress(done, len(work))
        rows = report.rows
        found = _said(f"{tablet.label}, row set {info.id}", check_row_set(tablet, info, report))
        report.problems += _of_live(instance, payload.TABLET, tablet.id, found)
        if tablet.table.index_of is not None:  # they are counted in the table
            report.rows = rows
    for name in engine.names():
        # What is wrong with a tablet was told with that.
        found = _said(f"table {name!r}", _indexes(instance, name))
        said = [each.partition(": ")[2] for each in report.problems]
        report.problems += [each for each in found if not each.endswith(tuple(filter(None, said)))]
    for id in live_partition_ids(instance.topics):
        found = _said(f"partition {id}", check_partition(instance.topics, id))
        report.problems += _of_live(instance, payload.TOPIC, id, found)
        report.partitions += 1
    for file in instance.topics.staged.files():
        problem = instance.topics.staged.problem(file)
        report.problems += [problem] if problem is not None else []
        report.staged_files += 1
    if progress is not None:
        progress(len(work), len(work))


def _said(part: str, problems: Iterator[str]) -> Iterator[str]:
    """The problems of a part, by its name; bytes that nobody wrote may lead to any error."""
    try:
        for problem in problems:
            yield _named(part, problem)
    except ClosedError:
        raise
    except TxnkvError as error:
        require_of_store(error)
        yield _named(part, str(error))
    except Exception as error:
        yield f"{part}: damaged: {error}"


def _named(part: str, problem: str) -> str:
    return problem if problem.startswith(("table '", "topic '", "store ")) else f"{part}: {problem}"


def _of_live(instance: Instance, kind: int, id: int, problems: Iterator[str]) -> list[str]:
    """The problems of a part; none where another process dropped it meanwhile: status.db forgets
    what our open file still has.
    """
    found = list(problems)
    if found:
        with instance.store.status.read() as cur:
            if id not in _live(cur)[kind]:
                return []
    return found


def _live(cur: Any) -> dict[int, set[int]]:
    return {
        payload.TABLET: table_catalog.live_tablets(cur),
        payload.TOPIC: topics.live_partitions(cur),
    }


def _together(instance: Instance, tablet: Tablet) -> Iterator[str]:
    yield from check_together(tablet, tablet.state(instance.coordinator.latest()))


def _indexes(instance: Instance, name: str) -> Iterator[str]:
    engine, coordinator = instance.engine, instance.coordinator
    table = engine.find(name)
    if table is None or not table.schema.indexes:
        return
    snapshot, pin = history.hold_latest(coordinator)
    try:
        yield from check_indexes(engine, table, snapshot)
    finally:
        pin.end()


def _check_held(cur: Any, report: CheckReport) -> None:
    live = _live(cur)
    for (kind, id), part in held.parts(cur).items():
        if id in live[kind]:
            since = f" since {part.flushed.datetime.isoformat()}" if part.flushed else ""
            report.problems.append(
                f"{part.error}. It takes no writes; what was committed there{since} and could not "
                "be written is kept in status.db. Restore its files from a backup and flush, or "
                "drop it"
            )


def _check_status(cur: Any, report: CheckReport) -> None:
    for (line,) in cur.execute("PRAGMA integrity_check"):
        if line != "ok":
            report.problems.append(f"status.db: {line}")
    for table, row, parent, _ in cur.execute("PRAGMA foreign_key_check").fetchall():
        report.problems.append(f"status.db: row {row} of {table} refers to no row of {parent}")
    questions = {
        "a row set belongs to no transaction and is not committed": (
            # One that is being written for nobody is a flush's or a compaction's.
            "SELECT id FROM row_sets WHERE state < 2 AND (state = 1 OR txn_id IS NOT NULL) AND "
            "(txn_id IS NULL OR txn_id NOT IN "
            "(SELECT txn_id FROM transactions WHERE state NOT IN (2, 4)))"
        ),
        "a committed row set has no stamp": (
            "SELECT id FROM row_sets WHERE state = 2 AND stamp IS NULL"
        ),
        "a committed row set has stamps the wrong way round": (
            "SELECT id FROM row_sets WHERE state = 2 AND min_stamp > stamp"
        ),
        "a committed row set has more deleted rows than rows": (
            "SELECT id FROM row_sets WHERE state = 2 AND deleted > rows"
        ),
        "a replaced row set has no manifest version": (
            "SELECT id FROM row_sets WHERE state = 3 AND (retired IS NULL OR retired > "
            "(SELECT manifest_version FROM clock))"
        ),
        "commits are flushed above the last one, or the history begins there": (
            "SELECT last_commit FROM clock WHERE max(flushed_ts, history_floor) > last_commit"
        ),
        "commits are flushed above what the clock's own row knows": (
            "SELECT flushed_ts FROM clock_row WHERE flushed_ts > min(last_commit, last_timestamp)"
        ),
        "a committed row set has a stamp above the last commit": (
            "SELECT id FROM row_sets WHERE state = 2 AND stamp > (SELECT last_commit FROM clock)"
        ),
        "an application has a version above the last commit": (
            "SELECT app_id FROM applications WHERE commit_ts > (SELECT last_commit FROM clock)"
        ),
        "a mark is left of a transaction that ended": (
            "SELECT app_id FROM application_marks JOIN transactions USING (txn_id) "
            "WHERE state IN (2, 4, 6)"
        ),
        "a lock is held by a transaction that ended": (
            "SELECT locks.id FROM locks JOIN transactions USING (txn_id) WHERE state IN (2, 4)"
        ),
        "a transaction is committed above the clock": (
            "SELECT txn_id FROM transactions WHERE commit_ts > (SELECT last_timestamp FROM clock)"
        ),
        "an end marker has an offset that was never given": (
            "SELECT first_offset FROM end_markers JOIN partitions ON partitions.id = partition_id "
            "WHERE first_offset + count > next_offset"
        ),
        "two transactions have one commit timestamp": (
            "SELECT max(txn_id) FROM transactions WHERE state IN (4, 6) AND commit_ts IS NOT NULL "
            "GROUP BY commit_ts HAVING count(*) > 1"
        ),
    }
    for what, question in questions.items():
        for (id,) in cur.execute(question):
            report.problems.append(f"status.db: {what}: {id}")


def _check_log(instance: Instance, cur: Any, report: CheckReport) -> None:
    for stamp, data in cur.execute("SELECT commit_ts, payload FROM commit_log"):
        report.commits += 1
        where = f"status.db, commit log, commit {stamp}"
        try:
            lost = [s for s in payload.unpack(data, stamp) if not s.is_whole(stamp)]
            if not lost and payload.differs(data, stamp):
                report.problems.append(f"{where}: a directory is damaged, the other one is whole")
        except payload.PayloadError as error:
            report.problems.append(f"{where}: {error}")
            continue
        for section in lost:
            part = _part_label(instance, section)
            report.problems.append(f"{where}: what it changed in {part} is damaged")


def _part_label(instance: Instance, section: payload.Section) -> str:
    if section.kind == payload.TABLET:
        tablet = instance.engine.tablet(section.id)
        return f"tablet {section.id}" if tablet is None else tablet.label
    partition = instance.topics.partition(section.id)
    return f"partition {section.id}" if partition is None else partition.label


def _unknown_row_sets(instance: Instance, tablet: Tablet) -> Iterator[str]:
    """Row sets with blocks in LMDB that status.db knows nothing of.

    A writer claims a row set in status.db before it writes blocks, and a sweep removes the
    blocks before it forgets the claim. So what is known at an instant between two sights of
    its blocks is no claim that came later or was forgotten before, whoever writes meanwhile.
    """
    try:
        before = row_set_ids(tablet)
        with instance.store.status.read() as cur:
            unknown = before - manifest.known_ids(cur, tablet.id)
        unknown &= row_set_ids(tablet) if unknown else unknown
    except (TxnkvError, KeyError):
        return
    for id in sorted(unknown):
        yield f"{tablet.label}: the blocks of row set {id} belong to nothing"


# -- compaction ------------------------------------------------------------------------

SLACK: Final = 1.1
"""A file that is longer than what is in it by this factor is copied."""

LEAST_BYTES: Final = 1 << 20


@dataclass(frozen=True)
class CompactReport:
    """The result of `compact`.

    Attributes:
        row_sets_before, row_sets_after: row sets that were merged, and those they became.
        rows_before, rows_after: row versions in them; those that no snapshot sees are gone.
        collected: row sets whose space is free for use again.
        files_before, files_after: bytes of the tables' files.
        in_use: tablets whose files another process has open, so that they were not cut.
        messages_left_out: of topics with cleanup="compact": those that later ones hide.
    """

    row_sets_before: int = 0
    row_sets_after: int = 0
    rows_before: int = 0
    rows_after: int = 0
    collected: int = 0
    files_before: int = 0
    files_after: int = 0
    in_use: int = 0
    messages_left_out: int = 0


def compact_store(
    instance: Instance, progress: Callable[[int, int], None] | None = None
) -> CompactReport:
    """Flush, merge whatever overlaps or has dead rows, collect, and cut the files; compact topics.

    Args:
        instance: the store.
        progress: called with (row versions done, row versions in all).

    Raises:
        StorageFullError: the disk is full; what is done is done.
    """
    engine = instance.engine
    metrics = engine.coordinator.metrics
    collected = metrics.collected_row_sets.value
    tablets = engine.compactor.tablets()
    before = sum(_tablet_bytes(instance, tablet) for tablet in tablets)
    done = engine.compactor.compact_all(progress)
    in_use: list[int] = []

    def cut(tablet: Tablet) -> None:
        if not _cut(instance, tablet):
            in_use.append(tablet.id)

    raise_first(engine.each([tablet.id for tablet in tablets], "compaction", cut))
    with engine.coordinator.damage.guard("the store", "shortening status.db"):
        instance.store.status.shorten()
    return CompactReport(
        row_sets_before=done.sources,
        row_sets_after=done.results,
        rows_before=done.rows_before,
        rows_after=done.rows_after,
        collected=metrics.collected_row_sets.value - collected,
        files_before=before,
        files_after=sum(_tablet_bytes(instance, tablet) for tablet in tablets),
        in_use=len(in_use),
        messages_left_out=instance.topics.compact().messages,
    )


def _cut(instance: Instance, tablet: Tablet) -> bool:
    """Make a tablet's file as short as what is in it; False when it is open elsewhere."""
    if not instance.store.environments.was_made(f"tablets/{tablet.id}", tablet.label, tablet.part):
        return True
    with instance.store.status.read() as cur:
        (needed,) = one(
            cur,
            "SELECT coalesce(sum(bytes), 0) FROM row_sets WHERE tablet_id = ? AND state != ?",
            (tablet.id, manifest.WRITING),
        )
    if _tablet_bytes(instance, tablet) <= max(SLACK * needed, LEAST_BYTES):
        return True
    return shrink(tablet.environment()) is not None


def _tablet_bytes(instance: Instance, tablet: Tablet) -> int:
    return _file_size(instance.store.directory.tablet_dir(tablet.id) / "data.mdb")


# -- losses ----------------------------------------------------------------------------


def accept_loss(instance: Instance, part: str, *, really: bool) -> Loss:
    """Give up what a tablet or partition has lost; see `Client.accept_loss`."""
    kind, name, number = _parse_part(part)
    refuse_index_part(name)
    table = instance.engine.find(name) if kind != "topic" else None
    topic = instance.topics.find(name) if kind != "table" else None
    if table is not None and topic is not None:
        raise ValueError(f"{part!r} is a table and a topic: say table:{part} or topic:{part}")
    if topic is not None and number < len(topic.partitions):
        partition = instance.topics.partitions(topic)[number]
        loss = accept_log(instance.topics, partition, really=really)
    elif table is not None and number < len(table.tablets):
        tablet = instance.engine.tablets(table)[number]
        return accept_tablet(instance.engine, tablet, really=really)
    elif topic is not None or kind == "topic":
        raise TopicNotFoundError(f"no topic has the part {part!r}: see `txnkv check`")
    else:
        raise TableNotFoundError(f"no table or topic has the part {part!r}: see `txnkv check`")
    if really:
        instance.engine.flush()
    return loss


def _parse_part(part: str) -> tuple[str, str, int]:
    """The kind, if it is said, the name and the number."""
    if not isinstance(part, str):
        raise TypeError(f"a part is a text, as 'orders/0', not {part!r}")
    kind, colon, rest = part.partition(":")
    if not colon or kind not in ("table", "topic"):
        kind, rest = "", part
    name, _, number = rest.rpartition("/")
    if not name or not (number.isascii() and number.isdecimal()):
        raise ValueError(f"{part!r} is no part: say a name and a number, as in 'orders/0'")
    return kind, name, int(number)


# -- transactions ----------------------------------------------------------------------


@dataclass(frozen=True)
class TxnInfo:
    """A transaction as it stands in the status table.

    Attributes:
        timeout: seconds from begin, or None.
        reason: why it was aborted.
    """

    id: TxnId
    state: TxnState
    begin: Timestamp
    commit: Timestamp | None
    timeout: float | None
    isolation: str
    locking: str
    participants: int
    reason: str | None


def list_transactions(instance: Instance) -> list[TxnInfo]:
    """All transactions in the status table: those that have not ended, and recent ones."""
    with instance.store.status.read() as cur:
        rows = status_table.select(cur)
        participants = {
            row.txn_id: sum(map(len, status_table.participants(cur, row.txn_id).values()))
            for row in rows
        }
    return [
        TxnInfo(
            instance.coordinator.txn_id(row.txn_id),
            row.state,
            row.begin_ts,
            row.commit_ts if row.state is not TxnState.ABORTED else None,
            None if row.timeout is None else row.timeout / 1e6,
            row.isolation,
            row.locking,
            participants[row.txn_id],
            row.reason,
        )
        for row in rows
    ]
