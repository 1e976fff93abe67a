"""The order of the versions of each key, as far as a history tells.

Both kinds of history are brought to one form: a version is known by the value whose write made
it (for a list, its last value), None is the version before any write.

    T1: x+1    T2: x+2    T3: x[1 2]        versions of x: None -> 1 -> 2, T3 read 2
    T1: y:=1   T2: y=1 y:=2                 versions of y: None -> 1 -> 2, T2 read 1

A list that was read shows its whole past: the longest read is the order, and what was
committed but is not in it came later. A register shows one value: its order is what
transactions did that read before they wrote, and what ended before another began.

What a transaction reads of its own writes, or again, is no news about others: it is compared
with what the transaction itself knew ("internal") and left out of the rest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from tools.isolation.histories import Append, Outcome, Read, ReadList, Txn, Write

__all__ = ["Anomaly", "Key", "Version", "keys_of", "order_lists", "order_registers"]

Version = int | None


@dataclass(frozen=True)
class Anomaly:
    """Something that should not be.

    Attributes:
        name: as Elle names it; `-session` or `-realtime` at its end when the cycle needs the
            order in which one session, or all, ran their transactions.
        message: the reads and writes that show it.
        txns: names of the transactions, a cycle's in its order.
    """

    name: str
    message: str
    txns: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name}: {self.message}"


@dataclass
class Key:
    """All that is known of one key. Transactions are their positions in the history.

    Attributes:
        writes: the values that each transaction wrote, in order.
        writer: who wrote a value.
        reads: what each transaction found there of others, once a transaction.
        lists: for a list, the whole that was found.
        later: versions that are known to come after a version, not all of them.
    """

    name: str
    writes: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    writer: dict[int, int] = field(default_factory=dict)
    reads: dict[int, Version] = field(default_factory=dict)
    lists: dict[int, tuple[int, ...]] = field(default_factory=dict)
    later: dict[Version, set[int]] = field(default_factory=lambda: defaultdict(set))
    is_list: bool = False

    def wrote(self, at: int, value: int) -> None:
        if value in self.writer:
            raise ValueError(f"{self.name}: {value} is written twice; a history has it once")
        self.writes[at].append(value)
        self.writer[value] = at


def keys_of(history: Sequence[Txn]) -> tuple[dict[str, Key], list[Anomaly]]:
    """Collect who wrote and read each key, and find where a transaction disagrees with itself.

    Raises:
        ValueError: a value is written to a key twice, or a key is both a list and a register.
    """
    keys: dict[str, Key] = {}
    wrong: list[Anomaly] = []
    kinds: dict[str, bool] = {}
    for at, txn in enumerate(history):
        for op in txn.ops:
            is_list = isinstance(op, Append | ReadList)
            if kinds.setdefault(op.key, is_list) != is_list:
                raise ValueError(f"{op.key} is both a list and a register")
            key = keys.setdefault(op.key, Key(op.key, is_list=is_list))
            if isinstance(op, Append | Write):
                key.wrote(at, op.value)
        for name, found, message in _reads_of(txn):
            if message:
                wrong.append(Anomaly("internal", f"{txn.name} {message}", (txn.name,)))
            elif isinstance(found, tuple):
                keys[name].lists[at] = found
            else:
                keys[name].reads[at] = found
    return keys, wrong


def _reads_of(txn: Txn) -> Iterator[tuple[str, tuple[int, ...] | Version, str]]:
    """Each key's first read, less own writes; or the words for one that cannot be."""
    known: dict[str, tuple[int, ...] | Version] = {}
    own: dict[str, tuple[int, ...]] = defaultdict(tuple)  # appended, to a list not known yet
    for op in txn.ops:
        match op:
            case Write(key, value):
                known[key] = value
            case Append(key, value):
                before = known.get(key)
                if isinstance(before, tuple):
                    known[key] = (*before, value)
                else:
                    own[key] += (value,)
            case Read(key, found) | ReadList(key, found):
                mine = own[key]
                if key in known:
                    if found != known[key]:
                        yield key, None, f"read {op}, but had it as {_text(known[key])}"
                elif mine and isinstance(found, tuple) and found[-len(mine) :] != mine:
                    yield key, None, f"read {op}, but had appended {_text(mine)}"
                elif isinstance(found, tuple):
                    yield key, found[: len(found) - len(mine)], ""
                else:
                    yield key, found, ""
                known[key] = found


def _text(value: tuple[int, ...] | Version) -> str:
    if isinstance(value, tuple):
        return f"[{' '.join(map(str, value))}]"
    return "-" if value is None else str(value)


# -- lists ---------------------------------------------------------------------------------


def order_lists(key: Key, history: Sequence[Txn], counted: Sequence[bool]) -> Iterator[Anomaly]:
    """Fill in a list's order and what was read of it.

    Args:
        key: a list; its `reads` and `later` are filled in.
        history: what `key` was made of.
        counted: by transaction, whether it is taken to be committed.
    """
    reads = {at: found for at, found in key.lists.items() if counted[at]}
    longest_at = max(reads, key=lambda at: len(reads[at]), default=None)
    longest = () if longest_at is None else reads[longest_at]
    for at, found in reads.items():
        who = history[at].name
        if len(set(found)) < len(found):
            yield Anomaly("duplicate-elements", f"{who} read {key.name}{_text(found)}", (who,))
        elif found != longest[: len(found)]:
            assert longest_at is not None
            other = history[longest_at].name
            text = f"{who} read {key.name}{_text(found)}, {other} {key.name}{_text(longest)}"
            yield Anomaly("incompatible-order", text, (who, other))
    yield from _dirty_updates(key, history, longest)
    shown: dict[int, list[int]] = defaultdict(list)
    for value in dict.fromkeys(longest):
        if value in key.writer:
            shown[key.writer[value]].append(value)
    for writer, values in shown.items():
        if values != [value for value in key.writes[writer] if value in values]:
            names = (history[writer].name,)
            text = f"{names[0]} appended in another order than {key.name}{_text(longest)}"
            yield Anomaly("incompatible-order", text, names)

    def real(values: Iterable[int]) -> list[int]:
        return [v for v in values if v in key.writer and counted[key.writer[v]]]

    for at, found in reads.items():
        there = real(found)
        key.reads[at] = there[-1] if there else None
    chain = list(dict.fromkeys(real(longest)))
    last: Version = None
    for value in chain:
        key.later[last].add(value)
        last = value
    seen = set(chain)
    for at, values in key.writes.items():
        unseen = [value for value in values if value not in seen]
        if counted[at] and unseen:
            key.later[last].add(unseen[0])
            for first, second in pairwise(unseen):
                key.later[first].add(second)


def _dirty_updates(key: Key, history: Sequence[Txn], order: Sequence[int]) -> Iterator[Anomaly]:
    aborted: int | None = None
    for value in order:
        at = key.writer.get(value)
        if at is not None and history[at].outcome is Outcome.ABORTED:
            aborted = at
        elif at is not None and aborted is not None:
            yield _dirty_update(history, key.name, aborted, at)
            aborted = None


def _dirty_update(history: Sequence[Txn], key: str, aborted: int, at: int) -> Anomaly:
    first, second = history[aborted].name, history[at].name
    text = f"{second} wrote {key} upon what {first} wrote, which aborted"
    return Anomaly("dirty-update", text, (first, second))


# -- registers -----------------------------------------------------------------------------


def order_registers(
    key: Key, history: Sequence[Txn], counted: Sequence[bool], order: str
) -> Iterator[Anomaly]:
    """Fill in a register's order: see `order_lists`; and `order` of `tools.isolation.check`.

    What was read says more than what was written, but when it makes a ring nothing can be
    made of it: then the writes alone give the order.
    """
    for at, found in list(key.reads.items()):
        writer = at if found is None else key.writer.get(found)
        if not counted[at] or writer is None or not counted[writer]:
            del key.reads[at]
            if counted[at] and writer is not None and key.writes.get(at):
                yield _dirty_update(history, key.name, writer, at)
    for with_reads in (True, False):
        key.later.clear()
        for first, second in _register_order(key, history, counted, order, with_reads):
            key.later[first].add(second)
        ring = _ring(key)
        if ring is None:
            break
        text = f"{key.name} went through {' -> '.join(map(str, [*ring, ring[0]]))}"
        names = tuple(history[key.writer[value]].name for value in ring)
        if with_reads:
            yield Anomaly("cyclic-versions", text, names)
    else:
        key.later.clear()
    roots = {value for at, values in key.writes.items() if counted[at] for value in values}
    for values in key.later.values():
        roots -= values
    key.later[None] |= roots


def _register_order(
    key: Key, history: Sequence[Txn], counted: Sequence[bool], order: str, with_reads: bool
) -> Iterator[tuple[Version, int]]:
    spans: list[tuple[Txn, Version, Version]] = []
    for at in sorted(key.writes.keys() | key.reads.keys()):
        if not counted[at]:
            continue
        values = key.writes.get(at, [])
        yield from pairwise(values)
        read = key.reads.get(at)
        if values and read is not None:
            yield read, values[0]
        if values:
            before = read if with_reads and read is not None else values[0]
            spans.append((history[at], before, values[-1]))
        elif with_reads and read is not None:
            spans.append((history[at], read, read))
    for first, second in ordered(spans, order):
        if second is not None and first != second:
            yield first, second


def ordered(
    spans: Sequence[tuple[Txn, Version, Version]], order: str
) -> Iterator[tuple[Version, Version]]:
    """From the last version of each transaction to the first of those next after it."""
    by_name = {txn.name: (first, last) for txn, first, last in spans}
    for before, after in following([txn for txn, _, _ in spans], order):
        yield by_name[before.name][1], by_name[after.name][0]


def following(txns: Sequence[Txn], order: str) -> Iterator[tuple[Txn, Txn]]:
    """Pairs of which the first ended before the second began, none that follow from others.

    Args:
        txns: those that are looked at.
        order: "none", "session" (of one session), or "realtime" (of all).
    """
    if order == "none":
        return
    groups: dict[str | None, list[Txn]] = defaultdict(list)
    for txn in txns:
        if txn.invoked is not None and (order == "realtime" or txn.session is not None):
            groups[None if order == "realtime" else txn.session].append(txn)
    for group in groups.values():
        # Begins come before ends of the same moment: such two ran at once.
        events: list[tuple[int, bool, Txn]] = []
        for txn in group:
            assert txn.invoked is not None
            events.append((txn.invoked, False, txn))
            if txn.completed is not None:
                events.append((txn.completed, True, txn))
        events.sort(key=lambda event: event[:2])
        ended: dict[str, Txn] = {}
        before: dict[str, list[str]] = {}
        for _, is_end, txn in events:
            if is_end:
                for name in before.pop(txn.name):
                    ended.pop(name, None)
                ended[txn.name] = txn
            else:
                before[txn.name] = list(ended)
                for earlier in ended.values():
                    yield earlier, txn


def _ring(key: Key) -> list[int] | None:
    """A ring of versions, each said to come after the one before it; None when there is none."""
    done: set[Version] = set()
    for start in list(key.later):
        path: list[Version] = []
        on_path: set[Version] = set()
        stack: list[tuple[Version, bool]] = [(start, False)]
        while stack:
            version, leaving = stack.pop()
            if leaving:
                path.pop()
                on_path.discard(version)
                done.add(version)
            elif version in on_path:
                return [value for value in path[path.index(version) :] if value is not None]
            elif version not in done:
                path.append(version)
                on_path.add(version)
                stack.append((version, True))
                stack.extend((after, False) for after in key.later.get(version, ()))
    return None
