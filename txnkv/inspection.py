"""Looking on: numbers about a store, and a check of everything in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from txnkv import core
from txnkv.coordinator.clock import latest_snapshot
from txnkv.coordinator.query import one
from txnkv.coordinator.states import TxnState
from txnkv.errors import InvalidTxnStateError, TxnkvError
from txnkv.instance import Instance
from txnkv.tables import catalog, manifest, reading
from txnkv.tables.manifest import RowSetInfo
from txnkv.tables.row_set import RowSet
from txnkv.tables.row_set_format import BLOOM, COLUMNS, KEYS
from txnkv.tables.tablet import Pages, Tablet
from txnkv.tables.view import ReadView


def store_stats(instance: Instance) -> dict[str, Any]:
    """Numbers about a store; sizes in bytes."""
    engine, store = instance.engine, instance.store
    with store.status.read() as cur:
        latest = latest_snapshot(cur)
        states = dict(cur.execute("SELECT state, count(*) FROM transactions GROUP BY state"))
        names = catalog.names(cur)
        staged = one(
            cur,
            "SELECT count(*), coalesce(sum(bytes), 0) FROM row_sets WHERE state < ?",
            (manifest.COMMITTED,),
        )
        lease = cur.execute("SELECT term, owner_slot, owner_start FROM lease").fetchone()
    tables = {}
    view = ReadView(latest)
    for name in names:
        info = engine.get(name)
        row_sets = [seen for t in engine.tablets(info) for seen in t.state(latest).infos]
        asked = reading.request(info, [], None, False, None)
        tables[name] = {
            "rows": reading.count(engine, asked, view),
            "bytes": sum(seen.size for seen in row_sets),
            "tablets": len(info.tablets),
            "row_sets": len(row_sets),
        }
    root = Path(store.directory.path)
    return {
        "path": str(root),
        "store_id": store.store_id,
        "snapshot": int(latest),
        "tables": tables,
        "transactions": {TxnState(state).name: count for state, count in states.items()},
        "staged_row_sets": staged[0],
        "staged_bytes": staged[1],
        "files_bytes": sum(_size(file) for file in root.rglob("*")),
        "leader_term": None if lease is None else lease[0],
        "leader_pid": None if lease is None else _leader_pid(instance, lease[1], lease[2]),
        "open_environments": store.environments.open_count,
    }


def _leader_pid(instance: Instance, slot: int | None, start: int) -> int | None:
    runtime = instance.store.runtime
    if slot is None or not runtime.slot_alive(slot, start):
        return None
    return runtime.slot_owner(slot)


def _size(file: Path) -> int:
    try:
        return file.stat().st_blocks * 512 if file.is_file() else 0
    except FileNotFoundError:
        return 0


@dataclass
class CheckReport:
    """What `check` found.

    Attributes:
        problems: one line each; empty when the store is whole.
    """

    row_sets: int = 0
    blocks: int = 0
    rows: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems


def check_store(
    instance: Instance, progress: Callable[[int, int], None] | None = None
) -> CheckReport:
    """Read every block of every committed or staged row set, and the status database."""
    report = CheckReport()
    runtime, status = instance.store.runtime, instance.store.status
    with status.read() as cur:
        version = one(cur, "SELECT manifest_version FROM clock")[0]
    # Before the row sets are listed, so that none of them is collected under our eyes.
    runtime.pin_manifest(version)
    try:
        _check(instance, report, progress)
    finally:
        runtime.unpin_manifest(version)
    return report


def _check(
    instance: Instance, report: CheckReport, progress: Callable[[int, int], None] | None
) -> None:
    engine, store = instance.engine, instance.store
    with store.status.read() as cur:
        _check_status(cur, report)
        # The files of a dropped table go before its rows do.
        ids = [
            id
            for (id,) in cur.execute(
                "SELECT tablets.id FROM tablets JOIN tables ON tables.id = table_id "
                "WHERE dropped_ts IS NULL ORDER BY tablets.id"
            )
        ]
    work: list[tuple[Tablet, RowSetInfo]] = []
    for id in ids:
        tablet = engine.tablet(id)
        if tablet is None:
            continue
        with store.status.read() as cur:
            infos = manifest.readable(cur, id)
        work += [(tablet, info) for info in infos]
        report.problems += _unknown_row_sets(instance, tablet)
    for done, (tablet, info) in enumerate(work):
        if progress is not None:
            progress(done, len(work))
        report.problems += _check_row_set(tablet, info, report)
    if progress is not None:
        progress(len(work), len(work))


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
        "a committed row set has a stamp above the last commit": (
            "SELECT id FROM row_sets WHERE state = 2 AND stamp > (SELECT last_commit FROM clock)"
        ),
        "a lock is held by a transaction that ended": (
            "SELECT locks.id FROM locks JOIN transactions USING (txn_id) WHERE state IN (2, 4)"
        ),
        "a transaction is committed above the clock": (
            "SELECT txn_id FROM transactions WHERE commit_ts > (SELECT last_timestamp FROM clock)"
        ),
        "two transactions have one commit timestamp": (
            "SELECT max(txn_id) FROM transactions WHERE state IN (4, 6) AND commit_ts IS NOT NULL "
            "GROUP BY commit_ts HAVING count(*) > 1"
        ),
    }
    for what, question in questions.items():
        for (id,) in cur.execute(question):
            report.problems.append(f"status.db: {what}: {id}")


def _unknown_row_sets(instance: Instance, tablet: Tablet) -> Iterator[str]:
    """Row sets with blocks in LMDB that status.db knows nothing of.

    A writer claims a row set in status.db before it writes blocks, and a sweep removes the
    blocks before it forgets the claim. So what is known at an instant between two sights of
    its blocks is no claim that came later or was forgotten before, whoever writes meanwhile.
    """
    try:
        before = _row_set_ids(tablet)
        with instance.store.status.read() as cur:
            unknown = before - manifest.known_ids(cur, tablet.id)
        unknown &= _row_set_ids(tablet) if unknown else unknown
    except (TxnkvError, KeyError):
        return
    for id in sorted(unknown):
        yield f"{tablet.label}: the blocks of row set {id} belong to nothing"


def _row_set_ids(tablet: Tablet) -> set[int]:
    ids = set()
    with tablet.read() as pages, pages.txn.cursor(db=pages.blocks) as cursor:
        found = cursor.first()
        while found:
            id = int.from_bytes(bytes(cursor.key())[:8], "big")
            ids.add(id)
            found = cursor.set_range((id + 1).to_bytes(8, "big"))
    return ids


def _check_row_set(tablet: Tablet, info: RowSetInfo, report: CheckReport) -> Iterator[str]:
    name = f"{tablet.label}, row set {info.id}"
    row_set = RowSet(tablet, info)  # a known one would not read its header again
    last = b""
    try:
        with tablet.read() as pages:
            header = row_set.header(pages)
            if header.rows != info.rows:
                yield f"{name}: its header has {header.rows} rows, status.db {info.rows}"
        for number, block in enumerate(header.blocks):
            with tablet.read() as pages:
                sections = [KEYS, BLOOM, *(COLUMNS + column for column in header.columns)]
                for section in sections:
                    data = row_set.block(pages, section, number, again=True)
                    if section != BLOOM and core.block_rows(data) != block.rows:
                        yield f"{name}, block {number}: rows are missing in section {section}"
                keys = row_set.keys(pages, number)
                least = last if info.versioned else last + b"\0"
                if not _in_order(row_set, pages, number) or (number and keys.key(0) < least):
                    yield f"{name}, block {number}: its keys are not ascending"
                if (keys.key(0), keys.key(keys.n - 1)) != (block.first, block.last):
                    yield f"{name}, block {number}: its keys are not those of the header"
                last = keys.key(keys.n - 1)
                if core.bloom_probe(row_set.block(pages, BLOOM, number), keys).count != keys.n:
                    yield f"{name}, block {number}: its Bloom filter denies a key"
            report.blocks += len(sections)
            report.rows += block.rows
        if header.blocks and (header.blocks[0].first, last) != (info.min_key, info.max_key):
            yield f"{name}: its key range is not that of status.db"
    except InvalidTxnStateError:
        return  # aborted while we looked
    except TxnkvError as error:
        yield str(error)
    report.row_sets += 1


def _in_order(row_set: RowSet, pages: Pages, number: int) -> bool:
    """Whether a block's keys ascend, and the versions of one key go from new to old."""
    keys = row_set.keys(pages, number)
    order = core.sort_keys(keys)
    if order is None:
        return True
    if not row_set.info.versioned or order.to_arrow() != core.Rows.range(keys.n).to_arrow():
        return False
    inserts = row_set.inserts(pages, number)
    return inserts is not None and (
        core.version_order(core.mark_duplicates(keys, None), inserts) is None
    )
