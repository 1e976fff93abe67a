"""A table that is altered, as a model of dicts; and a process that uses the store too."""

from __future__ import annotations

import copy
import multiprocessing
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import txnkv
from tests import internals

SMALL, INT, TEXT = "int8", "int64", "string"
VALUES: dict[str, list[Any]] = {
    SMALL: [-3, 0, 5, 99],
    INT: [-3, 0, 5, 99, 2**40],
    TEXT: ["", "a", "bé"],
}


@dataclass
class Field:
    """A column of the model; `id` stays when it is renamed.

    Attributes:
        fill: the value in rows from before it.
    """

    id: int
    name: str
    type: str
    default: Any
    fill: Any = None

    def __post_init__(self) -> None:
        self.fill = self.default

    @property
    def column(self) -> txnkv.Column:
        return txnkv.Column(self.type, nullable=True, default=self.default)


Added = tuple[str, str, Any]
"""Name, type and default of a new column."""

Rows = dict[int, dict[int, Any]]
"""By key, values by the number of the column that they were written to."""


@dataclass
class Model:
    """A table at one instant.

    Attributes:
        altered: how often it was.
        changes: by key, how often its row was changed.
    """

    fields: list[Field]
    rows: Rows = field(default_factory=dict)
    next_id: int = 0
    altered: int = 0
    changes: Counter[int] = field(default_factory=Counter)

    def copy(self) -> Model:
        return copy.deepcopy(self)

    @property
    def names(self) -> list[str]:
        return ["id", *(each.name for each in self.fields)]

    def row(self, key: int) -> dict[str, Any] | None:
        """The row as it is read."""
        values = self.rows.get(key)
        if values is None:
            return None
        read = {each.name: values.get(each.id, each.fill) for each in self.fields}
        return {"id": key, **read}

    def all(self) -> list[dict[str, Any]]:
        return [row for key in sorted(self.rows) if (row := self.row(key)) is not None]

    def apply(self, op: str, key: int, given: dict[str, Any]) -> bool:
        """Do an operation; False when it is refused."""
        there = self.rows.get(key)
        if op != "upsert" and (op == "insert") is (there is not None):
            return False
        self.changes[key] += 1
        if op == "delete":
            del self.rows[key]
            return True
        self.rows[key] = {
            each.id: given.get(
                each.name, each.default if there is None else there.get(each.id, each.fill)
            )
            for each in self.fields
        }
        return True

    def alter(
        self,
        add: list[Added],
        rename: dict[str, str],
        drop: list[str],
        widen: dict[str, str],
        default: dict[str, Any],
    ) -> None:
        kept = [each for each in self.fields if each.name not in drop]
        for each in kept:
            each.type = widen.get(each.name, each.type)
            each.default = default.get(each.name, each.default)
            each.name = rename.get(each.name, each.name)
        for name, kind, default in add:
            kept.append(Field(self.next_id, name, kind, default))
            self.next_id += 1
        self.fields = kept
        self.altered += 1


# -- the other process -----------------------------------------------------------------


def serve(pipe: Any) -> None:
    """Answer calls until the pipe ends: a store is opened by its path, and used by one client."""
    client: txnkv.Client | None = None
    while True:
        try:
            call, *arguments = pipe.recv()
        except EOFError:
            return
        try:
            if call == "open":
                client = txnkv.connect(arguments[0], history=arguments[1])
                pipe.send(None)
                continue
            assert client is not None
            pipe.send(_answer(client, call, arguments))
            if call == "close":
                client = None
        except txnkv.TxnkvError as error:
            pipe.send(error)


def _answer(client: txnkv.Client, call: str, arguments: list[Any]) -> Any:
    table = client.table("t")
    if call == "write":
        op, row = arguments
        with client.new_session() as session:
            getattr(session, op)("t", row)
    elif call == "alter":
        table.alter(*arguments)
    elif call == "flush":
        internals.flush(client)
    elif call == "compact":
        internals.compact(client)
    elif call == "read":
        return table.scan(ordered=True).to_arrow().to_pylist()
    elif call == "get":
        return [table.get(key) for key in arguments]
    elif call == "tokens":
        return [token.open(client).to_arrow().to_pylist() for token in arguments]
    elif call == "close":
        client.close()
    return None


class Other:
    """The process, as the test calls it."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def __call__(self, *call: Any) -> Any:
        self._pipe.send(call)
        answer = self._pipe.recv()
        if isinstance(answer, txnkv.TxnkvError):
            raise answer
        return answer

    def end(self) -> None:
        self._pipe.close()
        self._process.join(30)
