"""The crash driver's scenario of a table that is altered: each change is there or not, as a row is.

Rows are inserted one by one, in small and in large transactions; columns are added, renamed,
widened and dropped between them; flushes and compactions come in between. The child says `done N`
of what it was told is done. After a death the table is as it was after N steps or one more, columns
and rows; whoever goes on does the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Final

import txnkv
from txnkv.client import indexes

TABLE: Final = "changing"
ADDED: Final = ("b", "c", "d", "e")
WIDENED: Final = {1: "int16", 2: "int64"}

Say = Callable[..., None]


@dataclass
class _State:
    """The table after some steps: columns in their order, and rows by column, of its first name;
    the type of its numbers.
    """

    kind: str = "int8"
    names: dict[str, str] = field(default_factory=lambda: {"id": "id", "n": "n", "a": "a"})
    rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def read(self) -> tuple[str, list[str], list[list[Any]]]:
        columns = list(self.names)
        rows = [[row.get(c, c) for c in columns] for row in self.rows]
        return self.kind, list(self.names.values()), rows


def _steps() -> list[tuple[str, Any]]:
    steps: list[tuple[str, Any]] = []
    for number, name in enumerate(ADDED):
        steps += [("small", 2 * number), ("add", name), ("large", 2 * number + 1)]
        steps.append(("drop", "a") if number == 0 else ("rename", ADDED[number - 1]))
        if number in WIDENED:
            steps.append(("widen", WIDENED[number]))
        steps.append(("compact" if number % 2 else "flush", None))
    return [*steps, ("small", 99), ("compact", None)]


STEPS: Final = _steps()


def _after(state: _State, step: tuple[str, Any]) -> _State:
    kind, of = step
    state = deepcopy(state)
    if kind in ("small", "large"):
        row = {column: f"{of} {column}" for column in state.names}
        state.rows.append(row | {"id": of, "n": of})
    elif kind == "add":
        state.names[of] = of
    elif kind == "rename":
        state.names[of] = f"{of}, once"
    elif kind == "drop":
        del state.names[of]
    elif kind == "widen":
        state.kind = of
    return state


def _states() -> list[_State]:
    states = [_State()]
    for step in STEPS:
        states.append(_after(states[-1], step))
    return states


STATES: Final = _states()


def alter(say: Say, path: str) -> None:
    """All steps."""
    client = txnkv.connect(path, create=False)
    schema = txnkv.Schema({"id": "int64", "n": "int8", "a": "string"}, primary_key=["id"])
    client.create_table(TABLE, schema)
    say("made")
    _go_on(client, 0, say)


def _go_on(client: txnkv.Client, first: int, say: Say) -> None:
    table = client.table(TABLE)
    for number, (kind, of) in enumerate(STEPS[first:], first):
        if kind in ("small", "large"):
            row = STATES[number + 1].rows[-1]
            names = STATES[number].names
            with client.transaction() as txn:
                if kind == "large":
                    txn.serialize()
                txn.insert(table, {names[column]: value for column, value in row.items()})
        elif kind == "add":
            table.alter(add={of: txnkv.Column("string", default=of)})
        elif kind == "rename":
            table.alter(rename={of: f"{of}, once"})
        elif kind == "drop":
            table.alter(drop=[of])
        elif kind == "widen":
            table.alter(widen={"n": of})
        elif kind == "flush":
            client.instance.engine.flush()
        else:
            client.compact()
        say("done", number)


def examine(client: txnkv.Client, said: Sequence[str]) -> list[str]:
    """List what is wrong after a death: now, and when somebody has gone on."""
    if "made" not in said:
        return []
    told = sum(line.startswith("done") for line in said)
    found = _read(client)
    there = [number for number, state in enumerate(STATES) if state.read == found]
    if not [number for number in there if told <= number <= told + 1]:
        return [f"after {told} steps and a death the table is {found}"]
    _go_on(client, max(there), lambda *words: None)
    found = _read(client)
    return [] if found == STATES[-1].read else [f"in the end the table is {found}"]


def _read(client: txnkv.Client) -> tuple[str, list[str], list[list[Any]]]:
    rows = client.table(TABLE).scan(ordered=True).to_arrow()
    kind = str(rows.schema.field("n").type)
    return kind, rows.schema.names, [list(row.values()) for row in rows.to_pylist()]


# -- indexes ---------------------------------------------------------------------------

INDEXED: Final = "indexed"
_ROUNDS: Final = 4
_ROWS: Final = 6


def index(say: Say, path: str) -> None:
    """Indexes are made and dropped, over rows that small and large transactions write and move."""
    indexes._FIRST_ROWS = indexes._MOST_ROWS = 2
    client = txnkv.connect(path, create=False)
    schema = txnkv.Schema({"id": "int64", "mail": "string?", "n": "int64"}, primary_key=["id"])
    table = client.create_table(INDEXED, schema)
    for number in range(_ROUNDS):
        for large in (False, True):
            with client.transaction() as txn:
                if large:
                    txn.serialize()
                first = _ROWS * (2 * number + large)
                for id in range(first, first + _ROWS):
                    txn.insert(table, {"id": id, "mail": f"{id}@{number}", "n": id % 3})
                if first:
                    txn.update(table, {"id": 0, "mail": f"0@{first}"})
                    txn.delete(table, first - 1)
            say("written")
        client.create_index(table, "mail", unique=True)
        client.create_index(table, ["n", "mail"])
        say("indexed", number)
        if number % 2:
            client.instance.engine.flush()
            client.drop_index(table, "mail")
            say("dropped", number)


def examine_index(client: txnkv.Client, said: Sequence[str]) -> list[str]:
    """List what is wrong after a death: now, and when the indexes were made again."""
    if INDEXED not in client.tables():
        return ["the table is gone"] if said else []
    table = client.table(INDEXED)
    problems = _index_problems(client)
    rows = list(table.scan())
    for mail, unique in (("mail", True), (["n", "mail"], False)):
        made = client.create_index(table, mail, unique)
        problems += [] if made.state == "ready" else [f"an index is {made}"]
    table.insert({"id": -1, "mail": "-1", "n": 0})
    for row in [*rows, {"id": -1, "mail": "-1", "n": 0}]:
        if table.get_by("mail", row["mail"]) != [row]:
            problems.append(f"an index has {table.get_by('mail', row['mail'])} for {row}")
    table.delete(-1)
    return problems + _index_problems(client)


def _index_problems(client: txnkv.Client) -> list[str]:
    return [problem for problem in client.check().problems if "index by" in problem]


SCENARIOS: Final[dict[str, Callable[..., None]]] = {"alter": alter, "index": index}

EXAMINERS: Final[dict[str, Callable[[txnkv.Client, Sequence[str]], list[str]]]] = {
    "alter": examine,
    "index": examine_index,
}
