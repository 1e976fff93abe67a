"""Files that a process may have open: the environments keep below the limit, and say its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

LIMITED = """
import errno, os, resource
from txnkv.storage.environments import _TABLE

def limit(number):
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (number, hard))

def open_now():
    return len(os.listdir("/dev/fd"))

def take(leave=0):
    taken = []
    try:
        while True:
            taken.append(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        assert error.errno == errno.EMFILE
    for descriptor in taken[:leave]:
        os.close(descriptor)
    return taken[leave:]

def give_back(taken):
    for descriptor in taken:
        os.close(descriptor)

schema = txnkv.Schema({"id": "int64"}, primary_key=["id"])
client.create_table("t", schema, partition_by=txnkv.hash_partition("id", PARTS))
with client.transaction() as txn:
    for key in range(100):
        txn.insert("t", (key,))
engine = client.instance.engine
"""


def test_the_cap_follows_the_limit(process: Callable[..., Any]) -> None:
    said = process(
        LIMITED
        + """
limit(open_now() + 60)
engine.flush()
assert client.table("t").count() == 100
say((len(_TABLE.opened()), len(list((client.instance.store.directory.path / "tablets").iterdir()))))
""",
        PARTS=60,
    ).finish()
    opened, there = said
    assert there > 40, "more than would fit"
    assert 0 < opened <= 30


def test_environments_that_are_idle_make_room(process: Callable[..., Any]) -> None:
    """The program has opened so many files itself that the cap does not help."""
    said = process(
        LIMITED
        + """
engine.flush()
tablets = engine.tablets(engine.get("t"))
tablets[-1].environment().close()
limit(open_now() + 10)
before = len(_TABLE.opened())
taken = take()
say((client.table("t").count(), before, len(_TABLE.opened())))
give_back(taken)
""",
        PARTS=8,
    ).finish()
    count, before, after = said
    assert count == 100
    assert 0 < after < before


FIRST_USES = {
    "a tablet that is made": """
other = client.create_table("other", schema)
client.new_session().write(other, pa.table({"id": range(20_000)}))
assert other.count() == 20_000
""",
    "a log that is made": """
topic = client.create_topic("e")
client.new_session().send_batch(topic, pa.table({"value": [b"x" * 100] * 20_000}))
assert topic.consumer().poll(timeout=0)
""",
    "a write to tablets that are open": """
client.new_session().write("t", pa.table({"id": range(100, 20_100)}))
""",
    "another connection to status.db": """
client.instance.store.status._readers.close()
taken += take()
client.tables()
""",
    "a list of a folder": """
for sweep in maintenance._sweeps:
    sweep(maintenance.lease)
assert not internals.coordinator(client).damage.parts()
""",
    "a backup": """
client.backup(str(client.path) + ".backup")
""",
}


@pytest.mark.parametrize("use", FIRST_USES.values(), ids=FIRST_USES)
def test_whatever_is_opened_has_idle_environments_closed(
    process: Callable[..., Any], use: str
) -> None:
    """A program had all descriptors beside them: what was new to the process failed for ever."""
    said = process(
        LIMITED
        + f"""
import pyarrow as pa
from tests import internals
maintenance = internals.maintenance(client)
maintenance.close()
assert maintenance.round(resume_all=True)
maintenance.lease.term += 1  # another leader looks at the folders
engine.flush()
before = len(_TABLE.opened())
limit(open_now() + 10)
taken = take()
{use}
say((before, _TABLE.open_cap))
give_back(taken)
""",
        PARTS=12,
    ).finish()
    before, cap = said
    assert cap <= before // 2


def test_a_child_that_has_none_left(process: Callable[..., Any]) -> None:
    """It maps the runtime file anew at its first use, by another file than status.db."""
    said = process(
        LIMITED
        + """
client.backup(str(client.path) + ".backup")
reading, writing = os.pipe()
if os.fork() == 0:
    limit(64)
    taken, said = take(), []
    for call in (client.snapshot, lambda: client.table("t").scan().to_arrow(), client.check,
                 lambda: client.run(lambda txn: txn.insert("t", (200,)), attempts=1),
                 lambda: txnkv.restore(str(client.path) + ".backup", str(client.path) + ".new")):
        try:
            call()
        except Exception as error:
            said.append(f"{type(error).__name__} {error}")
    os.write(writing, "\\n".join(said).encode())
    os._exit(0)
os.wait()
say(os.read(reading, 1 << 16).decode().splitlines())
""",
        PARTS=1,
    ).finish()
    assert len(said) == 5
    for text in said:
        assert text.startswith("UnavailableError cannot open ")
        assert "RLIMIT_NOFILE" in text


def test_background_work_says_it_in_a_line(process: Callable[..., Any]) -> None:
    said = process(
        LIMITED
        + """
from tests import internals
client.create_topic("e", buffer="sidecar")
maintenance = internals.maintenance(client)
maintenance.close()
engine.flush()
assert maintenance.round(resume_all=True)
maintenance.lease.term += 1  # another leader looks at the folders
for environment in _TABLE.opened():
    environment.close()
limit(open_now() + 10)
taken = take()
for sweep in maintenance._sweeps:
    sweep(maintenance.lease)
give_back(taken)
say(list(internals.coordinator(client).damage.parts().values()))
""",
        PARTS=1,
    ).finish()
    assert said
    assert all("RLIMIT_NOFILE" in text for text in said)


def test_the_error_names_the_limit(process: Callable[..., Any]) -> None:
    said = process(
        LIMITED
        + """
engine.flush()
for environment in _TABLE.opened():
    environment.close()
limit(open_now() + 10)
taken = take(leave=1)
try:
    client.table("t").count()
except txnkv.UnavailableError as error:
    text = str(error)
client.instance.store.status._readers.close()
taken += take()
try:
    client.tables()
except txnkv.UnavailableError as error:
    other = str(error)
path = client.path
give_back(taken)
count = client.table("t").count()
client.close()
taken = take()
try:
    txnkv.connect(path)
except txnkv.UnavailableError as error:
    opening = str(error)
give_back(taken)
txnkv.connect(path).close()
say((text, other, opening, count))
""",
        PARTS=1,
    ).finish()
    lmdb, sqlite, opening, count = said
    assert "tablets/" in lmdb
    assert "status.db" in sqlite
    assert all("RLIMIT_NOFILE" in text for text in (lmdb, sqlite, opening))
    assert count == 100


def test_a_backup_that_fails_for_want_of_them_leaves_nothing(process: Callable[..., Any]) -> None:
    """To remove what it had made took more of them than there were."""
    said = process(
        LIMITED
        + """
client.create_topic("e", partitions=2)
client.compact()
parent = client.instance.store.directory.path.parent
client.backup(parent / "warm")
before, failed = sorted(os.listdir(parent)), 0
limit(open_now() + 40)
for left in range(2, 12):
    taken = take(left)
    for number, make in enumerate((client.backup, lambda place: txnkv.dump(client, place))):
        try:
            make(parent / f"made{number}-{left}")
        except txnkv.UnavailableError:
            failed += 1
        else:
            before.append(f"made{number}-{left}")
    give_back(taken)
say((failed > 0, sorted(os.listdir(parent)) == sorted(before)))
""",
        PARTS=3,
    ).finish()
    assert said == (True, True)


@pytest.mark.parametrize("limit_of", ["AS", "NOFILE"])
def test_a_check_that_this_process_lacks_something_for_finds_no_damage(
    process: Callable[..., Any], limit_of: str
) -> None:
    """Each part that could not be opened was a problem of the store."""
    said = process(
        LIMITED
        + """
client.create_topic("events")
client.run(lambda txn: txn.send("events", b"a"))
client.compact()
for environment in _TABLE.opened():
    environment.close()
taken = []
if limit_of == "NOFILE":
    limit(open_now() + 10)
    taken = take(leave=1)
else:
    pages = int(open("/proc/self/statm").read().split()[0])
    most = pages * resource.getpagesize() + (1 << 30)
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))
try:
    found = client.check().problems
except txnkv.UnavailableError as error:
    found = str(error)
give_back(taken)
resource.setrlimit(resource.RLIMIT_AS, (resource.getrlimit(resource.RLIMIT_AS)[1],) * 2)
say((found, client.check().problems))
""",
        PARTS=1,
        limit_of=limit_of,
    ).finish()
    assert ("ulimit -v" if limit_of == "AS" else "RLIMIT_NOFILE") in said[0], said
    assert said[1] == []
