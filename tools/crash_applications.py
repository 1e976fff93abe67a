"""The crash driver's scenario of applications: versions that are committed once, whoever dies.

Each version inserts a row and sends a message that name it, in a small transaction, in a stored
one, and in one that turns large after it was marked; now and then another driver is faster. The
child says `applied N` of what it was told is done. After a death whoever goes on asks for the
version that is there and does the rest, and then every version is there once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

import txnkv

APP: Final = "counting"
SOURCE: Final = "query"
TABLE: Final = "versions"
TOPIC: Final = "announced"
VERSIONS: Final = 9
KINDS: Final = ("small", "stored", "grown")

Say = Callable[..., None]


def apply(say: Say, path: str) -> None:
    """All versions; of every third, another driver has begun and comes too late."""
    client = txnkv.connect(path, create=False)
    schema = txnkv.Schema({"version": "int64", "by": "string"}, primary_key=["version"])
    client.create_table(TABLE, schema)
    client.create_topic(TOPIC)
    say("made")
    _go_on(client, 0, say)


def _go_on(client: txnkv.Client, first: int, say: Say) -> None:
    for version in range(first, VERSIONS):
        kind = KINDS[version % len(KINDS)]
        late = client.new_transaction()
        if version % 2:
            late.serialize()
        txn = client.new_transaction()
        _work(txn, version, kind)
        if version % 3 == 0:
            _work(late, version, "late")
        txn.commit()
        say("applied", version)
        with suppress(txnkv.AlreadyAppliedError):
            if version % 3:
                _work(late, version, "late")
            late.commit()
        if late.state is not txnkv.TxnState.ABORTED:
            raise AssertionError(f"version {version} was committed twice")


def _work(txn: txnkv.Transaction, version: int, kind: str) -> None:
    if kind == "stored":
        txn.serialize()
    if kind == "late":
        txn.insert(TABLE, (-1 - version, kind))
    else:
        txn.insert(TABLE, (version, kind))
    txn.send(TOPIC, f"{kind} {version}")
    txn.mark_applied(APP, version, SOURCE)
    if kind == "grown":
        txn.serialize()


def examine(client: txnkv.Client, said: Sequence[str]) -> list[str]:
    """List what is wrong after a death: now, and when somebody has gone on."""
    if "made" not in said:
        return []
    found = client.applied(APP)
    following = 0 if found is None else found.version + 1
    told = sum(line.startswith("applied") for line in said)
    problems = _wrong(client, following)
    if following < told:
        problems.append(f"{told} versions were acknowledged, {following} are there")
    if not problems:
        _go_on(client, following, lambda *words: None)
        problems = _wrong(client, VERSIONS)
    return problems


def _wrong(client: txnkv.Client, versions: int) -> list[str]:
    """List what is there beside so many versions, or is not."""
    wanted = [(version, KINDS[version % len(KINDS)]) for version in range(versions)]
    rows = [tuple(row.values()) for row in client.table(TABLE).scan(ordered=True)]
    problems = [] if rows == wanted else [f"of versions {wanted} there are rows {rows}"]
    with client.topic(TOPIC).consumer() as consumer:
        values = [message.value for message in consumer.poll(max_messages=1000, timeout=0)]
    if values != [f"{kind} {version}".encode() for version, kind in wanted]:
        problems.append(f"of versions {wanted} there are messages {values}")
    with client.instance.store.status.read() as cur:
        left = cur.execute(
            "SELECT app_id, version FROM application_marks JOIN transactions USING (txn_id) "
            "WHERE state IN (2, 4)"
        ).fetchall()
    return problems + [f"mark {mark} is left of a transaction that ended" for mark in left]


SCENARIOS: Final[dict[str, Callable[..., None]]] = {"apply": apply}

EXAMINERS: Final[dict[str, Callable[[txnkv.Client, Sequence[str]], list[str]]]] = {"apply": examine}
