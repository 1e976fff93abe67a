"""The isolation that a history of transactions had: a checker in the manner of Elle.

    report = check(parse('''
        T1: x[] x+1
        T2: x[] x+2
        T3: x[1 2]
    '''))
    report.names                          {"G-single", "lost-update"}
    report.satisfies("snapshot")          False

After Kingsbury and Alvaro, "Elle: Inferring Isolation Anomalies from Experimental
Observations" (VLDB 2020): lists that are appended to, and registers that get each value once,
tell from what was read alone which version came after which (`versions`); from this come the
dependencies of transactions (`dependencies`), whose cycles are the anomalies (`cycles`).
Whatever is reported has happened; what nobody read may stay unseen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tools.isolation.cycles import cycles
from tools.isolation.dependencies import graph_of
from tools.isolation.histories import Outcome, Txn
from tools.isolation.versions import Anomaly, Key, keys_of, order_lists, order_registers

__all__ = ["ALLOWED", "ORDERS", "Anomaly", "Report", "check"]

ORDERS: Final = ("none", "session", "realtime")

ALLOWED: Final[Mapping[str, frozenset[str]]] = {
    "snapshot": frozenset({"G2-item", "G2-item-session", "G2-item-realtime"}),
    "serializable": frozenset(),
}
"""By isolation, the names of the anomalies that it allows."""


@dataclass(frozen=True)
class Report:
    """The anomalies that were found in a history."""

    anomalies: tuple[Anomaly, ...]

    @property
    def names(self) -> set[str]:
        return {anomaly.name for anomaly in self.anomalies}

    def violations(self, isolation: str) -> list[Anomaly]:
        """Those that "snapshot" or "serializable" isolation does not allow.

        With a history checked in the order of "realtime" these are strong snapshot isolation
        and strict serializability.
        """
        allowed = ALLOWED[isolation]
        return [anomaly for anomaly in self.anomalies if anomaly.name not in allowed]

    def satisfies(self, isolation: str) -> bool:
        return not self.violations(isolation)

    def __str__(self) -> str:
        return "\n".join(map(str, self.anomalies)) or "no anomaly"


def check(history: Sequence[Txn], order: str = "realtime") -> Report:
    """Look for every anomaly that the history shows.

    Args:
        history: transactions of all sessions, in any order.
        order: what must agree with the dependencies besides: "none", "session" (of each
            session's own transactions) or "realtime" (who began after another was answered).

    Raises:
        ValueError: two transactions have one name, a value is written to a key twice, a key
            is both a list and a register, or there is no such order.
    """
    if order not in ORDERS:
        raise ValueError(f"order is one of {', '.join(ORDERS)}, not {order!r}")
    if len({txn.name for txn in history}) < len(history):
        raise ValueError("two transactions have one name")
    keys, found = keys_of(history)
    counted = _counted(history, keys)
    unknown = {txn.name for at, txn in enumerate(history) if not counted[at]}
    found = [anomaly for anomaly in found if not unknown.intersection(anomaly.txns)]
    for key in keys.values():
        found.extend(_read_what_is_not(key, history, counted))
        if key.is_list:
            found.extend(order_lists(key, history, counted))
        else:
            found.extend(order_registers(key, history, counted, order))
        found.extend(_lost_updates(key, history, counted))
    found.extend(cycles(graph_of(keys.values(), history, counted, order), history))
    return Report(tuple(found))


def _counted(history: Sequence[Txn], keys: Mapping[str, Key]) -> list[bool]:
    """Tell which transactions committed: also those without an answer whose writes were read."""
    counted = [txn.outcome is Outcome.COMMITTED for txn in history]
    seen: dict[int, set[int]] = {}
    for key in keys.values():
        for at, values in _read(key):
            writers = {key.writer[value] for value in values if value in key.writer}
            seen.setdefault(at, set()).update(writers)
    work = [at for at, known in enumerate(counted) if known]
    while work:
        for writer in seen.get(work.pop(), ()):
            if not counted[writer] and history[writer].outcome is Outcome.UNKNOWN:
                counted[writer] = True
                work.append(writer)
    return counted


def _read(key: Key) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield what each transaction read of others, in both kinds of key."""
    if key.is_list:
        yield from key.lists.items()
    else:
        for at, value in key.reads.items():
            yield at, () if value is None else (value,)


def _read_what_is_not(
    key: Key, history: Sequence[Txn], counted: Sequence[bool]
) -> Iterator[Anomaly]:
    for at, values in _read(key):
        if not counted[at]:
            continue
        reader = history[at].name
        for place, value in enumerate(values):
            writer = key.writer.get(value)
            if writer is None:
                text = f"{reader} read {value} of {key.name}, which nobody wrote"
                yield Anomaly("garbage-read", text, (reader,))
            elif writer == at:
                text = f"{reader} read {value} of {key.name} before it wrote it"
                yield Anomaly("internal", text, (reader,))
            elif history[writer].outcome is Outcome.ABORTED:
                text = f"{reader} read {value} of {key.name}, by {history[writer].name}, aborted"
                yield Anomaly("G1a", text, (history[writer].name, reader))
            elif place == len(values) - 1 and key.writes[writer][-1] != value:
                text = f"{reader} read {value} of {key.name}, but {history[writer].name} went on"
                yield Anomaly("G1b", text, (history[writer].name, reader))


def _lost_updates(key: Key, history: Sequence[Txn], counted: Sequence[bool]) -> Iterator[Anomaly]:
    """Find lost updates: of those that read one version and wrote the key, all but one are lost."""
    first: dict[int | None, int] = {}
    for at, version in key.reads.items():
        if at in key.writes and counted[at]:
            other = first.setdefault(version, at)
            if other != at:
                names = (history[other].name, history[at].name)
                shown = "-" if version is None else version
                text = f"{' and '.join(names)} both read {shown} of {key.name} and wrote it"
                yield Anomaly("lost-update", text, names)
