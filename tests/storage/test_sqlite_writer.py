"""A write on SQLite's own functions: what it answers, and what it leaves behind where it fails."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apsw
import pytest

from txnkv.core import SharedWords, SqliteWriter
from txnkv.errors import NotSupportedError
from txnkv.storage.runtime_file import CHANGE, COMMITTED, PENDING
from txnkv.storage.sqlite_connection import CACHE_BYTES, native_writer, open_writer

INSERT = "INSERT INTO t VALUES (?, ?, ?)"


class Written:
    """A database with a table, a connection that writes to it, and its words."""

    def __init__(self, path: Path) -> None:
        path.touch()
        self.connection = open_writer(path, CACHE_BYTES)
        self.connection.execute("CREATE TABLE t (a INTEGER PRIMARY KEY, b INTEGER, data BLOB)")
        self.words = SharedWords(bytearray(512))
        self.writer: SqliteWriter = native_writer(self.connection, self.words)
        self.other = apsw.Connection(str(path))

    def rows(self) -> list[tuple[object, ...]]:
        return self.other.execute("SELECT * FROM t ORDER BY a").fetchall()

    def counts(self) -> tuple[int, ...]:
        return tuple(self.words.load(word) for word in (CHANGE, PENDING, COMMITTED))

    def close(self) -> None:
        self.writer.close()
        self.connection.close()
        self.other.close()


@pytest.fixture
def written(tmp_path: Path) -> Iterator[Written]:
    made = Written(tmp_path / "some.db")
    yield made
    made.close()


def test_rows_are_there_after_the_commit(written: Written) -> None:
    writer = written.writer
    large = bytes(range(256)) * 1000
    assert writer.begin(0) == 0
    assert writer.append(INSERT, 1, -5, b"one") == 0
    assert writer.append(INSERT, 2**62, 2**63 - 1, large) == 0
    assert written.rows() == []
    assert writer.commit(None) < -1  # pages wait in the WAL
    assert written.rows() == [(1, -5, b"one"), (2**62, 2**63 - 1, large)]
    assert written.counts() == (2, 1, 1)


def test_a_commit_of_nothing_leaves_no_pages(written: Written) -> None:
    assert written.writer.begin(0) == 0
    assert written.writer.commit(None) == -1


def test_what_another_statement_inserts_is_in_the_same_write(written: Written) -> None:
    writer = written.writer
    assert writer.begin(0) == 0
    assert writer.append(INSERT, 1, 1, b"") == 0
    assert writer.append("INSERT INTO t VALUES (?1 + 1, ?2, ?3)", 1, 1, b"x") == 0
    written.connection.execute("UPDATE t SET b = 7")
    assert writer.commit(None) < -1
    assert written.rows() == [(1, 7, b""), (2, 7, b"x")]


def test_a_row_that_is_refused_leaves_the_others(written: Written) -> None:
    writer = written.writer
    assert writer.begin(0) == 0
    assert writer.append(INSERT, 1, 1, b"a") == 0
    code = writer.append(INSERT, 1, 1, b"b")
    assert isinstance(apsw.exception_for(code), apsw.ConstraintError)
    assert writer.append(INSERT, 2, 1, b"c") == 0
    assert writer.commit(None) < -1
    assert written.rows() == [(1, 1, b"a"), (2, 1, b"c")]


def test_sql_that_makes_no_sense(written: Written) -> None:
    assert written.writer.begin(0) == 0
    assert written.writer.append("INSERT INTO nowhere VALUES (?, ?, ?)", 1, 1, b"") == 1
    assert written.writer.append(INSERT, 1, 1, b"") == 0
    written.connection.execute("ROLLBACK")


@pytest.mark.parametrize("millis", [0, 50])
def test_a_begin_beside_another_writer(written: Written, millis: int) -> None:
    written.other.execute("BEGIN IMMEDIATE")
    code = written.writer.begin(millis)
    assert isinstance(apsw.exception_for(code), apsw.BusyError)
    assert not written.connection.in_transaction
    written.other.execute("COMMIT")
    assert written.writer.begin(0) == 0
    written.connection.execute("ROLLBACK")


def test_a_row_by_itself(written: Written) -> None:
    put = written.writer.put
    assert put(INSERT, 1, -5, b"one", None, -1) < -1
    assert put(INSERT, 2, 2**63 - 1, bytes(100_000), None, -1) < -1
    assert not written.connection.in_transaction
    assert written.rows() == [(1, -5, b"one"), (2, 2**63 - 1, bytes(100_000))]
    assert written.counts() == (4, 2, 2)


def test_a_row_by_itself_that_cannot_be_written(written: Written) -> None:
    """The numbers come to rest, and the next one is written."""
    put = written.writer.put
    assert put("INSERT INTO nowhere VALUES (?, ?, ?)", 1, 1, b"", None, -1) == 1
    assert written.counts() == (0, 0, 0)
    written.other.execute("BEGIN IMMEDIATE")
    assert put(INSERT, 1, 1, b"", None, -1) & 0xFF == apsw.SQLITE_BUSY
    written.other.execute("COMMIT")
    assert put(INSERT, 1, 1, b"a", None, -1) < -1
    assert isinstance(apsw.exception_for(put(INSERT, 1, 1, b"b", None, -1)), apsw.ConstraintError)
    assert put(INSERT, 2, 1, b"c", None, -1) < -1
    assert written.rows() == [(1, 1, b"a"), (2, 1, b"c")]
    assert written.counts() == (8, 4, 4)


@pytest.mark.parametrize("point", ["status.before_commit", "status.after_commit"])
@pytest.mark.parametrize("alone", [False, True])
def test_a_hook_that_raises(written: Written, point: str, alone: bool) -> None:
    """The numbers come to rest, and what was committed is."""
    writer, seen = written.writer, []

    def hook(name: str) -> None:
        seen.append((name, *written.counts()))
        if name == point:
            raise LookupError(name)

    if not alone:
        assert writer.begin(0) == 0
        assert writer.append(INSERT, 1, 1, b"a") == 0
    with pytest.raises(LookupError, match=point):
        _ = writer.put(INSERT, 1, 1, b"a", hook, -1) if alone else writer.commit(hook)
    committed = point == "status.after_commit"
    assert written.connection.in_transaction is not (committed or alone)
    assert seen[0] == ("status.before_commit", 1, 1, 0)
    assert written.counts() == (2, 1, 1)
    assert written.rows() == ([(1, 1, b"a")] if committed else [])


def test_a_closed_writer_refuses(written: Written) -> None:
    writer = written.writer
    assert writer.begin(0) == 0
    assert writer.append(INSERT, 1, 1, b"") == 0
    assert writer.commit(None) < -1
    writer.close()
    writer.close()
    for call in (
        lambda: writer.begin(0),
        lambda: writer.append(INSERT, 2, 1, b""),
        lambda: writer.commit(None),
        lambda: writer.put(INSERT, 2, 1, b"", None, -1),
    ):
        with pytest.raises(ValueError, match="closed"):
            call()
    assert written.rows() == [(1, 1, b"")]


@pytest.mark.parametrize(
    "given", [("x", 1, b""), (1, None, b""), (1, 1, "text"), (1, 1), (2**63, 1, b"")]
)
def test_arguments_that_make_no_sense(written: Written, given: tuple[Any, ...]) -> None:
    assert written.writer.begin(0) == 0
    with pytest.raises((TypeError, OverflowError)):
        written.writer.append(INSERT, *given)
    with pytest.raises((TypeError, OverflowError)):
        written.writer.put(INSERT, *given, None, -1)
    written.connection.execute("ROLLBACK")


def test_words_that_are_not_there(written: Written) -> None:
    with pytest.raises(IndexError, match="word"):
        native_writer(written.connection, SharedWords(bytearray(8)))


def test_an_sqlite_that_loads_no_extensions(
    written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["txnkv._native"], "sqlite_api", 0)  # also under sanitizers
    monkeypatch.setattr(apsw, "compile_options", ("OMIT_LOAD_EXTENSION",))
    with pytest.raises(NotSupportedError, match="install one of its wheels"):
        native_writer(written.connection, written.words)
