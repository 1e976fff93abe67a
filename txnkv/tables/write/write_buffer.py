"""Rows in the memory of a transaction: until it commits, then in one row of the log; or until they
are staged.

    insert, upsert, ...    looked up at once, in the snapshot and in what it wrote before
                           -> the outcome as rows and tombstones, in its own MemRowSets
    get, scan              see them above the snapshot (`ReadView.own`)
    commit                 each MemRowSet becomes a section of the payload; validated inside the
                           commit log's SQLite transaction, first committer wins
    too much for that      the same rows are staged, and it goes on as a large transaction; those
                           that come later are looked up in what is staged, too, the next rows of a
                           flush together, and staged in turn

Entries are stamped by a counter of the transaction's statements; a commit takes the newest of
each key. Nothing is written anywhere before the commit, and nothing at all when there is nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, Final, TypeAlias

import pyarrow as pa

from txnkv import core
from txnkv.coordinator import Section, SmallCommit, TxnRow, commit_of, payload, section_of
from txnkv.core import compute as pc
from txnkv.errors import (
    AlreadyPresentError,
    RowError,
    TxnkvError,
)
from txnkv.storage import CachedProperty, brief
from txnkv.tables.arrow_input import MISSING
from txnkv.tables.commit import validate
from txnkv.tables.operations import (
    DELETES,
    NATIVE,
    PUT,
    RULES,
    Effect,
    Rule,
    already_there,
    incomplete,
    not_there,
)
from txnkv.tables.read import ReadView, lookup
from txnkv.tables.read_set import ReadSet
from txnkv.tables.row_writer import RowWriter, Values
from txnkv.tables.table_catalog import TableInfo
from txnkv.tables.table_index import Entry
from txnkv.tables.tables import Tables
from txnkv.tables.tablets import EVERY_STAMP, SortedRows, Tablet
from txnkv.tables.write import mutations
from txnkv.tables.write.mutations import Evaluated, Outcome

MAX_ROWS: Final = 10_000
MAX_BYTES: Final = 1 << 20
"""The limits of a small transaction; more rows or more bytes make it a large one."""

_TOGETHER: Final = 4
"""So many batches of a large one are staged together, or more; larger ones each by itself."""

FEW_ROWS: Final = 500
"""So many rows of a kind are written one by one in C; more go through arrays."""

_DEAR_ROWS: Final = 100
"""The same of rows with values that C asks Python about: instants, decimals, lists; and where rows
are staged already, which C does not know of: there a flush looks many up together.
"""

_SLOW_ROWS: Final = 12
"""The same where Python has to do with each row, as of a table with indexes."""

_FIRST_AHEAD: Final = 16
_AHEAD: Final = 500
"""So many rows, first and at most, are looked up together where a transaction has staged others."""
_AHEAD_BYTES: Final = 1 << 20
"""About so many bytes of rows are looked up together."""

_INSERTED, _UPDATED, _DELETED = 1, 2, 3

Written: TypeAlias = "int | tuple[SmallWrites, Tablet, bytes, int]"
"""An outcome of a row: one of these three, or what to ask for it: where a row was put, and by which
statement.
"""


class Run:
    """Rows of one table, operation and shape (which columns they leave out) that were given one
    after the other.
    """

    __slots__ = ("op", "rows", "shape", "writer")

    def __init__(self, writer: RowWriter, op: str, shape: bytes | None, rows: list[Values]) -> None:
        self.writer = writer
        self.op = op
        self.shape = shape
        self.rows = rows


class Ahead(deque[Run]):
    """The runs of a flush that are not written yet, the one whose turn it is in front, and what was
    looked up for rows of theirs.

    Attributes:
        of: whose rows in memory lie above that; others have staged some.
        known: by writer and key the bytes of a row, None for no row, until it is asked for.
        most: so many rows are looked up together.
        at: the row whose turn it is, by its number in its run.
        counted: as `SmallWrites.apply_rows` has it.
    """

    of: SmallWrites | None = None
    most = _FIRST_AHEAD
    at = 0
    counted = True

    def __init__(self, runs: Iterable[Run]) -> None:
        super().__init__(runs)
        self.known: dict[RowWriter, dict[bytes, bytes | None]] = {}

    def begin(self, of: SmallWrites) -> None:
        """Know nothing: what was in memory is staged."""
        if any(self.known.values()):  # looked up for nothing
            self.most = max(1, self.most // 4)
        self.of, self.known = of, {}

    def adapt(self, looked: int, unused: int, size: int) -> None:
        """Look up more the next time where most of it was used, or less, as `size` bytes say."""
        most = self.most // 2 if 2 * unused > looked else self.most * 2
        self.most = max(1, min(most, _AHEAD, looked * _AHEAD_BYTES // max(size, 1)))


class SmallWrites(core.Writes):
    """The rows that one transaction has written and holds in memory.

    Not for two threads at a time; readers may read meanwhile.

    Attributes:
        memories: its entries by tablet.
        too_large: they are more than a row of the commit log should hold, or a row set wants.
    """

    # Each transaction makes one: what begins alike stands in the class.
    _before = 0
    _catalog: int | None = None
    _replacing: frozenset[int] = frozenset()

    def __init__(
        self,
        tables: Tables,
        row: TxnRow,
        reads: ReadSet | None,
        *,
        stored: bool = False,
        transactional: bool,
    ) -> None:
        self._tables = tables
        self._row = row
        self._staged = row.txn_id if stored else None
        self._transactional = transactional
        self._reads = reads
        self._tablets: dict[int, Tablet] = {}
        limits = MAX_ROWS, MAX_BYTES, min(FEW_ROWS, _SLOW_ROWS)
        add_key = None if reads is None else reads.add_key
        self.start(tables.ground, row.snapshot_ts, add_key, limits)

    def anew(self) -> SmallWrites:
        """No rows yet, of the same transaction, which has staged these."""
        own = self._tables, self._row, self._reads
        return SmallWrites(*own, stored=True, transactional=self._transactional)

    @CachedProperty
    def _view(self) -> ReadView:
        return ReadView(self._row.snapshot_ts, self._staged, reads=self._reads)

    def memory(self, tablet_id: int) -> core.MemRowSet | None:
        """Its entries for a tablet; None when there are none."""
        return self.memories.get(tablet_id)

    # -- batches -----------------------------------------------------------------------

    def apply_batch(
        self, table: TableInfo, op: str, batch: pa.RecordBatch, outcome: Outcome
    ) -> None:
        """Take an operation on the rows of a batch, as `arrow_input.chunks` gives it.

        After an error nothing of it counts.
        """
        view = replace(self._view, own=self)
        # All of it is looked up before any of it is written.
        self.put_evaluated(mutations.evaluate(self._tables, table, view, batch, op, outcome))

    def put_evaluated(self, changes: Iterable[Evaluated]) -> None:
        """Take what is looked up already."""
        for part in changes:
            statement = self.step()
            if part.rows is not None and part.rows.keys.n:
                memory = self._of(part.tablet)
                encoded = _encoded(part.tablet, part.rows)
                memory.put_many(part.rows.keys, statement, encoded)
                self.count(part.rows.keys.n, part.rows.keys.nbytes + encoded.data.size)
            if part.deleted is not None and part.deleted.n:
                memory = self._of(part.tablet)
                memory.put_many(part.deleted, statement, None)
                self.count(part.deleted.n, part.deleted.nbytes)
            if part.replaces or part.deleted is not None:
                self._note_replaced(part.tablet)

    # -- single rows -------------------------------------------------------------------

    def apply_rows(
        self, run: Run, outcome: Outcome, *, counted: bool = True, ahead: Ahead | None = None
    ) -> None:
        """Take an operation on a few checked rows, one after the other; together where C leaves
        more than a few of them to Python.

        After an error nothing of it counts.

        Args:
            run: the rows.
            outcome: takes what became of them.
            counted: somebody wants to know whether upserts were inserts or updates; else whole
                rows are written without a look at what is there.
            ahead: of the flush, with this run in front.
        """
        self._before = self.statements
        if ahead is not None:
            ahead.counted = counted
            if ahead.of is not self:
                ahead.begin(self)
        try:
            made = self._one_by_one(run, ahead, counted=counted)
            if made is None:
                self._undo(self._before)
                made = Outcome()
                for batch in run.writer.to_batches(run.op, run.rows):
                    self.apply_batch(run.writer.table, run.op, batch, made)
        except BaseException:
            self._undo(self._before)
            raise
        outcome.add(made)

    def _one_by_one(self, run: Run, ahead: Ahead | None, *, counted: bool) -> Outcome | None:
        """The same; None where C has left too many of them to Python, which began with those."""
        writer, op = run.writer, run.op
        rule, simple, small = RULES[op], not writer.indexes, self._staged is None
        slowly = small and not writer.counts_singly(op)
        puts = simple and op == "upsert" and not counted
        native, reader = PUT if puts else NATIVE[op], writer.reader
        made, written, slow = Outcome(), list[Written](), 0
        if small or (ahead is not None and ahead[0].writer is not writer):
            ahead = None  # as of a table that was altered meanwhile
        for at, values in enumerate(run.rows):
            what = self.write(reader, native, values) if small else 0
            if what:
                written.append(what)
                continue
            slow += slowly
            if slow > _SLOW_ROWS:
                return None
            if puts and MISSING not in values:
                key, row = writer.rows.values(values)
                tablet = writer.tablet_of(values, key)
                self._note_replaced(tablet)  # perhaps
                self._put(tablet, key, row)
                continue
            if ahead is not None:
                ahead.at = at
            error = self._apply(writer, rule, values, made, ahead)
            if error is None:
                continue
            if rule.ignores:
                made.ignored += 1
                continue
            made.add(refusal(writer, op, values, error))
        if counted and written:
            made.add(outcome_of(written))
        return made

    def take(self, writer: RowWriter, op: str, values: Values) -> Written:
        """Take one checked row, unless it is one of many of a kind.

        Returns:
            What became of it, for `outcome_of`; 0: nothing yet, `apply_rows` looks at it.
        """
        native = PUT if op == "upsert" else NATIVE[op]
        if self.many(writer.reader, native):
            return 0
        slowly = bool(writer.indexes)  # C knows of them from then on
        written: Written = self.write(writer.reader, native, values)
        if slowly and written == 0:
            return self._write_with_entries(writer, op, values)
        return written

    @brief
    def _write_with_entries(self, writer: RowWriter, op: str, values: Values) -> int:
        """The same of a row that has entries in indexes."""
        self._before = self.statements
        outcome = Outcome()
        try:
            if self._apply(writer, RULES[op], values, outcome) is not None:
                return 0
        except BaseException:
            self._undo(self._before)
            raise
        return _INSERTED if outcome.inserted else _UPDATED if outcome.updated else _DELETED

    def _apply(
        self,
        writer: RowWriter,
        rule: Rule,
        values: Values,
        outcome: Outcome,
        ahead: Ahead | None = None,
    ) -> TxnkvError | None:
        """Take one row; return the error where it is refused."""
        deletes = rule.there is Effect.GONE
        given = values if deletes else writer.key_of(values)
        key = writer.key(given)
        tablet = writer.tablet(given, key)
        old = self._find(tablet, key) if ahead is None else self._find_ahead(ahead, tablet, key)
        if (rule.absent if old is None else rule.there) is Effect.REFUSED:
            own = self._own(tablet, key)
            earlier = own is not None and own[0] > self._before
            if old is None:
                return not_there(earlier=earlier)
            staged = own is not None or self._has_staged(tablet, key)
            return already_there(earlier=earlier, own=staged)
        row: bytes | None = None
        if not deletes:
            if old is None and MISSING in values:
                whole = writer.with_defaults(values)
                if isinstance(whole, str):
                    return incomplete(whole)
                values = whole
            _, row = writer.rows.values(values, old)
        entries: list[tuple[Tablet, Entry]] = []
        if writer.indexes:
            before = None if old is None else given + writer.indexed(old)
            after = None if row is None else given + writer.indexed(row)
            try:
                for index in writer.indexes:
                    made = index.changes(before, after, self._find)
                    entries += [(index.tablet, entry) for entry in made]
            except AlreadyPresentError as error:
                return error
        if old is not None:
            self._note_replaced(tablet)
        self._put(tablet, key, row)
        for at, entry in entries:
            self._note_replaced(at)
            self._put(at, *entry)
        if deletes:
            outcome.deleted += 1
        elif old is None:
            outcome.inserted += 1
        else:
            outcome.updated += 1
        return None

    def _find(self, tablet: Tablet, key: bytes) -> bytes | None:
        """The bytes of the row with this key, of its own or the snapshot's."""
        own = self._own(tablet, key)
        return lookup.find_row(self._tables, tablet, self._view, key) if own is None else own[1]

    def _has_staged(self, tablet: Tablet, key: bytes) -> bool:
        """Tell whether a row that is there is one that only the transaction has staged."""
        if self._staged is None:
            return False
        return lookup.find_row(self._tables, tablet, ReadView(self._view.snapshot), key) is None

    def _find_ahead(self, ahead: Ahead, tablet: Tablet, key: bytes) -> bytes | None:
        """The same of the row whose turn it is; what is not its own is looked up together with
        those that come next, since each look asks status.db.
        """
        own, writer = self._own(tablet, key), ahead[0].writer
        if own is not None:
            return own[1]
        known = ahead.known.get(writer)
        if known is None or key not in known:
            unused, coming = len(known or ()), self._coming(ahead)
            known = ahead.known[writer] = {}
            if (looked := sum(map(len, coming.values()))) == 1:
                ahead.adapt(1, 0, 1)
                return lookup.find_row(self._tables, tablet, self._view, key)
            for of, keys in coming.items():
                known.update(lookup.find_some(self._tables, of, self._view, keys))
            ahead.adapt(looked, unused, sum([len(row or b"") for row in known.values()]))
        if self._reads is not None:
            self._reads.add_key(tablet.id, key)
        return known.pop(key)

    def _coming(self, ahead: Ahead) -> dict[Tablet, set[bytes]]:
        """The keys of a table's rows from the one whose turn it is, by tablet: of those that are
        written one by one, and not without a look.
        """
        now, found, left = ahead[0], dict[Tablet, set[bytes]](), ahead.most
        writer, at = now.writer, ahead.at
        few = few_rows(writer, self._reads, stored=True)
        for run in islice(ahead, ahead.most):
            unseen = not (ahead.counted or writer.indexes or run.shape) and run.op == "upsert"
            if run.writer is not writer or (run is not now and (len(run.rows) > few or unseen)):
                continue
            for values in islice(run.rows, at if run is now else 0, None):
                given = values if run.op in DELETES else writer.key_of(values)
                key = writer.key(given)
                found.setdefault(writer.tablet(given, key), set()).add(key)
                left -= 1
                if left == 0:
                    return found
        return found

    def get(self, writer: RowWriter, key: Any) -> dict[str, Any] | None:
        """The row with this key, of its own or the snapshot's.

        Raises:
            SchemaError: the key does not fit the table.
            HistoryExpiredError: the snapshot is older than the history.
        """
        row: dict[str, Any] | None = self.read(writer.reader, key)
        if row is not NotImplemented:
            return row
        values = writer.checker["delete"].take(key)
        encoded = writer.key(values)
        found = self._find(writer.tablet(values, encoded), encoded)
        return None if found is None else writer.rows.dict(encoded, found)

    def put_was(self, tablet: Tablet, key: bytes, statement: int) -> int:
        """Return what the PUT of a row was, an insert or an update."""
        own = self.memories[tablet.id].get(key, 0, statement - 1)
        before = lookup.find_row(self._tables, tablet, self._view, key) if own is None else own[1]
        return _INSERTED if before is None else _UPDATED

    def _own(self, tablet: Tablet, key: bytes) -> tuple[int, bytes | None] | None:
        if not self.memories:
            return None
        memory = self.memories.get(tablet.id)
        return None if memory is None else memory.get(key, 0, EVERY_STAMP)

    def _put(self, tablet: Tablet, key: bytes, row: bytes | None) -> None:
        memory = self.memories.get(tablet.id)
        if memory is None:
            memory = self._of(tablet)
        memory.put(key, self.step(), row)
        self.count(1, len(key) + (0 if row is None else len(row)))

    def _note_replaced(self, tablet: Tablet) -> None:
        self.replaces = True
        self._replacing |= {tablet.id}

    def _undo(self, statement: int) -> None:
        """Forget what came after a statement."""
        for id, memory in list(self.memories.items()):
            kept = memory.copy(0, statement)
            if kept.n:
                self.memories[id] = kept
            else:
                del self.memories[id], self._tablets[id]

    def _of(self, tablet: Tablet) -> core.MemRowSet:
        memory = self.memories.get(tablet.id)
        if memory is None:
            version = self._tables.require_writable(tablet)
            self._catalog = version if self._catalog is None else min(version, self._catalog)
            self._tablets[tablet.id] = tablet
            memory = self.memories[tablet.id] = core.MemRowSet(tablet.codec.width)
        return memory

    # -- commit ------------------------------------------------------------------------

    def commit(self) -> SmallCommit:
        """Return the commit that the commit log is to make."""
        sections = []
        for id, memory in self.memories.items():
            if memory.n:  # a signal may have come before its first row
                section: Section = section_of((payload.TABLET, id, memory.serialize(), 0, 0, None))
                sections.append(section)
        validation = partial(
            validate,
            self._tables,
            self._row,
            self._transactional,
            self._catalog,
            self._reads,
            self._tablets,
            self.memories,
        )
        made: SmallCommit = commit_of((self._row.txn_id, sections, validation, None, 0))
        return made

    # -- outgrowing --------------------------------------------------------------------

    def evaluated(self) -> list[Evaluated]:
        """All of it as staging takes it."""
        every = self.replaces and self._staged is None  # C does not tell in which tablet
        return [
            part
            for id, memory in self.memories.items()
            for part in _evaluated(self._tablets[id], memory, every or id in self._replacing)
        ]


def few_rows(writer: RowWriter, reads: ReadSet | None, *, stored: bool) -> int:
    """Return how many rows of one kind are better written one by one."""
    dear = bool(writer.indexes) and not writer.native_entries
    if reads is not None or (dear and not stored):
        return min(FEW_ROWS, _SLOW_ROWS)
    return FEW_ROWS if writer.is_plain and not stored else min(FEW_ROWS, _DEAR_ROWS)


def is_small(batch: pa.RecordBatch, *, stored: bool) -> bool:
    """Return True for what a row of the commit log may hold; for a part of that, as several wait,
    where the transaction is stored.
    """
    by = _TOGETHER if stored else 1
    return bool(by * batch.num_rows <= MAX_ROWS and by * batch.nbytes <= MAX_BYTES)


def outcome_of(written: Sequence[Written]) -> Outcome:
    """The outcome for rows, by what `SmallWrites` said of each."""
    found = [each if isinstance(each, int) else each[0].put_was(*each[1:]) for each in written]
    return Outcome(found.count(_INSERTED), found.count(_UPDATED), found.count(_DELETED))


def refusal(writer: RowWriter, op: str, values: Values, error: TxnkvError) -> Outcome:
    """Return the outcome of a checked row that is refused."""
    key = values if op.startswith("delete") else writer.key_of(values)
    readable = key[0] if len(key) == 1 else key
    return Outcome(errors=[RowError(op, writer.table.name, readable, error)], refused=1)


def _encoded(tablet: Tablet, rows: SortedRows) -> core.RowBytes:
    columns = [rows.batch.column(name) for name in tablet.value_names]
    order = rows.order
    if not columns and order is None:  # without columns the rows have to be counted
        order = core.Rows.range(rows.keys.n)
    return tablet.layout.encode(columns, order)


def _evaluated(tablet: Tablet, memory: core.MemRowSet, replaces: bool) -> Iterator[Evaluated]:
    entries = memory.select(None, None, 0, EVERY_STAMP)
    rows = core.Rows.from_arrow(_where(entries.kinds, 1))
    gone = core.Rows.from_arrow(_where(entries.kinds, 2))
    if rows.n:
        keys = entries.keys.gather(rows)
        values = entries.columns(tablet.layout, range(len(tablet.value_names)), rows)
        columns: dict[str, pa.Array] = dict(zip(tablet.value_names, values, strict=True))
        for i, name in enumerate(tablet.schema.primary_key):
            columns[name] = tablet.codec.decode(keys, i)
        arrays = [columns[name] for name in tablet.schema.names]
        batch = pa.record_batch(arrays, schema=tablet.schema.arrow)
        yield Evaluated(tablet, SortedRows(keys, batch, None), replaces)
    if gone.n:
        yield Evaluated(tablet, None, deleted=entries.keys.gather(gone))


def _where(kinds: pa.UInt8Array, kind: int) -> pa.UInt32Array:
    return pc.indices_nonzero(pc.equal(kinds, kind)).cast(pa.uint32())
