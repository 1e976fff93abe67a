"""Scripts of transactions that run in turns: who does what, and the answer that it must get.

    1 begin
    2 begin locking=partition        options of new_transaction; `begin large` takes the path of
                                     bulk loads from the start
    1 get 1 -> 10
    1 where value >= 20 -> 2=20
    2 update 2 21
    2 commit
    1 update 2 22 &                  goes on in the background
    1 waits                          and is not answered yet
    1 answers -> ok | TransactionConflictError: key 2
    rows -> 1=10 2=21                what a new snapshot has

Steps stand on lines, or on one with "; " between them. One without an answer must succeed. Two
answers are for snapshot and for serializable; an error is its class, and after a colon what its
message has in it. Each actor holds one transaction on a table of (id, value), and is an object
here or a process of its own.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final

import pyarrow as pa

import txnkv
from tools.children import Children
from txnkv.tables import Operation

__all__ = ["CASTS", "LEVELS", "SCHEMA", "Actor", "Elsewhere", "Player", "play"]

LEVELS: Final = ("snapshot", "serializable")
CASTS: Final = ("small", "large", "small, large", "large, small", "on disk", "elsewhere")
"""Casts for 1 and 2: transactions of a few rows or such as bulk loads are; small ones over rows
that are on disk; or 2 is in another process."""
SCHEMA: Final = txnkv.Schema({"id": "int64", "value": "int64"}, primary_key=["id"])
_ARROW: Final = pa.schema([("id", pa.int64()), ("value", pa.int64())])
_MOMENT: Final = 0.1
"""Seconds after which what has not answered is taken to wait."""

_ELSEWHERE: Final = """
from tools.isolation.interleaving import Player
with txnkv.connect(args[0], create=False) as client:
    say("ready")
    while line := wait():
        if line.startswith("enter "):
            player = Player(client, *line.split()[1:])
            say("ok")
        else:
            say(player.do(line).replace(chr(10), " "))
"""


class Player:
    """Does the lines of one transaction; `large` by default when `size` says so."""

    def __init__(self, client: txnkv.Client, table: str, level: str, size: str = "small") -> None:
        self._client = client
        self._table = client.table(table)
        self._level = level
        self._size = size
        self._large = False
        self._txn: txnkv.Transaction | None = None

    def do(self, line: str) -> str:
        """The answer: "ok", what was read, or the class of an error and its message."""
        verb, *words = line.split()
        try:
            return str(getattr(self, f"do_{verb}")(*words) or "ok")
        except txnkv.TxnkvError as error:
            return f"{type(error).__name__}: {error}"

    @property
    def txn(self) -> txnkv.Transaction:
        assert self._txn is not None, "begin comes first"
        return self._txn

    # -- its life ----------------------------------------------------------------------

    def do_begin(self, *words: str) -> None:
        size = next((word for word in words if "=" not in word), self._size)
        options: dict[str, Any] = dict(word.split("=") for word in words if "=" in word)
        options.setdefault("isolation", self._level)
        self._txn = self._client.new_transaction(**options)
        self._large = size == "large"
        if self._large:
            self._txn.context.ensure_large()  # as if it had outgrown the small path

    def do_commit(self) -> None:
        self.txn.commit()

    def do_rollback(self) -> None:
        self.txn.rollback()

    def do_state(self) -> str:
        return self.txn.state.name

    def do_flush(self) -> None:
        self.txn.flush()

    # -- reading -----------------------------------------------------------------------

    def do_get(self, key: str) -> str:
        row = self.txn.get(self._table, int(key))
        return "-" if row is None else str(row["value"])

    def do_many(self, *keys: str) -> str:
        rows = self.txn.get_many(self._table, [int(key) for key in keys])
        return " ".join("-" if v is None else str(v) for v in rows["value"].to_pylist())

    def do_all(self) -> str:
        return _shown(self.txn.scan(self._table, ordered=True).to_arrow())

    def do_where(self, *words: str) -> str:
        return _shown(self._matching(words))

    def do_first(self, number: str, *words: str) -> str:
        scan = self.txn.scan(self._table, where=_where(words), ordered=True, limit=int(number))
        return _shown(scan.to_arrow())

    def _matching(self, words: tuple[str, ...]) -> pa.Table:
        return self.txn.scan(self._table, where=_where(words), ordered=True).to_arrow()

    # -- writing -----------------------------------------------------------------------

    def do_insert(self, *words: str) -> None:
        self._write("insert", *words)

    def do_upsert(self, *words: str) -> None:
        self._write("upsert", *words)

    def do_update(self, *words: str) -> None:
        self._write("update", *words)

    def do_delete(self, *words: str) -> None:
        self._write("delete", *words)

    def _write(self, op: Operation, key: str, value: str = "0") -> None:
        """A row, or a run of keys `1..9`; in a large transaction as a batch."""
        low, _, high = key.partition("..")
        keys = list(range(int(low), int(high or low) + 1))
        if self._large or high:
            batch = pa.table([keys, [int(value)] * len(keys)], schema=_ARROW)
            self.txn.write(self._table, batch.select(["id"]) if op == "delete" else batch, op)
        elif op == "delete":
            self.txn.delete(self._table, keys[0])
        else:
            row = {"id": keys[0], "value": int(value)}
            getattr(self.txn, op)(self._table, row)

    def do_deletewhere(self, *words: str) -> str:
        """Delete rows as SQL's DELETE does; the answer is the rows it found."""
        found = self._matching(words)
        for key in found["id"].to_pylist():
            self._write("delete", str(key))
        return _shown(found)

    def do_addwhere(self, number: str, *words: str) -> str:
        """Update rows as SQL's UPDATE SET value = value + number does."""
        found = self._matching(words)
        for row in found.to_pylist():
            self._write("update", str(row["id"]), str(row["value"] + int(number)))
        return _shown(found)

    # -- outside of the transaction ----------------------------------------------------

    def do_rows(self) -> str:
        return _shown(self._table.scan(ordered=True).to_arrow())

    def do_plain(self, op: str, key: str, value: str = "0") -> None:
        with self._client.new_session() as session:
            row = int(key) if op == "delete" else {"id": int(key), "value": int(value)}
            getattr(session, op)(self._table, row)

    def do_load(self, op: Operation, keys: str, value: str = "0") -> None:
        """Rows by a batch, outside of a transaction."""
        low, _, high = keys.partition("..")
        found = list(range(int(low), int(high) + 1))
        with self._client.new_session() as session:
            batch = pa.table([found, [int(value)] * len(found)], schema=_ARROW)
            session.write(self._table, batch, op)


def _shown(rows: pa.Table) -> str:
    pairs = zip(rows["id"].to_pylist(), rows["value"].to_pylist(), strict=True)
    return " ".join(f"{id}={value}" for id, value in pairs) or "none"


def _where(words: tuple[str, ...]) -> list[Any] | None:
    """`id >= 5 and value in 7,8`; no words for all rows."""
    conditions: list[Any] = []
    for part in " ".join(words).split(" and ") if words else []:
        column, op, value = part.split()
        values = [int(each) for each in value.split(",")]
        conditions.append((column, op, values if op == "in" else values[0]))
    return conditions or None


# -- actors --------------------------------------------------------------------------------


class Actor:
    """Does lines in turn, or one in the background.

    Args:
        do: of a `Player`, here or `Elsewhere`.
    """

    def __init__(self, do: Callable[[str], str]) -> None:
        self.do = do
        self._thread: threading.Thread | None = None
        self._answer = ""

    def start(self, line: str) -> None:
        """Do a line without waiting for its answer."""

        def run() -> None:
            self._answer = self.do(line)

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def waits(self) -> bool:
        """Tell whether the line has no answer yet; it is given a moment."""
        assert self._thread is not None
        self._thread.join(_MOMENT)
        return self._thread.is_alive()

    def answer(self) -> str:
        """The answer to the line that was started."""
        assert self._thread is not None
        self._thread.join(60)
        assert not self._thread.is_alive(), "it still waits"
        return self._answer


class Elsewhere:
    """A process that has players, one after the other."""

    def __init__(self, children: Children, path: object) -> None:
        self._child = children.start(_ELSEWHERE, path)
        assert self._child.line() == "ready"

    def enter(self, table: str, level: str, size: str = "small") -> None:
        """The next lines are for a new player: see `Player`."""
        assert self.do(f"enter {table} {level} {size}") == "ok"

    def do(self, line: str) -> str:
        self._child.tell(line)
        return self._child.line()


# -- scripts -------------------------------------------------------------------------------


def play(script: str, actors: Mapping[str, Actor], level: str, rows: Callable[[], str]) -> None:
    """Do a script, step by step.

    Args:
        script: see above.
        actors: by the words that steps begin with.
        level: which of two answers counts.
        rows: what a new snapshot has.

    Raises:
        AssertionError: an answer was another; the step is named.
    """
    for number, line in enumerate(script.replace("; ", "\n").strip().splitlines(), 1):
        call, _, answers = (part.strip() for part in line.partition("#")[0].partition("->"))
        if not call:
            continue
        expected = [each.strip() for each in answers.split(" | ")]
        wanted = expected[LEVELS.index(level)] if len(expected) > 1 else expected[0]
        found = _line(call, actors, rows)
        assert _fits(found, wanted), f"step {number}, {line.strip()!r}, was answered {found!r}"


def _line(call: str, actors: Mapping[str, Actor], rows: Callable[[], str]) -> str:
    who, _, what = call.partition(" ")
    if who == "rows":
        return rows()
    actor = actors[who]
    if what == "waits":
        return "ok" if actor.waits() else f"no: {actor.answer()}"
    if what == "answers":
        return actor.answer()
    if what.endswith(" &"):
        actor.start(what.removesuffix(" &"))
        return "ok"
    return actor.do(what)


def _fits(found: str, wanted: str) -> bool:
    name, _, words = wanted.partition(": ")
    kind, _, message = found.partition(": ")
    if re.fullmatch(r"\w+Error", name) or name == "RowErrors":
        return kind == name and re.search(words, message) is not None
    return found == wanted if wanted else not re.fullmatch(r"no|\w+Errors?", kind)
