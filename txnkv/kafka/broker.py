"""The one broker that a store is to Kafka's clients: its state, and who may do what.

    listener     a thread for each connection: a request, its answer, the next
    broker       the store, its topics by name, the producers that are known
    *_requests   the answers, by kind

It opens the store as any process does, and holds nothing that has to outlive it: what was
acknowledged is in the store, in topics and in two tables that any client reads:

    kafka_offsets      group, topic, partition -> committed offset, of Python's groups too
    transaction_names  transactional id -> producer id, epoch, its last transaction, which the next
                       server goes on with
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa

from txnkv.client import Client, Table, offsets_table
from txnkv.client import connect as connect_here
from txnkv.errors import AuthenticationError, TopicNotFoundError
from txnkv.kafka.api_tables import Code, KafkaError
from txnkv.kafka.consumer_groups import Groups
from txnkv.kafka.transactional_ids import TransactionalIds
from txnkv.kafka.wire_codec import KafkaRequest
from txnkv.remote import Right
from txnkv.server import EVERYBODY, About, ScramExchange, StoredUser, User, Users
from txnkv.storage import new_condition, new_event, new_lock
from txnkv.topics import Partition, Sender, TopicEngine, TopicInfo
from txnkv.transaction import Transaction

NODE: Final = 0
"""The number of the one broker."""

(_READ, _WRITE, _CREATE, _DELETE, _ALTER, _DESCRIBE, _CLUSTER, _SEE, _SET, _IDEMPOTENT) = range(
    3, 13
)
OPERATIONS: Final[dict[str, dict[Right, tuple[int, ...]]]] = {
    "topic": {
        "read": (_READ, _DESCRIBE, _SEE),
        "write": (_WRITE, _DESCRIBE),
        "admin": (_CREATE, _DELETE, _ALTER, _DESCRIBE, _SEE, _SET),
    },
    "group": {"read": (_READ, _DESCRIBE), "admin": (_DELETE,)},
    "cluster": {
        "read": (_DESCRIBE, _SEE),
        "write": (_IDEMPOTENT,),
        "admin": (_CREATE, _ALTER, _CLUSTER, _DESCRIBE, _SEE, _SET),
    },
}
"""Kafka's operations that a right allows on a thing, by their numbers."""

UNSAID: Final = -(1 << 31)
"""Operations that nobody asked for."""

_WORK_BYTES: Final = 256 << 20

_SENDERS: Final = 1000
"""So many idempotent producers are remembered in memory; the store knows the others."""


class ByteRoom:
    """Memory that all connections share for what is large.

    Who finds none waits, but for an owner who has none yet: one who keeps all of it, or is slow,
    holds up itself alone.

    Args:
        most: bytes, about; and for each owner more, as much as a single hold has.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._used: Counter[str] = Counter()
        self._changed = new_condition()

    def change(self, owner: str, before: int, after: int) -> None:
        """Let a hold of `before` bytes have `after`; one that has any never grows."""
        with self._changed:
            while before == 0 and self._used[owner] and self._used.total() + after > self._most:
                self._changed.wait()
            self._used[owner] += after - before
            if not self._used[owner]:
                del self._used[owner]
            if after < before:
                self._changed.notify_all()


class MemoryHold:
    """The memory of a room that one request has; nothing where it was not asked for.

    Args:
        room: of all connections.
        owner: tells whose it is, when it is taken.
    """

    def __init__(self, room: ByteRoom, owner: Callable[[], str]) -> None:
        self._room = room
        self._owner = owner
        self._of = ""
        self._has = 0

    def take(self, size: int) -> None:
        """Wait for memory, where the request has none; it never waits with some in its hand."""
        if not self._has and size:
            self._of = self._owner()
            self._room.change(self._of, 0, size)
            self._has = size

    def keep(self, size: int) -> None:
        """Give back all but so much."""
        if self._has > size:
            self._room.change(self._of, self._has, size)
            self._has = size


@dataclass
class Peer:
    """One connection.

    Attributes:
        host, port: where the client finds the server again: the address at which it has come, by
            the name that TLS tells; or what the server was given to tell.
        remote: the client's address.
        room: of memory for what requests become; `work` is what its request has of that.
        user: None before it has said who it is.
        entry: the user's in the file of users, as it was then.
        mechanism: of the handshake that has begun.
        scram: the log in that has begun.
        closing: the server stops, or the connection is gone.
        has_hung_up: tells whether the client has closed the connection, as seen from here.
        plain: producers without numbers, by the id of their topic.
    """

    host: str
    port: int
    remote: str
    room: ByteRoom
    user: User | None
    client_id: str = ""
    mechanism: str = ""
    scram: ScramExchange | None = None
    entry: StoredUser | None = None
    closing: threading.Event = field(default_factory=new_event)
    has_hung_up: Callable[[], bool] = lambda: False
    plain: dict[int, Sender] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.work = self.hold(self.room)

    @property
    def owner(self) -> str:
        """The user; the client's address where nobody says who it is."""
        return self.remote if self.user is None or self.user is EVERYBODY else self.user.name

    def hold(self, room: ByteRoom) -> MemoryHold:
        """Return a hold of this client."""
        return MemoryHold(room, lambda: self.owner)

    def may(self, right: Right, topic: str | None = None) -> bool:
        """Tell whether the user has a right, to a topic or at all."""
        about = None if topic is None else About("topic", topic)
        return self.user is not None and self.user.may(right, about)

    def operations(self, kind: str, asked: bool | None, topic: str | None = None) -> int:
        """Return the bits of what the user may do with a topic, or all groups, or the cluster."""
        if not asked:
            return UNSAID
        rights = [right for right in OPERATIONS[kind] if self.may(right, topic)]
        allowed = {each for right in rights for each in OPERATIONS[kind][right]}
        return sum(1 << each for each in allowed)

    def require(self, right: Right, topic: str) -> None:
        """Refuse what the user may not do.

        Raises:
            KafkaError: it is so.
        """
        if not self.may(right, topic):
            raise KafkaError(
                Code.TOPIC_AUTHORIZATION_FAILED, f"no right to {right} to topic {topic!r}"
            )

    def require_running(self) -> None:
        """End a wait when the server stops.

        Raises:
            ConnectionAbortedError: it does.
        """
        if self.closing.is_set():
            raise ConnectionAbortedError

    def require_client(self) -> None:
        """End a wait when the server stops, or nobody is there any more for its answer.

        Raises:
            ConnectionAbortedError: it is so.
        """
        self.require_running()
        if self.has_hung_up():
            raise ConnectionAbortedError("the client has hung up")


Handler = Callable[["Broker", Peer, KafkaRequest], Mapping[str, Any] | None]


@dataclass
class _Known:
    """An idempotent producer that sends to a topic; one request at a time."""

    sender: Sender
    lock: threading.Lock


class Broker:
    """The store as a broker.

    Args:
        path: the store's directory.
        users: those who may; None: everybody may all.
        new_partitions: of topics that are made by being asked for; 0: none are.

    Attributes:
        ids: producers with transactions.
        groups: of consumers.
        work: memory for what requests become: messages without their compression, answers.
    """

    def __init__(self, path: str, users: Users | None, new_partitions: int = 0) -> None:
        self.users = users
        self.new_partitions = new_partitions
        self.client: Client = connect_here(path, create=False)
        self.cluster_id = self.client.instance.store.store_id
        self._lock = new_lock()
        self._senders: OrderedDict[tuple[int, int, int], _Known] = OrderedDict()
        self.ids = TransactionalIds(self.client)
        self.groups = Groups()
        self.work = ByteRoom(_WORK_BYTES)
        self.ids.resume()

    @property
    def engine(self) -> TopicEngine:
        return self.client.instance.topics

    def close(self) -> None:
        """Give up what is open, and the store."""
        self.ids.close()
        self.client.close()

    def newcomer(self) -> User | None:
        """Return the user of a connection that has said nothing yet."""
        return EVERYBODY if self.users is None else None

    def entry_of(self, name: str) -> StoredUser | None:
        """Return what the file of users has of a name."""
        return None if self.users is None else self.users.entry_of(name)

    def require_known(self, peer: Peer) -> None:
        """Turn out a user whose entry was changed or taken away.

        Raises:
            ConnectionAbortedError: it was.
        """
        if self.users is None or peer.user is None:
            return
        with suppress(AuthenticationError):  # the file cannot be read now
            if peer.entry is not None and self.users.entry_of(peer.user.name) == peer.entry:
                return
        raise ConnectionAbortedError(f"the entry of user {peer.user.name!r} was changed")

    def log_in(self, name: str, token: str) -> User:
        """Return the user of a name and token.

        Raises:
            AuthenticationError: there is none.
        """
        if self.users is None:
            return EVERYBODY
        user = self.users.of_token(token)
        if name != user.name:
            raise AuthenticationError(f"the token is not that of {name!r}")
        return user

    # -- offsets of groups ---------------------------------------------------------------

    @property
    def offsets(self) -> Table:
        """The table of committed offsets, made at the first use; somebody may have dropped it."""
        return offsets_table(self.client)

    def forget_offsets(self, peer: Peer, group: str) -> None:
        """Delete the offsets of a group.

        Raises:
            KafkaError: it has some of a topic that the user may not administer.
        """
        table = self.offsets

        def delete(txn: Transaction) -> None:
            for row in txn.scan(table, where=[("group", "=", group)]):
                if not peer.may("admin", row["topic"]):
                    text = f"group {group!r} has offsets of topics of others"
                    raise KafkaError(Code.GROUP_AUTHORIZATION_FAILED, text)
                txn.delete(table, (group, row["topic"], row["partition"]))

        self.client.run(delete)

    # -- topics ------------------------------------------------------------------------

    def topic(self, peer: Peer, right: Right, name: str) -> TopicInfo:
        """Return a topic to which the user has a right.

        Raises:
            KafkaError: the user has not.
            TopicNotFoundError: there is none.
        """
        peer.require(right, name)
        found = self.engine.find(name)
        if found is None:
            raise TopicNotFoundError(f"there is no topic {name!r}")
        return found

    def partition(self, peer: Peer, right: Right, name: str, number: int) -> Partition:
        """Return a partition; raises as `topic`, and where it has no such number."""
        topic = self.topic(peer, right, name)
        if not 0 <= number < len(topic.partitions):
            raise KafkaError(Code.UNKNOWN_TOPIC_OR_PARTITION, f"{name!r} has no {number}")
        return self.engine.partitions(topic)[number]

    # -- producers ---------------------------------------------------------------------

    def plain(self, peer: Peer, topic: TopicInfo) -> Sender:
        """Return the producer of a connection for messages that have no numbers."""
        found = peer.plain.get(topic.id)
        if found is None:
            found = peer.plain[topic.id] = Sender(self.engine, topic, None)
        return found

    def deliver(
        self,
        topic: TopicInfo,
        producer: tuple[int, int],
        messages: list[tuple[int, pa.RecordBatch]],
        sequences: list[int],
    ) -> list[int]:
        """Append messages of a producer, each of them once; all or none.

        Args:
            topic: to which.
            producer: its id and epoch.
            messages: by number of the partition.
            sequences: the number of the first message of each.

        Returns:
            Their first offsets, in the same order.

        Raises:
            ProducerFencedError: a later epoch was seen.
            OutOfOrderSequenceError: messages before them are missing.
        """
        key = (*producer, topic.id)
        with self._lock:
            known = self._senders.get(key)
            if known is not None:
                self._senders.move_to_end(key)
        if known is None:
            id, epoch = producer
            sender = Sender(self.engine, topic, f"kafka:{id}", epoch=epoch)
            with self._lock:
                known = self._senders.setdefault(key, _Known(sender, new_lock()))
                if len(self._senders) > _SENDERS:
                    self._senders.popitem(last=False)
        with known.lock:
            return [each.base for each in known.sender.deliver(messages, sequences)]
