"""Histories: what transactions did, when, and how each ended; as a text that people can read.

One line a transaction. Every part before the colon but the name may be left out:

    T3 @p1 1000-1250 s=40 c=44 ok: x+5 x[1 5] y=- y:=7

    T3           its name
    @p1          the session (thread, process) that ran it
    1000-1250    when it was invoked and when its end was answered, on one clock; `1000-` when
                 nobody was answered
    s=40 c=44    its snapshot and its commit timestamp, as the store named them
    ok           committed; `fail`: it certainly did not; `info`: nobody knows
    x+5          5 is appended to list x            x:=7    register x is set to 7
    x[1 5]       list x is read, x[] is empty       x=7     register x is read, x=- is absent

A value is written to a key once in a history, else nobody could tell who wrote what was read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from time import monotonic_ns
from typing import Final

__all__ = [
    "Append",
    "Op",
    "Outcome",
    "Read",
    "ReadList",
    "Recording",
    "Txn",
    "Write",
    "dump",
    "parse",
    "record",
]


class Outcome(Enum):
    COMMITTED = "ok"
    ABORTED = "fail"
    UNKNOWN = "info"


@dataclass(frozen=True, slots=True)
class Append:
    """A value goes to the end of a list."""

    key: str
    value: int

    def __str__(self) -> str:
        return f"{self.key}+{self.value}"


@dataclass(frozen=True, slots=True)
class Write:
    """A register gets a value."""

    key: str
    value: int

    def __str__(self) -> str:
        return f"{self.key}:={self.value}"


@dataclass(frozen=True, slots=True)
class ReadList:
    """A list is read; absent is empty."""

    key: str
    values: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.key}[{' '.join(map(str, self.values))}]"


@dataclass(frozen=True, slots=True)
class Read:
    """A register is read; None when absent."""

    key: str
    value: int | None

    def __str__(self) -> str:
        return f"{self.key}={'-' if self.value is None else self.value}"


Op = Append | Write | ReadList | Read


@dataclass(frozen=True, slots=True)
class Txn:
    """One transaction of a history.

    Attributes:
        invoked, completed: of one clock, in any unit; None when it was not recorded, and
            `completed` also when nobody was answered.
        snapshot, commit: timestamps that the store named.
    """

    name: str
    ops: tuple[Op, ...]
    outcome: Outcome = Outcome.COMMITTED
    session: str | None = None
    invoked: int | None = None
    completed: int | None = None
    snapshot: int | None = None
    commit: int | None = None

    def __str__(self) -> str:
        words = [self.name]
        if self.session is not None:
            words.append(f"@{self.session}")
        if self.invoked is not None:
            words.append(f"{self.invoked}-{'' if self.completed is None else self.completed}")
        if self.snapshot is not None:
            words.append(f"s={self.snapshot}")
        if self.commit is not None:
            words.append(f"c={self.commit}")
        words.append(self.outcome.value)
        return f"{' '.join(words)}: {' '.join(map(str, self.ops))}"


# -- text ----------------------------------------------------------------------------------

_OP: Final = re.compile(
    r"(?P<key>[A-Za-z_]\w*)"
    r"(?:\+(?P<append>-?\d+)|:=(?P<write>-?\d+)|=(?P<read>-|-?\d+)|\[(?P<list>[-\d ]*)\])(?:\s+|$)"
)
_HEAD: Final = re.compile(
    r"@(?P<session>\S+)|(?P<invoked>\d+)-(?P<completed>\d*)"
    r"|s=(?P<snapshot>\d+)|c=(?P<commit>\d+)|(?P<outcome>ok|fail|info)"
)


def dump(history: Iterable[Txn]) -> str:
    """The text of a history, that `parse` reads."""
    return "".join(f"{txn}\n" for txn in history)


def parse(text: str) -> list[Txn]:
    """The history of a text; empty lines and what follows a # are left out.

    Raises:
        ValueError: a line is none of a history.
    """
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return [_parse_line(line) for line in lines if line]


def _parse_line(line: str) -> Txn:
    head, colon, rest = line.partition(": ")
    name, *words = head.rstrip(":").split()
    if not colon and not head.endswith(":"):
        raise ValueError(f"no colon after the transaction's name: {line!r}")
    txn = Txn(name, tuple(_parse_ops(rest.strip(), line)))
    for word in words:
        found = _HEAD.fullmatch(word)
        if found is None:
            raise ValueError(f"{word!r} is no part of the head of a transaction: {line!r}")
        match found.lastgroup:
            case "session":
                txn = replace(txn, session=found["session"])
            case "outcome":
                txn = replace(txn, outcome=Outcome(found["outcome"]))
            case "snapshot":
                txn = replace(txn, snapshot=int(found["snapshot"]))
            case "commit":
                txn = replace(txn, commit=int(found["commit"]))
            case _:
                end = int(found["completed"]) if found["completed"] else None
                txn = replace(txn, invoked=int(found["invoked"]), completed=end)
    return txn


def _parse_ops(text: str, line: str) -> Iterator[Op]:
    at = 0
    while at < len(text):
        found = _OP.match(text, at)
        if found is None:
            raise ValueError(f"{text[at:]!r} begins with no operation: {line!r}")
        key, at = found["key"], found.end()
        if found["append"] is not None:
            yield Append(key, int(found["append"]))
        elif found["write"] is not None:
            yield Write(key, int(found["write"]))
        elif found["read"] is not None:
            yield Read(key, None if found["read"] == "-" else int(found["read"]))
        else:
            yield ReadList(key, tuple(map(int, found["list"].split())))


# -- recording -----------------------------------------------------------------------------


@dataclass
class Recording:
    """A transaction that is under way; say what it does with `did`, its end with the fields."""

    ops: list[Op] = field(default_factory=list)
    outcome: Outcome = Outcome.UNKNOWN
    snapshot: int | None = None
    commit: int | None = None

    def did(self, *ops: Op) -> None:
        self.ops.extend(ops)

    def committed(self, commit: int | None = None) -> None:
        self.outcome, self.commit = Outcome.COMMITTED, commit

    def aborted(self) -> None:
        self.outcome = Outcome.ABORTED


@contextmanager
def record(history: list[Txn], session: str) -> Iterator[Recording]:
    """Time a transaction and put it at the end of `history`, also when it raises.

    The clock is the machine's monotonic one, the same in all its processes. Lists of several
    threads may be one list.
    """
    running = Recording()
    invoked = monotonic_ns()
    try:
        yield running
    finally:
        known = running.outcome is not Outcome.UNKNOWN
        txn = Txn(
            f"{session}_{len(history)}",
            tuple(running.ops),
            running.outcome,
            session,
            invoked,
            monotonic_ns() if known else None,
            running.snapshot,
            running.commit,
        )
        history.append(txn)
