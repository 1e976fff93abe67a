"""Consumers of a group: processes that share the partitions of a topic, and its positions.

    members       7, 9 and, new, 12     rows of `group_members`, each with its lease
    partitions    0   1   2   3   4     rows of `kafka_offsets`, each with position and member
    were          7   7   7   9   9
    are to be     7   7   9   9   12    computed from the rows, by everybody alike
    now           7   7   -   9   9     7 gave 2 back; 9 takes it, and then gives 4 back

Each member looks at the rows about once a second while it polls, gives back what is not to be its
own, and takes what is and nobody has: each in a transaction that changes the partition's row. It
gives a partition back when the position behind what it has given is committed, or, where nobody
commits, after the keepalive time.

**Fencing.** A commit of positions changes the same rows, if they are this member's and as it knows
them. So of a commit and a handover one is first, and the other one is refused; the successor goes
on at the last position that was committed. A member's number is never given again.

Who is alive is told by leases (`group_members`). Positions are those of Kafka's consumer groups.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Final, Literal, TypeAlias, TypedDict, get_args

from txnkv.client.consumer import Consumer
from txnkv.client.group_members import LATEST_NOTE, GroupClient, Membership, offsets_table
from txnkv.client.topic import Topic
from txnkv.coordinator import TxnState
from txnkv.errors import (
    ClosedError,
    InvalidTxnStateError,
    OffsetOutOfRangeError,
    TopicNotFoundError,
    TransactionConflictError,
    TxnkvError,
    as_index,
    require_count,
    require_number,
    require_text,
)
from txnkv.storage import WhenDropped, clock
from txnkv.topics import HELD_BYTES, Message, ReadIsolation, Start, Waiting, deadline, topic_catalog
from txnkv.transaction import Closing, Transaction

_log = logging.getLogger("txnkv")

Reset: TypeAlias = Literal["earliest", "latest", "none"]
_Row: TypeAlias = Mapping[str, Any]

RESETS: Final = get_args(Reset)
_SETTLED, _UNSETTLED = 1_000_000, 50_000
"""Microseconds between two looks at the rows."""

_PAUSE: Final = 0.05
_LEAVING: Final = 2.0
"""Seconds, at most, for a member that is closed to give its partitions back by itself."""

_MOVED: Final = (
    "went to another member, or its position was moved, before this one committed. Poll again"
)
_TOO_EARLY: Final = (
    "came to this member, or its position was committed, after the transaction had begun, whose "
    "snapshot is from before that. Poll, and then begin the transaction"
)
_BEHIND: Final = "had messages whose attempt failed, in front of those of this commit. Poll again"
_TWICE: Final = "was committed by what was open at a rewind, which gave it again. Poll again"


class GroupOptions(TypedDict, total=False):
    """Options of `Client.consumer`."""

    isolation: ReadIsolation
    reset: Reset
    max_poll_seconds: float
    max_bytes: int


def share(members: Sequence[int], partitions: int) -> dict[int, range]:
    """The partitions that each member is to have: in their order, as many as others, or one more.

    Args:
        members: their numbers, in the order in which they came.
        partitions: how many there are.
    """
    each, more = divmod(partitions, len(members))
    ends = [each * at + min(at, more) for at in range(len(members) + 1)]
    return {member: range(ends[at], ends[at + 1]) for at, member in enumerate(members)}


class GroupConsumer(Closing):
    """A member of a group: it reads its share of a topic's partitions, and commits its positions.

    Made by `client.consumer`. Belongs to one thread at a time, and to the process that made it.
    What is given and not committed is given again, to whoever has the partition then: by the
    transaction that has its effects it is handled once.

    Args:
        client: of the store.
        topic: what to read.
        group: its name.
        isolation: "read_committed" or "read_uncommitted".
        reset: where a partition is begun of which the group has no position, or one that is not
            in the log any more: "earliest", "latest", or "none", an OffsetOutOfRangeError.
        max_poll_seconds: a member that does not poll for so long is out.
        max_bytes: of messages in memory, as `Topic.consumer` has it.

    Raises:
        ValueError: an argument makes no sense.
    """

    def __init__(
        self,
        client: GroupClient,
        topic: Topic,
        group: str,
        isolation: ReadIsolation = "read_committed",
        reset: Reset = "earliest",
        max_poll_seconds: float = 300.0,
        max_bytes: int = HELD_BYTES,
    ) -> None:
        if not isinstance(group, str) or not group:
            raise ValueError(f"a group's name is a non-empty string, not {group!r}")
        require_text("a group's name", group)
        if isolation not in ("read_committed", "read_uncommitted"):
            raise ValueError(f"isolation is read_committed or read_uncommitted, not {isolation!r}")
        if reset not in RESETS:
            raise ValueError(f"reset is one of {', '.join(RESETS)}, not {reset!r}")
        require_count("max_bytes", max_bytes, "bytes")
        require_number("max_poll_seconds", max_poll_seconds)
        if not max_poll_seconds > 0:
            raise ValueError(f"max_poll_seconds is above 0, not {max_poll_seconds!r}")
        self.group = group
        self._client, self._topic = client, topic
        self._isolation, self._reset, self._max_bytes = isolation, reset, max_bytes
        self._offsets = offsets_table(client)
        self._pid = os.getpid()
        self._closed = False
        self._membership = Membership(client, group, topic.name, max_poll_seconds)
        self._reader: Consumer | None = None
        self._known: dict[int, int] = {}  # the positions of this member's rows
        self._leaving: dict[int, tuple[int, int]] = {}  # not read any more: position, since when
        self._given: set[int] = set()  # partitions with messages that are not committed
        self._before: set[int] = set()  # the same, before the last poll
        self._pending: list[tuple[Transaction, dict[int, int]]] = []
        self._rewound = 0  # so many of these were open at a rewind
        self._missed: dict[int, int] = {}  # positions that an attempt failed to commit; -1: all
        self._failed = self._told = False
        self._next_look = 0
        self._membership.join()
        self._out = WhenDropped(self, self._membership.end)
        client.handles.add(self)

    @property
    def partitions(self) -> list[int]:
        """The numbers of the partitions that it reads now."""
        return [] if self._reader is None else self._reader.partitions

    @property
    def _where(self) -> list[tuple[str, str, Any]]:
        return [("group", "=", self.group), ("topic", "=", self._topic.name)]

    def __repr__(self) -> str:
        closed = ", closed" if self._closed else ""
        places = ", ".join(map(str, self.partitions)) or "none"
        return f"<GroupConsumer of {self._topic.name!r}, group {self.group!r}: {places}{closed}>"

    # -- reading -----------------------------------------------------------------------

    def poll(self, *, max_messages: int = 500, timeout: float | None = 1.0) -> list[Message]:
        """The next messages of its partitions; waits for the first of them, and for partitions.

        What was given before an attempt to commit it that failed is given again. What no `commit`
        was called for is not, unless you `rewind`: poll before the function that `client.run`
        repeats, not in it, or let that begin with `rewind`.

        Args:
            max_messages: at most so many.
            timeout: seconds to wait when there is none; None for ever, 0 not at all.

        Raises:
            TransactionConflictError: a partition of which messages were given, and not committed,
                is another member's now. Leave what is not committed: all of it is given again.
            OffsetOutOfRangeError: there is no position to go on at, and `reset` is "none".
            TxnkvError: as `Consumer.poll`.
        """
        self._require_open()
        end = deadline(timeout)
        while True:
            self._follow()
            self._told = False
            now = clock.monotonic_micros()
            wait = max((self._next_look - now) / 1e6, 0)
            left = wait if end is None else max((end - now) / 1e6, 0)
            found = self._read(max_messages, min(wait, left))
            if found:
                self._before = set(self._given)
                self._given |= {message.partition for message in found}
                return found
            if end is not None and clock.monotonic_micros() >= end:
                return []
            self._require_open()

    def _read(self, most: int, wait: float) -> list[Message]:
        if self._reader is None:
            time.sleep(min(wait, _PAUSE))
            return []
        try:
            return self._reader.poll(max_messages=most, timeout=wait)
        except OffsetOutOfRangeError:
            if not self._skip_lost():
                raise
            return self._read(most, wait)

    def _waiting(self, until: int | None) -> Waiting | None:
        """A wait for messages, and for the next look at the members, as `Consumer` has it."""
        return self._topic._waiting(until, self._has_to_look)

    def _has_to_look(self) -> bool:
        self._require_open()
        return clock.monotonic_micros() >= self._next_look

    def _is_pending(self) -> bool:
        return self._reader is not None and self._reader._is_pending()

    def unpoll(self) -> None:
        """Undo the last `poll`: the next one gives its messages again."""
        if self._reader is not None:
            self._reader.unpoll()
        self._given = set(self._before)

    # -- positions ---------------------------------------------------------------------

    def position(self, partition: int) -> int:
        """Return the offset where it goes on in a partition.

        Raises:
            ValueError: it does not read this partition.
        """
        self._require_open()
        if partition in self._leaving:
            return self._leaving[partition][0]
        if self._reader is None:
            raise ValueError(f"this member of group {self.group!r} reads no partition now")
        return self._reader.position(partition)

    def committed(self) -> dict[int, int]:
        """The group's position in each partition of the topic, where there is one."""
        self._require_open()
        rows = self._offsets.scan(columns=["partition", "offset"], where=self._where)
        return {row["partition"]: row["offset"] for row in rows if row["offset"] >= 0}

    def lag(self) -> int:
        """Return the number of offsets from where it is to the ends of its partitions."""
        self._require_open()
        return 0 if self._reader is None else self._reader.lag()

    def seek(self, partition: int, offset: int) -> None:
        """Go on elsewhere in a partition that it reads.

        Raises:
            OffsetOutOfRangeError: the partition ends before this offset.
            ValueError: it does not read it, or the offset is below 0.
        """
        self._require_open()
        self._settle()
        self._give_again()
        partition, offset = as_index("a partition", partition), as_index("offset", offset)
        if self._reader is None or partition not in self.partitions:
            raise ValueError(
                f"this member of group {self.group!r} does not read partition {partition!r}: it "
                f"reads {self.partitions}"
            )
        end = self._topic.end_offsets()[partition]
        if offset > end:
            raise OffsetOutOfRangeError(
                f"topic {self._topic.name!r}, partition {partition} was asked for offset {offset} "
                f"and ends at {end}: seek to that to read what comes"
            )
        self._reader.seek(partition, offset)
        self._given.add(partition)  # the group has not this position

    def rewind(self) -> None:
        """Go back to what the group has committed, and give again what was given behind it. Once an
        open transaction commits that after all, the next `commit` is refused.
        """
        self._require_open()
        self._settle()
        self._rewound = len(self._pending)
        self._go_on_at(self._known)

    def commit(self, txn: Transaction | None = None) -> None:
        """Commit the positions behind all that was given: it is not given again.

        Args:
            txn: with this one, and if it commits; else at once, durably. What it does with the
                messages is done once then. Another attempt, with another one, is fine: positions
                are the same until the next poll.

        Raises:
            TransactionConflictError: a partition is another member's now, or an attempt to commit
                what was polled before has failed: nothing is committed, and `txn` is not to be.
                Poll again. It is retriable the first time; again behind the same poll it is not,
                for no other attempt can succeed.
            TxnkvError: the errors of a transaction.
        """
        self._require_open()
        self._settle()
        missed = self._missed.keys() & self._known
        if behind := sorted(n for n in missed if self._missed[n] < self.position(n)):
            raise self._lost(behind, _TWICE if self._missed[behind[0]] < 0 else _BEHIND)
        self._missed.clear()
        self._failed = False
        wanted = {n: self.position(n) for n in self._known if n in self._given}
        if txn is None:
            self._client.run(lambda own: self._write(own, wanted))
            self._arrived(wanted)
        else:
            self._write(txn, wanted)
            if wanted:
                self._pending.append((txn, wanted))
        self._told = False

    def _write(self, txn: Transaction, positions: dict[int, int]) -> None:
        expected = dict(self._known)
        for _, wanted in self._pending:
            expected |= wanted
        for number, offset in positions.items():
            key = (self.group, self._topic.name, number)
            row = txn.get(self._offsets, key)
            if row is None or not self._is_own(row, expected[number]):
                self._require_topic()
                self._next_look = 0
                self._failed = True  # the next poll gives again what this attempt had
                own = self._is_own(self._offsets.get(key), expected[number])
                raise self._lost([number], _TOO_EARLY if own else _MOVED)
            txn.upsert(self._offsets, row | {"offset": offset, "committed": datetime.now(UTC)})

    def _is_own(self, row: _Row | None, offset: int) -> bool:
        me = self._membership.number
        return row is not None and (row["member"], row["offset"]) == (me, offset)

    def _arrived(self, positions: dict[int, int]) -> None:
        """Positions are committed."""
        for number, offset in positions.items():
            if number in self._known:
                self._known[number] = offset
                if self.position(number) == offset:
                    self._given.discard(number)

    def _settle(self) -> None:
        """See how the transactions ended with which positions were to be committed."""
        while self._pending:
            txn, positions = self._pending[0]
            try:
                state = txn.state
            except TxnkvError:
                state = TxnState.ABORTED  # or not: the row tells, at the next look
            if state in (TxnState.OPEN, TxnState.COMMIT_IN_PROGRESS):
                return
            del self._pending[0]
            again = self._rewound > 0
            self._rewound -= again
            if state in (TxnState.COMMITTED, TxnState.FINALIZE_IN_PROGRESS):
                self._failed |= again
                self._missed |= dict.fromkeys(positions.keys() & self._given if again else (), -1)
                self._arrived(positions)
            else:
                self._failed = True
                for number, offset in positions.items():
                    self._missed[number] = min(offset, self._missed.get(number, offset))

    def _lost(self, numbers: list[int], why: str = _MOVED) -> TransactionConflictError:
        again, self._told = self._told, True
        names = ", ".join(map(str, numbers))
        error = TransactionConflictError(
            f"group {self.group!r}, topic {self._topic.name!r}: partition {names} {why}: what is "
            "not committed is given again, to whoever has the partition"
        )
        error.retriable = not again
        return error

    # -- membership --------------------------------------------------------------------

    def _follow(self) -> None:
        """Have the partitions that are this member's share, as far as others have given them."""
        self._settle()
        self._give_again()
        now = clock.monotonic_micros()
        if now < self._next_look:
            return
        try:
            own, wanted = self._look(now)
        except TopicNotFoundError:
            if self._membership.lasts:
                self._withdraw()
            raise
        finally:
            if self._closed:  # by another thread meanwhile: it may be a member again
                self._membership.end()
        self._require_open()
        self._take(own, wanted, now)

    def _look(self, now: int) -> tuple[dict[int, int], range]:
        """Be a member, and return what `_exchange` does.

        Raises:
            TopicNotFoundError: the topic was dropped. Members are rows by its name, which another
                one may have by now; so who has written one looks, and a drop later on deletes it.
        """
        found: tuple[dict[int, int], range] | None = None
        if self._membership.renew():
            found = self._client.run(lambda txn: self._exchange(txn, now))
        while found is None:
            self._require_open()
            self._require_topic()
            self._membership.join()
            found = self._client.run(lambda txn: self._exchange(txn, now))
        self._require_topic()
        return found

    def _require_topic(self) -> None:
        topic = self._topic.info
        if self._client.topic_info(topic.name).id != topic.id:
            raise topic_catalog.dropped(topic)

    def _exchange(self, txn: Transaction, now: int) -> tuple[dict[int, int], range] | None:
        """Give back and take partitions, by their rows.

        Returns:
            The positions of this member's rows, and what is to be its own; None: it was taken
            for dead.
        """
        me, live = self._membership.number, self._membership.live(txn)
        if me not in live:
            return None
        rows = {row["partition"]: row for row in txn.scan(self._offsets, where=self._where)}
        wanted = share(live, self._topic.partitions)[me]
        late = now - self._client.keepalive_time * 1e6
        begun = [row for row in rows.values() if row["offset"] >= 0]
        # A group that begins at the latest does so everywhere, and notes how many partitions there
        # were: of what is added later nothing is to be missed.
        first = range(0 if begun or self._reset != "latest" else self._topic.partitions)
        own = {}
        for number in sorted({*rows, *wanted, *first}):
            row = rows.get(number, {})
            mine = row.get("member") == me
            _, since = self._leaving.get(number, (0, now))
            if number in wanted and row.get("member") not in live:
                own[number] = self._claim(txn, number, row, begun, me)
            elif number in first and not row:
                self._claim(txn, number, row, begun, None)
            elif mine and number not in wanted and (number not in self._given or since < late):
                txn.upsert(self._offsets, {**row, "member": None})
            elif mine:
                own[number] = row["offset"]
        return own, wanted

    def _claim(
        self, txn: Transaction, number: int, row: _Row, begun: Sequence[_Row], me: int | None
    ) -> int:
        if row.get("offset", -1) < 0:
            latest = self._reset == "latest"
            noted = (LATEST_NOTE.fullmatch(each["metadata"] or "") for each in begun)
            added = latest and any(found is not None and number >= int(found[1]) for found in noted)
            offset = self._begin_of(number, "earliest" if added else self._reset)
            key = {"group": self.group, "topic": self._topic.name, "partition": number}
            row = key | {"offset": offset, "committed": datetime.now(UTC)}
            if latest and not begun:
                row["metadata"] = f"latest of {self._topic.partitions}"
        txn.upsert(self._offsets, {**row, "member": me})
        return int(row["offset"])

    def _take(self, own: dict[int, int], wanted: range, now: int) -> None:
        """Read what is this member's, each partition from where it was.

        Raises:
            TransactionConflictError: what was given of one and is not committed is lost.
        """
        same = self._known.keys() & own.keys()
        if not self._pending:
            same = {n for n in same if own[n] == self._known[n]}
        lost = sorted(self._given - same)
        if lost:
            same = set()
            self._pending.clear()
            self._rewound = 0
            self._given.clear()
            self._missed.clear()
        at = {n: self.position(n) if n in same else own[n] for n in own}
        self._known = {n: self._known[n] if n in same else own[n] for n in own}
        self._leaving = {
            n: (at[n], self._leaving.get(n, (0, now))[1]) for n in own if n not in wanted
        }
        self._read_from({n: at[n] for n in own if n in wanted})
        settled = own.keys() == set(wanted)
        self._next_look = now + (_SETTLED if settled else _UNSETTLED)
        if lost and not self._told:
            raise self._lost(lost)

    def _read_from(self, at: dict[int, int]) -> None:
        if self._reader is None or set(self._reader.partitions) != at.keys():
            if self._reader is not None:
                self._reader.close()
            self._reader = self._reading(at, sorted(at)) if at else None
        for number, offset in at.items():
            assert self._reader is not None
            if self._reader.position(number) != offset:
                self._reader.seek(number, offset)

    def _reading(self, start: Start | dict[int, int], partitions: list[int]) -> Consumer:
        return self._topic.consumer(
            self._isolation, start=start, partitions=partitions, max_bytes=self._max_bytes
        )

    def _give_again(self) -> None:
        """Go back to what is committed, where an attempt failed."""
        if self._failed:
            self._failed = False
            self._go_on_at(self._known)

    def _go_on_at(self, at: dict[int, int]) -> None:
        self._given.clear()
        self._missed.clear()
        self._leaving = {n: (at[n], since) for n, (_, since) in self._leaving.items()}
        self._read_from({n: at[n] for n in self.partitions})

    # -- beginnings --------------------------------------------------------------------

    def _begin_of(self, number: int, reset: Reset) -> int:
        """The offset at which a partition is begun.

        Raises:
            OffsetOutOfRangeError: nowhere.
        """
        if reset == "none":
            raise OffsetOutOfRangeError(
                f"group {self.group!r} has no position in partition {number} of topic "
                f"{self._topic.name!r}, and its reset is 'none': take 'earliest' or 'latest'"
            )
        with self._reading(reset, [number]) as reader:
            return reader.position(number)

    def _skip_lost(self) -> bool:
        """Begin partitions anew whose positions are not in the log; tell whether there was one."""
        reader = self._reader
        assert reader is not None
        if self._reset == "none":
            return False
        with self._reading("earliest", reader.partitions) as first:
            starts = {number: first.position(number) for number in reader.partitions}
        ends = self._topic.end_offsets()
        lost = [n for n in starts if not starts[n] <= reader.position(n) <= ends[n]]
        for number in lost:
            was, to = reader.position(number), self._begin_of(number, self._reset)
            reader.seek(number, to)
            words = (
                "group %r: offset %d of partition %d of topic %r is not in the log, goes on at %d"
            )
            _log.warning(words, self.group, was, number, self._topic.name, to)
        return bool(lost)

    # -- the end -----------------------------------------------------------------------

    def close(self) -> None:
        """Leave the group: what is not committed goes to others at once. Twice is fine."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self._out()
        self._withdraw()
        if self._reader is not None:
            self._reader.close()

    def _withdraw(self) -> None:
        self._membership.end()
        with suppress(TxnkvError):  # others find its lease ended
            self._client.run(self._leave, deadline=_LEAVING)

    def _leave(self, txn: Transaction) -> None:
        where = [*self._where, ("member", "=", self._membership.number)]
        for row in txn.scan(self._offsets, where=where):
            txn.upsert(self._offsets, row | {"member": None})
        self._membership.leave(txn)

    def _require_open(self) -> None:
        if os.getpid() != self._pid:
            raise InvalidTxnStateError(
                f"this member of group {self.group!r} was made by process {self._pid}: make one "
                "in this process"
            )
        if self._closed:
            raise ClosedError(f"this member of group {self.group!r} was closed; make another")
