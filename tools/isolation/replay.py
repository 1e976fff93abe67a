"""A history against the store's own timestamps: sharper than what reads alone can tell.

Each committed transaction of the history says its snapshot, and its commit timestamp when it
wrote. So there is one right answer to each read, and one set of transactions that may commit:

    not-at-snapshot       a read is not what was committed at or below its snapshot
    overlapping-commits   two wrote one key, and the later did not have the other in its snapshot
    late-snapshot         a snapshot lacks what was answered before the transaction was invoked
    equal-timestamps      two that wrote have one commit timestamp
    read-overwritten      what a serializable transaction read had changed before it committed

A transaction that says no snapshot is taken for its writes alone; keys that were written by one
that committed without saying when are left out.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from tools.isolation.histories import Append, Outcome, Txn, Write
from tools.isolation.versions import Anomaly, Key, keys_of

__all__ = ["replay"]

_OVERLAPPING = "both wrote {key}, and {later} (snapshot {snapshot}) did not see the commit at {at}"


@dataclass
class _Commits:
    """The writers of a key, in the order of commit timestamps, and the key's state after each."""

    stamps: list[int] = field(default_factory=list)
    txns: list[Txn] = field(default_factory=list)
    states: list[tuple[int, ...]] = field(default_factory=list)

    def at(self, snapshot: int) -> tuple[int, ...]:
        place = bisect_right(self.stamps, snapshot)
        return self.states[place - 1] if place else ()


def replay(history: Sequence[Txn], isolation: str = "snapshot") -> list[Anomaly]:
    """Everything that disagrees with the timestamps.

    Args:
        history: of whole transactions, all that wrote to its keys.
        isolation: "snapshot" or "serializable", that all of them had.
    """
    keys, found = keys_of(history)
    writers = sorted(
        (txn for txn in history if txn.outcome is Outcome.COMMITTED and txn.commit is not None),
        key=lambda txn: txn.commit or 0,
    )
    unplaced = {
        op.key
        for txn in history
        if txn.outcome is not Outcome.ABORTED and txn.commit is None
        for op in txn.ops
        if isinstance(op, Append | Write)
    }
    commits = {
        name: _commits_of(key, writers) for name, key in keys.items() if name not in unplaced
    }
    for before, after in pairwise(writers):
        if before.commit == after.commit:
            names = (before.name, after.name)
            found.append(Anomaly("equal-timestamps", f"{names} at {after.commit}", names))
    found.extend(_late_snapshots(history, writers))
    for name, per_key in commits.items():
        found.extend(_overlapping(name, per_key))
        found.extend(_wrong_reads(keys[name], per_key, history, isolation))
    return found


def _commits_of(key: Key, writers: Sequence[Txn]) -> _Commits:
    commits = _Commits()
    state: tuple[int, ...] = ()
    for txn in writers:
        wrote = [
            op.value for op in txn.ops if isinstance(op, Append | Write) and op.key == key.name
        ]
        if wrote:
            state = (*state, *wrote) if key.is_list else (wrote[-1],)
            commits.stamps.append(txn.commit or 0)
            commits.txns.append(txn)
            commits.states.append(state)
    return commits


def _overlapping(key: str, commits: _Commits) -> Iterator[Anomaly]:
    for first, second in pairwise(commits.txns):
        if second.snapshot is not None and second.snapshot < (first.commit or 0):
            text = _OVERLAPPING.format(
                key=key, later=second.name, snapshot=second.snapshot, at=first.commit
            )
            names = (first.name, second.name)
            yield Anomaly("overlapping-commits", f"{' and '.join(names)} {text}", names)


def _wrong_reads(
    key: Key, commits: _Commits, history: Sequence[Txn], isolation: str
) -> Iterator[Anomaly]:
    read: Mapping[int, tuple[int, ...]] = (
        key.lists
        if key.is_list
        else {at: () if value is None else (value,) for at, value in key.reads.items()}
    )
    for at, values in read.items():
        txn = history[at]
        if txn.outcome is not Outcome.COMMITTED or txn.snapshot is None:
            continue
        if values != commits.at(txn.snapshot):
            text = f"read {values} of {key.name} at {txn.snapshot}, it was"
            text = f"{txn.name} {text} {commits.at(txn.snapshot)}"
            yield Anomaly("not-at-snapshot", text, (txn.name,))
        if isolation == "serializable" and txn.commit is not None:
            later = commits.at(txn.commit - 1)
            if later != commits.at(txn.snapshot):
                text = f"{txn.name} read {values} of {key.name}, {later} when it committed"
                yield Anomaly("read-overwritten", text, (txn.name,))


def _late_snapshots(history: Sequence[Txn], writers: Sequence[Txn]) -> Iterator[Anomaly]:
    ended = sorted(
        (txn.completed, txn.commit or 0, txn.name) for txn in writers if txn.completed is not None
    )
    highest = list(accumulate(((commit, name) for _, commit, name in ended), max))
    for txn in history:
        if txn.snapshot is None or txn.invoked is None:
            continue
        place = bisect_right(ended, (txn.invoked - 1, float("inf"), ""))
        commit, name = highest[place - 1] if place else (0, "")
        if txn.snapshot < commit:
            text = f"{txn.name} has {txn.snapshot}, but {name} was answered {commit} before"
            yield Anomaly("late-snapshot", text, (name, txn.name))
