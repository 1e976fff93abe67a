"""The native hot path where memory is short, where threads come between, and under sanitizers.

Each allocation of a call is made to fail in turn, by hooks of Python's own tests. The call raises
MemoryError or answers as ever, and what it was called on goes on. The hooks are those of a whole
process, so that is done in one of its own.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from array import array
from collections.abc import Callable
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from threading import RLock
from typing import Any

import apsw
import pyarrow as pa
import pytest

from tests.core.test_delivery import Consumer
from txnkv import core
from txnkv.core import Keys, LayerBlock, LayerRowSet, Layers, LayerStep, MemRowSet, encode_block
from txnkv.core.row_layout import _native_column
from txnkv.storage import clock
from txnkv.storage.sqlite_connection import native_writer
from txnkv.tables import MISSING
from txnkv.topics.ranges import Ranges

ROOT = Path(__file__).parents[2]
TYPES = {
    "k": pa.int64(),
    "s": pa.string(),
    "n": pa.float64(),
    "t": pa.timestamp("us", tz="UTC"),
    "b": pa.binary(),
}
ROW = {"k": 5, "s": "x" * 300, "n": 2.5, "t": datetime(2024, 5, 6, tzinfo=UTC), "b": b"y" * 90}
NO_NUMBER = (1 << 64) - 1
LATEST = 0
SNAPSHOT, TXN = 100, 7
SOURCES = ("common/", "codec/", "log/batch", "log/messages_encode", "rowset/", "memory/", "tablet/",
           "native/")  # fmt: skip
UNDER_SANITIZERS = (
    "tests/core/test_native_memory.py",
    "tests/core/test_row_table.py",
    "tests/core/test_mem_row_set.py",
    "tests/core/test_tablet_layers.py",
    "tests/core/test_shared.py",
    "tests/storage/test_sqlite_writer.py",
    "tests/core/test_holding.py",
    "tests/core/test_delivery.py",
    "tests/coordinator/test_commit_log.py",
    "tests/coordinator/test_low_water_mark.py",
    "tests/remote/test_wire.py",
    "tests/tables/test_short_gets.py",
    "tests/tables/test_short_scans.py",
    "tests/tables/test_key_types.py",
    "tests/tables/test_types.py",
    "tests/tables/test_index_entries.py",
    "tests/tables/test_by_entries.py",
)


def row_table() -> core.RowTable:
    return core.row_table(TYPES, [name for name in TYPES if name != "k"], ["k"], MISSING)


@cache
def key(k: int) -> bytes:
    return core.KeyCodec([pa.int64()]).encode_one((k,))


class Tablet:
    """A row 5 in memory and rows 6 and 8 in a row set, published as a tablet's are."""

    def __init__(self) -> None:
        self.epoch, self.word = array("Q", [1]), array("Q", [10])
        self.shown = array("Q", [10, SNAPSHOT, NO_NUMBER, NO_NUMBER, SNAPSHOT])
        self.layout = core.RowLayout([TYPES[name] for name in TYPES if name != "k"])
        self.value = self.layout.encode_one([ROW[name] for name in TYPES if name != "k"])
        self.memory = MemRowSet(8)
        self.memory.put(key(5), 3, self.value)
        keys = Keys.fixed(key(6) + key(8), 8)
        row_set = LayerRowSet(
            Keys.one(key(6)), Keys.one(key(8)), (5, 5), versioned=False, tombstones=False
        )
        columns = [encode_block(pa.array([ROW[n]] * 2, TYPES[n]), 0) for n in TYPES if n != "k"]
        row_set.put(0, LayerBlock(keys.to_block(0), None, None, columns, None, 0))
        self.layers = Layers(self.layout, self.value, self.memory, 0, [LayerStep(row_set)])
        self.published = core.PublishedRows(self.epoch, self.shown, self.id_of)
        self.begin: Callable[[], Any] = object
        self.put()

    id, width = 1, 8

    def id_of(self, txn: object) -> int:
        return TXN

    def put(self) -> None:
        self.published.put(
            self.epoch[0], self.word, self, *self.layers.addresses, 0, 0,
            lambda: self.begin(), TXN, False,
        )  # fmt: skip


class Entries(Tablet):
    """Of an index, that has none of them so far: two columns, of which the key is as many."""

    width = 0

    def __init__(self, id: int, unique: bool, types: dict[str, pa.DataType]) -> None:
        self.id, rest = id, [*types.values()][1 if unique else 2 :]
        self.epoch, self.word = array("Q", [1]), array("Q", [10])
        self.shown = array("Q", [10, SNAPSHOT, NO_NUMBER, NO_NUMBER, SNAPSHOT])
        self.layout = core.RowLayout(rest)
        self.value = self.layout.encode_one([0] * len(rest))
        self.memory = MemRowSet(0)
        self.layers = Layers(self.layout, self.value, self.memory, 0, [])
        self.published = core.PublishedRows(self.epoch, self.shown, self.id_of)
        self.begin: Callable[[], Any] = object
        self.put()
        table = core.row_table(types, [], [*types][: 1 if unique else 2], MISSING)
        self.reader = core.RowReader(table, None, (self.published, id, self), 0, (), False)


def test_a_reader_that_forgets_its_tablets_while_it_reads() -> None:
    """The read set of a serializable transaction is told in Python, and others run meanwhile."""
    tablet, table = Tablet(), row_table()
    reader = core.RowReader(table, None, (tablet.published, 1, tablet), 3, (), False)
    assert reader.get(5, SNAPSHOT, lambda id, key: reader.forget()) == ROW
    assert reader.get(5, SNAPSHOT) is NotImplemented


@pytest.mark.parametrize("what", ["taken away", "moved"])
def test_layers_that_go_while_a_read_begins(what: str) -> None:
    """LMDB lets others run while it begins a read: a get went on in layers that were gone."""
    tablet = Tablet()
    find = tablet.published.find
    table = row_table()

    def several() -> Any:
        return tablet.published.range(table, key(5), None, core.FEW, False, SNAPSHOT, None)

    assert find(key(6), SNAPSHOT) == find(key(5), SNAPSHOT) == tablet.value
    assert several() == [ROW, ROW | {"k": 6}, ROW | {"k": 8}]

    def begin() -> object:
        if what == "moved":
            tablet.epoch[0] += 1
        else:
            tablet.published.take_away()
        return object()

    tablet.begin = begin
    assert find(key(6), SNAPSHOT) is NotImplemented
    tablet.put()
    assert several() is NotImplemented
    tablet.begin = object
    tablet.put()
    assert len(several()) == 3
    assert find(key(6), SNAPSHOT) == tablet.value
    assert find(key(7), SNAPSHOT) is None


def test_snapshots_that_are_in_memory() -> None:
    """Whatever others commit meanwhile is above them; the latest is asked for."""
    tablet = Tablet()
    find = tablet.published.find
    tablet.word[0] += 2
    assert find(key(5), SNAPSHOT) == find(key(6), SNAPSHOT) == tablet.value
    assert find(key(5), LATEST) is NotImplemented
    assert find(key(5), SNAPSHOT + 1) is NotImplemented
    tablet.shown[0] = NO_NUMBER  # a commit of another process is not on the disk yet
    assert find(key(5), SNAPSHOT) == tablet.value
    tablet.shown[4] = SNAPSHOT - 1
    assert find(key(5), SNAPSHOT) is NotImplemented


class Rows(core.Writes):
    """Those of a transaction, which has a set for each tablet that is asked for."""

    def _of(self, tablet: Tablet) -> None:
        self.memories[tablet.id] = MemRowSet(tablet.width)

    def _undo(self, statement: int) -> None:
        for id, memory in self.memories.items():
            self.memories[id] = memory.copy(0, statement)


def test_indexes_that_are_forgotten_while_a_row_is_decoded() -> None:
    """Instants are made by Python, beside which others alter the table and drop what is old."""
    columns = [[*_native_column(name, TYPES[name], name != "k")] for name in TYPES]
    instant, forgotten = columns[3][8], list[Any]()

    def forget(micros: int) -> Any:
        forgotten.append(reader.forget())
        return instant(micros)

    columns[3][8] = forget
    table = core.RowTable(tuple(map(tuple, columns)), (0,), core.CoreError, MISSING)
    tablet, tables = Tablet(), object()
    texts = Entries(2, True, {"s": pa.string(), "k": pa.int64()})
    reader = core.RowReader(table, tables, (tablet.published, 1, tablet), 3, (), True)
    reader.index(((texts.reader, (1, 0), (1,), True),))
    rows = Rows()
    rows.start((tables, {}, clock, "_reader", "monotonic_micros"), SNAPSHOT, None, (9, 9999, 9))
    for each in (tablet, texts):
        rows._of(each)
    assert rows.write(reader, 2, (5, "text", *[MISSING] * 3)) == 2
    assert forgotten == [None]
    assert {id: each.n for id, each in rows.memories.items()} == {1: 1, 2: 2}


def by_index(reader: core.RowReader) -> Callable[[], Any]:
    """Asks for the rows of three entries, of which one is of no row."""
    entries, codec = (
        Entries(2, False, {"t": pa.string(), "k": pa.int64()}),
        core.KeyCodec([pa.string(), pa.int64()]),
    )
    for k in (5, 6, 9):
        entries.memory.put(codec.encode_one(("x", k)), 3, entries.value)
    low = codec.encode_prefix(("x",))
    bounds = low, core.successor(low)
    return lambda: reader.by_entries(
        entries.published, *bounds, core.FEW, False, SNAPSHOT, len(low)
    )


def test_rows_by_entries_of_an_index() -> None:
    tablet = Tablet()
    reader = core.RowReader(row_table(), None, (tablet.published, 1, tablet), 3, (), False)
    look, wanted = by_index(reader), [ROW, ROW | {"k": 6}, None]
    assert look() == wanted
    tablet.published.take_away()
    assert look() is NotImplemented
    tablet.put()
    assert look() == wanted

    def begin() -> object:
        reader.forget()
        return object()

    tablet.begin = begin
    tablet.put()
    assert look() in (NotImplemented, wanted)
    assert look() is NotImplemented
    with pytest.raises(TypeError, match="Published"):
        reader.by_entries(tablet, None, None, 1, False, 1, 0)
    with pytest.raises(OverflowError):
        reader.by_entries(tablet.published, None, None, 1, False, 1, -1)


# -- memory that is short -------------------------------------------------------------------


def calls() -> dict[str, Callable[[], Any]]:
    """What the hot path calls, each again and again with the same answer."""
    table = row_table()
    values, tablet = tuple(ROW.values()), Tablet()
    row = table.values(values)
    many = MemRowSet(8)
    for k in range(50):
        many.put(key(k), 1, tablet.value)
    section = many.serialize()
    sections = [(1, id, section, 0, 0, None) for id in range(12)]
    check = core.RowCheck(table, lambda row: tuple(row.values()), False, True)
    tables = object()
    places = (0, 8, (b"\xff",)), (0, -1, 1)  # in the first range, and the one bucket
    reader = core.RowReader(table, tables, (tablet.published, 1, tablet), 3, places, False)
    reader.confirm(tablet.epoch[0])
    ground = tables, {"t": reader}, clock, "_reader", "monotonic_micros"

    by_text = by_index(reader)
    late, part = key(99), {"k": 5, "b": b"z" * 300}

    def into_a_set() -> tuple[int, object]:
        made = MemRowSet(8)
        made.apply(section, 4)
        made.put(late, 5, tablet.value)
        made.put(late, 6, None)
        return made.n, made.get(late, 0, 5)

    def added() -> list[Any]:
        taken: list[Any] = []
        add = check.adder(taken, [1e6], taken.append)
        add.add(ROW)
        add.add(values)
        return taken

    lock = RLock()

    def begun() -> Rows:
        rows = Rows()
        rows.start(ground, SNAPSHOT, None, (10, 1 << 20, 10))
        return rows

    def written() -> tuple[Any, ...]:
        """Answers 0 where memory is short: Python is to tell of that."""
        rows = begun()
        made = (
            rows.write(reader, 0, (7, *values[1:])),
            rows.write(reader, 2, check.take(part)),
            rows.write(reader, 3, (5,)),
            rows.write(reader, 4, values),
        )
        if 0 in made:
            raise MemoryError
        found = rows.read(reader, 7)
        return *made[:3], made[3][1:], found

    def called() -> tuple[Any, ...]:
        """The same by calls of a transaction, which answer False then."""
        rows, told, later = begun(), list[Any](), clock.monotonic_micros() + 10**9
        rows.offer(lock, later, told)
        put = rows.put
        done = [put("t", 0, ROW | {"k": 7}), put("t", 2, part), put("t", 3, 5), put("t", 4, ROW)]
        if not all(done):
            raise MemoryError
        found = rows.find("t", 7)
        if found is NotImplemented:
            raise MemoryError
        rows.withdraw()
        return found, [each if isinstance(each, int) else each[1:] for each in told]

    texts = Entries(2, True, {"s": pa.string(), "k": pa.int64()})
    blobs = Entries(3, False, {"b": pa.binary(), "k": pa.int64()})
    indexed = core.RowReader(table, tables, (tablet.published, 1, tablet), 3, (), True)
    indexed.index(((texts.reader, (1, 0), (1,), True), (blobs.reader, (4, 0), (4,), False)))

    versions = [[0, 0, 0], [1, 1, 1], [2, 3, 3], [3, 3, 4], [4, 4, 5]]  # behind each row
    four = [
        (0, (7, "another", *values[2:])),
        (2, (5, "text", *check.take(part)[2:])),
        (1, (6, *values[1:3], None, None)),
        (3, (7,)),
    ]

    def with_entries() -> list[Any]:
        """As `written`; where memory is short a row is there with all of its entries, or not."""
        rows, made = begun(), list[Any]()
        try:
            for op, given in four:
                if not (what := rows.write(indexed, op, given)):
                    raise MemoryError
                made.append(what)
        finally:
            sets = rows.memories
            assert [sets[id].n if id in sets else 0 for id in (1, 2, 3)] in versions
        return made

    packed, told = core.pack(sections, 9), {"a": [1, 2.5, "x", b"y", None, 2**70], "b": {"c": "d"}}

    def held() -> tuple[int, int, object]:
        pins, ids = core.PinSet(), core.IdSet()
        ids.give(0, 40)
        for _ in range(40):
            pins.pin(40)
            if ids.take() is None:
                raise MemoryError  # as if there were none to be had
        holding = core.Holding(pins, ids)
        holding.pin(7)
        return len(pins), len(ids), holding.snapshot

    connection = apsw.Connection(":memory:")
    connection.execute("CREATE TABLE t (a INTEGER PRIMARY KEY, b INTEGER, data BLOB)")
    words = core.SharedWords(bytearray(512))
    native_writer(connection, words).close()  # it finds SQLite's functions

    def committed() -> tuple[int, ...]:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        writer = native_writer(connection, words)
        try:
            begun = writer.begin(0)
            put = writer.append("REPLACE INTO t VALUES (?, ?, ?)", 2**40, 2**50, section)
            return begun, put, writer.commit(None)
        finally:
            writer.close()

    def messages() -> list[Any]:
        columns = [b"v" * 300, None], [None, b"k"], [None, None], [7, 8], [1, 2], [None, (1, 2)]
        found = core.messages(core.MessageFields, *columns, 3, "codec", 5)
        for each in found:
            each._row = {"a": each.offset}
        return [(m.raw, m.key, m.offset, m._row, m.nbytes, m.txn_id, m.codec) for m in found]

    def acknowledged() -> list[Any]:
        consumer, own = Consumer(*range(1000, 1040)), Ranges()
        run = consumer.run(own, end=2000)
        given = [consumer.receive() for _ in range(40)]
        done = [consumer.take(run, offset) for offset in range(1000, 1040, 2)]
        if not all(done):
            raise MemoryError
        assert list(own) == list(consumer.pending)
        return [given, list(own)]

    return {
        "messages and acks one by one": acknowledged,
        "messages of columns": messages,
        "row of a dict": lambda: table.row(ROW),
        "row of a tuple": lambda: table.row(values),
        "bytes of values": lambda: table.values(values),
        "bytes of a key": lambda: table.key(5),
        "dict of bytes": lambda: table.dict(*row),
        "dict of some columns": lambda: table.only(("t", "k")).dict(*row),
        "a set that is filled": into_a_set,
        "a section": many.serialize,
        "a version": lambda: many.get(key(7), 0, 9),
        "a copy": lambda: many.copy(0, 9).serialize(),
        "a payload": lambda: core.pack(sections, 9),
        "its sections": lambda: core.unpack(packed, 9),
        "a message between hosts": lambda: core.wire_unpack(core.wire_pack(told, list), list),
        "what a transaction holds": held,
        "a row that is checked": lambda: check.take(ROW),
        "columns that are missing": lambda: table.missing(check.take(part)),
        "a row over an older one": lambda: table.values(check.take(part), row[1]),
        "rows that are checked": added,
        "bytes of a row of memory": lambda: tablet.published.find(key(5), SNAPSHOT),
        "bytes of a row of a block": lambda: tablet.published.find(key(6), SNAPSHOT),
        "rows of a range": lambda: tablet.published.range(
            table, key(5), key(8), core.FEW, True, SNAPSHOT, many
        ),
        "the first rows": lambda: tablet.published.range(
            table, None, None, 2, False, SNAPSHOT, None
        ),
        "rows by an index": by_text,
        "a row of memory": lambda: reader.get(5, SNAPSHOT),
        "a row of a block": lambda: reader.get(8, SNAPSHOT),
        "a row that is not there": lambda: reader.get(9, SNAPSHOT),
        "rows of a transaction": written,
        "calls of a transaction": called,
        "rows with entries in indexes": with_entries,
        "a write with SQLite": committed,
    }


def fail_each_allocation() -> None:
    import _testcapi  # type: ignore[import-not-found]

    for name, call in calls().items():
        wanted, failed = call(), 0
        for n in range(120):
            _testcapi.set_nomemory(n, n + 1)
            try:
                found = call()
            except MemoryError:
                found = MemoryError
            finally:
                _testcapi.remove_mem_hooks()
            failed += found is MemoryError
            # A read of LMDB that cannot begin leaves the answer to the way through Python.
            assert found in (wanted, MemoryError, NotImplemented), (name, n, found)
        assert call() == wanted, name
        print(f"{name}: {failed} allocations failed")
        assert failed or wanted is None, name


def test_each_allocation_fails_in_turn() -> None:
    if importlib.util.find_spec("_testcapi") is None:
        pytest.skip("this Python comes without its tests")
    # Without an end of the interpreter: Python 3.12 and 3.13 themselves lose references where the
    # making of a function fails, and crash then. So nothing that is called makes one.
    script = (
        "import os, sys; from tests.core.test_native_memory import fail_each_allocation as f; f(); "
        "sys.stdout.flush(); os._exit(0)"
    )
    ran = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("allocations failed") == len(calls())


# -- sanitizers -----------------------------------------------------------------------------

SANITIZE = "-fsanitize=address,undefined"
RUN = """
import ctypes, importlib.util, sys
assert hasattr(ctypes.CDLL(None), "__asan_init"), "the sanitizer is not there"
spec = importlib.util.spec_from_file_location("txnkv._native", sys.argv[1])
sys.modules["txnkv._native"] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
import pytest
code = pytest.main(sys.argv[2:])
if not code and importlib.util.find_spec("_testcapi"):
    from tests.core.test_native_memory import fail_each_allocation
    fail_each_allocation()
print("all of it ran:", int(code))
sys.exit(code)
"""


@pytest.mark.slow
def test_under_the_address_and_undefined_behaviour_sanitizers(tmp_path: Path) -> None:
    compiler = shutil.which("gcc")
    libraries = [
        subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True)
        for name in ("libasan.so", "libstdc++.so.6") if compiler
    ]  # fmt: skip
    paths = [each.stdout.strip() for each in libraries]
    if not compiler or not all(map(os.path.isabs, paths)):
        pytest.skip("no gcc with its sanitizers")
    built = tmp_path / "_native.so"
    sources = [each for part in SOURCES for each in (ROOT / "csrc").glob(f"{part}*.c")]
    flags = "-std=c11 -O1 -g -shared -fPIC -fno-omit-frame-pointer -fno-sanitize-recover=all"
    where = [f"-I{ROOT / 'csrc'}", f"-I{sysconfig.get_path('include')}", "-o", built]
    python = "-DPy_LIMITED_API=0x030B0000"
    subprocess.run([compiler, *flags.split(), SANITIZE, python, *where, *sources], check=True)
    options = ["-q", "-x", "-p", "no:cacheprovider", "-m", "not slow", *UNDER_SANITIZERS]
    ran = subprocess.run(
        [sys.executable, "-c", RUN, str(built), *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {
            "LD_PRELOAD": " ".join(paths),
            "ASAN_OPTIONS": "detect_leaks=0",
            "PYTHONMALLOC": "malloc",
        },
    )  # fmt: skip
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-8000:]
    assert "all of it ran: 0" in ran.stdout
