"""Consumer groups: members that share the partitions of topics, and agree anew when one comes.

The members of a group and what is assigned to them live in memory of the server: when it starts
again, they join again. The offsets that they commit are rows of a table.

    Empty
      | join
    PreparingRebalance       who does not join again in time is out
      | all have joined      the next generation begins          ^
    CompletingRebalance      the leader assigns                  | a member comes, goes
      | the leader's sync                                        | or joins anew
    Stable  -----------------------------------------------------+

One round has one generation; who names an earlier one is refused, and joins again. All that waits
here, a join for the others and a sync for the leader's assignment, waits in the thread of its
connection, looks at the time by itself, and ends when the server stops or the client is gone. Of a
client that is gone the member stays, as at a broker, until its session ends.
"""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from txnkv.kafka.api_tables import Code, KafkaError
from txnkv.storage import new_condition, new_lock

EMPTY: Final = "Empty"
_PREPARING: Final = "PreparingRebalance"
_COMPLETING: Final = "CompletingRebalance"
STABLE: Final = "Stable"

_LEAST_SESSION, _MOST_SESSION = 1_000, 1_800_000
_SLICE: Final = 0.25
"""Seconds of a wait, after which it looks whether the server stops, and who is gone."""

_GATHER: Final = 0.5
"""Seconds for which the first members of a group wait for others that begin with them, anew with
each that comes: else each of them would make a round of its own."""

_MOST_MEMBERS: Final = 10_000
_MOST_GROUPS: Final = 10_000
"""Past that those without members are forgotten, whose offsets are rows; others are refused."""


@dataclass
class Member:
    """One member of a group.

    Attributes:
        session, rebalance: seconds without a sign, and for a round, after which it is out.
        protocols: ways to assign that it knows, with what it says for each.
        seen: when it gave a sign.
        joined: it has joined the round that is being prepared.
        waits: its joins that wait; two, while that of a connection that broke off is there yet.
    """

    id: str
    instance: str | None
    client_id: str
    host: str
    session: float
    rebalance: float
    protocols: dict[str, bytes]
    assignment: bytes = b""
    seen: float = field(default_factory=time.monotonic)
    joined: bool = False
    waits: int = 0


class Joined(NamedTuple):
    """A round as its members are told of it.

    Attributes:
        assigned: the leader has assigned already, before it was started again.
    """

    generation: int
    protocol_type: str
    protocol: str
    leader: str
    members: list[Member]
    assigned: bool = False


class JoinRequest(NamedTuple):
    """One member's wish to be in the next round."""

    member_id: str
    instance: str | None
    client_id: str
    host: str
    session_millis: int
    rebalance_millis: int
    protocol_type: str
    protocols: dict[str, bytes]
    names_itself: bool
    """It takes an id that it is told, and joins again under it."""


class ConsumerGroup:
    """One group. Shared by threads.

    Args:
        id: its name.

    Attributes:
        writing: members that write offsets.
    """

    def __init__(self, id: str) -> None:
        self.id = id
        self.state = EMPTY
        self.generation = 0
        self.protocol_type = ""
        self.protocol = ""
        self.leader = ""
        self.members: dict[str, Member] = {}
        self.changed = new_condition()
        self.writing = 0
        self._expected: set[str] = set()
        self._until = self._gathered = 0.0

    # -- join --------------------------------------------------------------------------

    def join(self, asked: JoinRequest, require_client: Callable[[], None]) -> tuple[str, Joined]:
        """Join the next round, and wait for it; return the member's id, and the round.

        Raises:
            KafkaError: the member or what it can do does not fit; MEMBER_ID_REQUIRED has the id
                as its text.
        """
        if not _LEAST_SESSION <= asked.session_millis <= _MOST_SESSION:
            raise KafkaError(Code.INVALID_SESSION_TIMEOUT)
        with self.changed:
            self._expire()
            static = self._static(asked)
            begins = not self.members
            count = len(self.members)
            member = self._admit(asked)
            if static is not None and member is not static and self._is_same(static, asked):
                member.protocols = dict(asked.protocols)
                return member.id, self._told(member)._replace(assigned=member.id == self.leader)
            replaced = static is not None and member is not static  # the leader knows the old one
            if not replaced and self._is_settled(member, asked):
                return member.id, self._told(member)
            member.protocols = dict(asked.protocols)
            self._prepare()
            now = time.monotonic()
            if begins or (now < self._gathered and len(self.members) > count):
                self._gathered = now + _GATHER
            member.joined = True
            before = self.generation
            self._complete_if_all()
            member.waits += 1
            try:
                while self.generation == before:
                    self._wait(require_client)
                    member.seen = time.monotonic()
                    if self.members.get(member.id) is not member:
                        raise self._gone(member)
                    self._complete_if_all()
            finally:
                member.waits -= 1
            return member.id, self._told(member)

    def _admit(self, asked: JoinRequest) -> Member:
        """The member that joins, made where it is a new one."""
        self._require_common(asked)
        id = asked.member_id
        static = self._static(asked)
        if id == "":
            made = f"{asked.client_id or 'member'}-{uuid.uuid4()}"
            if asked.names_itself and asked.instance is None:
                if len(self._expected) >= _MOST_MEMBERS:
                    self._expected.clear()  # who never came; who comes yet asks again
                self._expected.add(made)
                raise KafkaError(Code.MEMBER_ID_REQUIRED, made)
            id = made
            if static is not None:
                self._start_again(static, id)
        elif asked.instance is not None and (static is None or static.id != id):
            raise KafkaError(Code.UNKNOWN_MEMBER_ID if static is None else Code.FENCED_INSTANCE_ID)
        elif id not in self.members and id not in self._expected:
            raise KafkaError(Code.UNKNOWN_MEMBER_ID)
        self._expected.discard(id)
        member = self.members.get(id)
        if member is None:
            if len(self.members) >= _MOST_MEMBERS:
                raise KafkaError(Code.GROUP_MAX_SIZE_REACHED)
            member = self.members[id] = Member(
                id, asked.instance, asked.client_id, asked.host, 0, 0, {}
            )
        member.session = asked.session_millis / 1000
        member.rebalance = max(asked.rebalance_millis, 0) / 1000 or member.session
        member.seen = time.monotonic()
        self.protocol_type = asked.protocol_type
        return member

    def _static(self, asked: JoinRequest) -> Member | None:
        """The member that has the instance of a join."""
        if asked.instance is None:
            return None
        return next((m for m in self.members.values() if m.instance == asked.instance), None)

    def _start_again(self, member: Member, id: str) -> None:
        """Let a static member that was started again take its place, under a new id."""
        del self.members[member.id]
        self.members[id] = replace(member, id=id, joined=False, waits=0)
        if self.leader == member.id:
            self.leader = id
        self.changed.notify_all()

    def _is_same(self, before: Member, asked: JoinRequest) -> bool:
        """Tell whether a static member that was started again changes nothing in the round."""
        return (
            self.state == STABLE
            and self.protocol in asked.protocols
            and before.protocols.get(self.protocol) == asked.protocols[self.protocol]
        )

    def _gone(self, member: Member) -> KafkaError:
        """The answer to a member that is out, or whose place another process has taken."""
        same = [m for m in self.members.values() if m.instance == member.instance]
        taken = member.instance is not None and bool(same)
        return KafkaError(Code.FENCED_INSTANCE_ID if taken else Code.UNKNOWN_MEMBER_ID)

    def _require_common(self, asked: JoinRequest) -> None:
        static = self._static(asked)
        mine = asked.member_id if static is None else static.id
        others = [m for m in self.members.values() if m.id != mine]
        known = set(asked.protocols)
        for other in others:
            known &= set(other.protocols)
        if not known or (others and asked.protocol_type != self.protocol_type):
            raise KafkaError(Code.INCONSISTENT_GROUP_PROTOCOL)

    def _is_settled(self, member: Member, asked: JoinRequest) -> bool:
        """Tell whether a join only asks again for the round of now."""
        if member.protocols != asked.protocols:
            return False
        if self.state == STABLE:
            return member.id != self.leader
        return self.state == _COMPLETING

    def _prepare(self) -> None:
        if self.state == _PREPARING:
            return
        self.state = _PREPARING
        for member in self.members.values():
            member.joined = False
        self._until = time.monotonic() + max(m.rebalance for m in self.members.values())
        self.changed.notify_all()

    def _complete_if_all(self) -> None:
        """Begin the generation when all have joined, or the time of those who have not is over."""
        if self.state != _PREPARING:
            return
        absent = [m for m in self.members.values() if not m.joined]
        if time.monotonic() >= self._until:  # static ones stay until their sessions end
            for member in [m for m in absent if m.instance is None]:
                del self.members[member.id]
            absent = []
        joined = [m for m in self.members.values() if m.joined]
        if absent or not joined:
            return
        if self.writing or time.monotonic() < self._gathered:
            return
        self.generation += 1
        common = set.intersection(*(set(m.protocols) for m in self.members.values()))
        votes = Counter(
            next(name for name in m.protocols if name in common) for m in self.members.values()
        )
        self.protocol = votes.most_common(1)[0][0]
        if self.leader not in {member.id for member in joined}:
            self.leader = joined[0].id
        for member in self.members.values():
            member.assignment = b""
        for member in joined:
            member.seen = time.monotonic()
        self.state = _COMPLETING
        self._until = time.monotonic() + max(m.rebalance for m in self.members.values())
        self.changed.notify_all()

    def _told(self, member: Member) -> Joined:
        members = list(self.members.values()) if member.id == self.leader else []
        return Joined(self.generation, self.protocol_type, self.protocol, self.leader, members)

    # -- in a generation ---------------------------------------------------------------

    def sync(
        self,
        member_id: str,
        instance: str | None,
        generation: int,
        assignments: Mapping[str, bytes],
        require_client: Callable[[], None],
    ) -> bytes:
        """Give the leader's assignments, or wait for them; return the member's own.

        Raises:
            KafkaError: the member or its generation is not that of now.
        """
        with self.changed:
            member = self._require(member_id, instance, generation)
            if self.state == _COMPLETING and member_id == self.leader:
                for each in self.members.values():
                    each.assignment = assignments.get(each.id, b"")
                    if each.joined:
                        each.seen = time.monotonic()
                self.state = STABLE
                self.changed.notify_all()
            while self.state == _COMPLETING:
                self._wait(require_client)
                member.seen = time.monotonic()
                if self.state == _COMPLETING and time.monotonic() >= self._until:
                    # The leader is gone.
                    self._remove(self.leader)
                member = self._require(member_id, instance, generation)
            if self.state != STABLE:
                raise KafkaError(Code.REBALANCE_IN_PROGRESS)
            return member.assignment

    def heartbeat(self, member_id: str, instance: str | None, generation: int) -> None:
        """Take a sign of a member.

        Raises:
            KafkaError: it is to join again.
        """
        with self.changed:
            self._expire()
            self._require(member_id, instance, generation)
            if self.state == _PREPARING:
                raise KafkaError(Code.REBALANCE_IN_PROGRESS)

    def leave(self, member_id: str, instance: str | None) -> str:
        """Take a member out, by its id or its instance; return its id.

        Raises:
            KafkaError: there is none.
        """
        with self.changed:
            for member in self.members.values():
                same = member.instance == instance if instance else member.id == member_id
                if same:
                    if instance and member_id not in ("", member.id):
                        raise KafkaError(Code.FENCED_INSTANCE_ID)
                    self._remove(member.id)
                    return member.id
            self._expected.discard(member_id)
            raise KafkaError(Code.UNKNOWN_MEMBER_ID)

    @contextmanager
    def committing(
        self, member_id: str, instance: str | None, generation: int, *, in_transaction: bool
    ) -> Iterator[None]:
        """Let a member write offsets: no round is over meanwhile, whose members read them.

        Raises:
            KafkaError: it is no member in the generation of now.
        """
        with self.changed:
            self._require_committer(member_id, instance, generation, in_transaction)
            self.writing += 1
        try:
            yield
        finally:
            with self.changed:
                self.writing -= 1
                self._complete_if_all()

    def _require_committer(
        self, member_id: str, instance: str | None, generation: int, in_transaction: bool
    ) -> None:
        self._expire()
        nobody = in_transaction and not member_id and instance is None
        if generation < 0 and (nobody or not self.members):
            return  # of somebody who assigns partitions itself
        self._require(member_id, instance, generation)
        if self.state == _COMPLETING and not in_transaction:
            raise KafkaError(Code.REBALANCE_IN_PROGRESS)

    def _require(self, member_id: str, instance: str | None, generation: int) -> Member:
        found = self.members.get(member_id)
        if instance is not None:
            same = [m for m in self.members.values() if m.instance == instance]
            if same and same[0].id != member_id:
                raise KafkaError(Code.FENCED_INSTANCE_ID)
        if found is None:
            raise KafkaError(Code.UNKNOWN_MEMBER_ID)
        if generation != self.generation:
            raise KafkaError(Code.ILLEGAL_GENERATION)
        found.seen = time.monotonic()
        return found

    # -- who is gone -------------------------------------------------------------------

    def _remove(self, member_id: str) -> None:
        self.members.pop(member_id, None)
        if not self.members:
            self.state, self.leader = EMPTY, ""
            self.generation += 1
            self.changed.notify_all()
        elif self.state == _PREPARING:
            self._complete_if_all()
        else:
            self._prepare()

    def _expire(self) -> None:
        now = time.monotonic()
        for member in list(self.members.values()):
            if not member.waits and now - member.seen > member.session:
                self._remove(member.id)

    def _wait(self, require_client: Callable[[], None]) -> None:
        gathers = self._gathered - time.monotonic()
        self.changed.wait(min(_SLICE, gathers) if gathers > 0 else _SLICE)
        require_client()
        self._expire()

    def look(self) -> tuple[str, list[Member]]:
        """Return the state and the members of now."""
        with self.changed:
            self._expire()
            return self.state, list(self.members.values())


class Groups:
    """The groups of a server that have, or had, members."""

    def __init__(self) -> None:
        self._lock = new_lock()
        self._groups: dict[str, ConsumerGroup] = {}

    def get(self, id: str, *, keep: bool = False) -> ConsumerGroup:
        """Return a group; where there is none an empty one, which is kept if that is said.

        Raises:
            KafkaError: it has no name; or is one more than can be kept.
        """
        if not id:
            raise KafkaError(Code.INVALID_GROUP_ID, "a group has a name")
        with self._lock:
            found = self._groups.get(id) or ConsumerGroup(id)
            if keep:
                if id not in self._groups and len(self._groups) >= _MOST_GROUPS:
                    # Of those that nobody asks for any more, too, the members are gone.
                    self._groups = {at: each for at, each in self._groups.items() if each.look()[1]}
                    if len(self._groups) >= _MOST_GROUPS:
                        raise KafkaError(Code.GROUP_MAX_SIZE_REACHED, "too many groups")
                self._groups[id] = found
            return found

    def find(self, id: str) -> ConsumerGroup | None:
        return self._groups.get(id)

    def forget(self, id: str) -> None:
        with self._lock:
            self._groups.pop(id, None)

    def names(self) -> Iterable[str]:
        with self._lock:
            return list(self._groups)
