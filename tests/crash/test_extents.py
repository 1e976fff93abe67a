"""A file that is gone, or of an earlier time: it is told by name, and never made up for."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb
import pyarrow as pa
import pytest
from click.testing import CliRunner

import txnkv
from tests import internals
from tools.children import Children
from txnkv.cli import main
from txnkv.coordinator.maintenance import Maintenance
from txnkv.storage import extents, shrink
from txnkv.topics.sidecar import side_store

SCHEMA = txnkv.Schema({"id": "int64", "text": "string"}, primary_key=["id"])
FOLDERS = {"tablet": "tablets/1", "log": "logs/1", "side log": "logs/3"}
NAMES = {
    "tablet": "table 'hurt', tablet 1",
    "log": "topic 'hurt', partition 0",
    "side log": "topic 'aside', partition 0",
}


@pytest.fixture(autouse=True)
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """The background works when the test says so; side logs become own ones soon."""
    monkeypatch.setattr(Maintenance, "start", lambda self: None)


def rows(first: int, count: int) -> pa.Table:
    ids = range(first, first + count)
    return pa.table({"id": ids, "text": [f"text {i}" for i in ids]})


@contextmanager
def large() -> Iterator[None]:
    """Have each write go to tablets and logs at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("txnkv.tables.write.write_buffer.MAX_ROWS", -1)
        patch.setattr("txnkv.topics.outbox.MAX_BYTES", -1)
        yield


def fill(client: txnkv.Client, n: int) -> None:
    """Something on the disk in each part."""
    with large(), client.transaction() as txn:
        for name in ("hurt", "sound"):
            txn.write(name, rows(n * 100, 100))
        for name in ("hurt", "sound", "aside"):
            txn.send(name, b"large %d" % n, partition=0)


def small(client: txnkv.Client, n: int, *names: str) -> None:
    with client.transaction() as txn:
        for name in names:
            if name != "aside":
                txn.upsert(name, {"id": n, "text": "small"})
            txn.send(name, b"small %d" % n, partition=0)


def make(path: Path, older: Path) -> None:
    with txnkv.connect(path) as client:
        for name in ("hurt", "sound"):
            client.create_table(name, SCHEMA)
            client.create_topic(name)
        client.create_topic("aside", buffer="sidecar")
        fill(client, 0)
        for name in FOLDERS.values():
            internals.store(client).environments.get(name).close()
    for name in FOLDERS.values():
        shutil.copytree(path / name, older / name)
    with txnkv.connect(path) as client:
        fill(client, 1)
        small(client, 7, "hurt", "sound", "aside")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Maintenance, "start", lambda self: None)
        make(folder / "store", folder / "older")
    return folder


@pytest.fixture
def path(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made / "store", tmp_path / "store")
    return tmp_path / "store"


def remove_folder(folder: Path, older: Path) -> None:
    shutil.rmtree(folder)


def remove_file(folder: Path, older: Path) -> None:
    (folder / "data.mdb").unlink()


def empty(folder: Path, older: Path) -> None:
    (folder / "data.mdb").write_bytes(b"")


def replace(folder: Path, older: Path) -> None:
    shutil.copy(older / "data.mdb", folder / "new")
    (folder / "new").replace(folder / "data.mdb")


def overwrite(folder: Path, older: Path) -> None:
    shutil.copyfile(older / "data.mdb", folder / "data.mdb")


def make_anew(folder: Path, older: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()
    env = lmdb.open(str(folder), max_dbs=4)
    extents.write_mark(env, extents.Extent(extents.new_identity(), 1 << 40))
    env.close()


LOSSES = [remove_folder, remove_file, empty, replace, overwrite, make_anew]
Loss = Callable[[Path, Path], None]


def read(client: txnkv.Client, part: str) -> object:
    if part == "tablet":
        return client.table("hurt").scan().to_arrow()
    name = "hurt" if part == "log" else "aside"
    with client.topic(name).consumer() as consumer:
        found = []
        while messages := consumer.poll(max_messages=100, timeout=0.0):  # what is sound comes first
            found += [message.value for message in messages]
        return found


def write(client: txnkv.Client, part: str) -> None:
    with large(), client.transaction() as txn:
        if part == "tablet":
            txn.write("hurt", rows(1000, 10), op="upsert")
        else:
            txn.send("hurt" if part == "log" else "aside", b"more", partition=0)
            txn.flush()


def drop(client: txnkv.Client, part: str) -> None:
    if part == "tablet":
        client.drop_table("hurt")
    else:
        client.drop_topic("hurt" if part == "log" else "aside")


def sound(client: txnkv.Client) -> None:
    assert client.table("sound").count() == 200
    with client.topic("sound").consumer() as consumer:
        found = [message.value for message in consumer.poll(max_messages=100, timeout=0.0)]
    assert found[:3] == [b"large 0", b"large 1", b"small 7"]


@pytest.mark.parametrize("lose", LOSSES, ids=lambda each: each.__name__)
@pytest.mark.parametrize("part", FOLDERS)
def test_what_was_lost_is_told(made: Path, path: Path, part: str, lose: Loss) -> None:
    lose(path / FOLDERS[part], made / "older" / FOLDERS[part])
    with txnkv.connect(path, read_only=True) as client:
        with pytest.raises(txnkv.CorruptionError, match=NAMES[part]):
            read(client, part)
        sound(client)
    with txnkv.connect(path) as client:
        for do in (read, write, read):
            with pytest.raises(txnkv.CorruptionError, match=NAMES[part]):
                do(client, part)
        assert any(NAMES[part] in problem for problem in client.check().problems)
        internals.flush(client)
        assert internals.maintenance(client).round(resume_all=True)
        assert NAMES[part] in internals.coordinator(client).damage.parts()
        with pytest.raises(txnkv.CorruptionError, match=NAMES[part]):
            read(client, part)
        if lose in (remove_folder, remove_file):
            assert not (path / FOLDERS[part] / "data.mdb").exists(), "it was made anew"
        problems = client.check().problems
        assert problems
        assert all(NAMES[part] in problem for problem in problems)
        sound(client)
    with txnkv.connect(path) as client:
        drop(client, part)
        internals.flush(client)
        assert client.check().problems == []
        fill_sound(client)
        with internals.status(client).read() as cur:
            assert (FOLDERS[part],) not in cur.execute("SELECT name FROM extents").fetchall()


def fill_sound(client: txnkv.Client) -> None:
    with client.transaction() as txn:
        txn.write("sound", rows(5000, 10))
        txn.send("sound", b"more", partition=0)


@pytest.mark.parametrize("lose", [remove_folder, replace, overwrite])
@pytest.mark.parametrize("part", FOLDERS)
def test_another_process_has_it_open(
    made: Path, path: Path, children: Children, part: str, lose: Loss
) -> None:
    """It writes to no file that is gone, and makes none."""
    child = children.start(HAS_IT_OPEN, path, part)
    assert child.line() == "open"
    lose(path / FOLDERS[part], made / "older" / FOLDERS[part])
    child.tell()
    said = child.finish()
    assert len(said) == 2
    assert all(NAMES[part] in line for line in said), said


HAS_IT_OPEN = """
from txnkv.coordinator.maintenance import Maintenance
Maintenance.start = lambda self: None
with txnkv.connect(args[0]) as client:
    from tests.crash.test_extents import read, write, sound
    part = args[1]
    write(client, part)
    read(client, part)
    say("open")
    wait()
    try:
        write(client, part)
    except txnkv.CorruptionError as error:
        say(str(error))
    try:
        read(client, part)
        say("read")
    except txnkv.CorruptionError as error:
        say(str(error))
    sound(client)
"""


# -- side logs of their own ------------------------------------------------------------


def send_aside(txn: txnkv.Transaction, n: int) -> None:
    txn.send("aside", b"own %d" % n + bytes(600), partition=0)
    txn.flush()


@pytest.mark.parametrize("ends", [True, False], ids=["committed", "open"])
@pytest.mark.parametrize("lose", [remove_folder, remove_file, empty, replace])
def test_own_side_log(
    path: Path, tmp_path: Path, lose: Loss, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its partition knows how far it was written."""
    monkeypatch.setattr(side_store, "OWN_BYTES", 300)
    monkeypatch.setattr("txnkv.topics.outbox.MAX_BYTES", -1)
    with txnkv.connect(path) as client:
        txn = client.new_transaction(timeout=None)
        send_aside(txn, 0)
        (own,) = [each for each in (path / "logs/3/side").iterdir() if each.name.isdigit()]
        internals.store(client).environments.get(f"logs/3/side/{own.name}").close()
        shutil.copytree(own, tmp_path / "older")
        send_aside(txn, 1)
        if ends:
            txn.commit()
        internals.store(client).environments.get(f"logs/3/side/{own.name}").close()
        lose(own, tmp_path / "older")
        said = f"side log.* of transaction {own.name}|transaction {own.name} is missing"
        for _ in range(2):
            with pytest.raises(txnkv.CorruptionError, match=said):
                read(client, "side log") if ends else send_aside(txn, 2)
        problems = client.check().problems
        assert any("topic 'aside', partition 0" in problem for problem in problems), problems
        sound(client)
        if not ends:
            txn.rollback()
            assert read(client, "log")
        client.drop_topic("aside")
        assert client.check().problems == []


# -- what is recorded ------------------------------------------------------------------


def recorded(client: txnkv.Client) -> dict[str, int]:
    with internals.status(client).read() as cur:
        return dict(cur.execute("SELECT name, written FROM extents"))


def there(path: Path, name: str) -> int:
    with tempfile.TemporaryDirectory() as copy:
        shutil.copy(path / name / "data.mdb", copy)
        env = lmdb.open(copy, readonly=True, lock=False)
        try:
            return extents.read_extent(env).written
        finally:
            env.close()


def test_close_leaves_nothing_to_record(path: Path) -> None:
    with txnkv.connect(path) as client:
        found = recorded(client)
    assert found == {name: there(path, name) for name in found}
    assert set(FOLDERS.values()) <= found.keys()


def test_idle_process_records_the_rest(path: Path) -> None:
    with txnkv.connect(path) as client:
        store = internals.store(client)
        store.environments.get("logs/1").write(lambda txn: txn.put(b"x", b"y"))
        assert recorded(client)["logs/1"] < there(path, "logs/1")
        internals.maintenance(client).round()
        assert recorded(client)["logs/1"] == there(path, "logs/1")


def test_write_that_changes_nothing_is_no_write(path: Path) -> None:
    with txnkv.connect(path) as client:
        store = internals.store(client)
        before = there(path, "logs/1")
        store.environments.get("logs/1").write(lambda txn: None)
        assert not store.extents.noted
        assert there(path, "logs/1") == before


def test_copy_without_free_pages_is_as_far(path: Path, tmp_path: Path) -> None:
    with txnkv.connect(path) as client:
        environment = internals.store(client).environments.get("tablets/1")
        before = there(path, "tablets/1")
        (tmp_path / "copy").mkdir()
        environment.copy_to(tmp_path / "copy")
        assert shrink(environment) is not None
        assert there(path, "tablets/1") == there(tmp_path, "copy") == before
        write(client, "tablet")
    with txnkv.connect(path) as client:
        assert client.check().problems == []
        assert recorded(client)["tablets/1"] == there(path, "tablets/1") > before


POINTS = ["lmdb.before_commit", "lmdb.after_commit", "status.before_commit",
          "status.after_commit", "status.unsynced"]  # fmt: skip


@pytest.mark.parametrize("after", [1, 3])
@pytest.mark.parametrize("point", POINTS)
def test_killed_while_it_records(path: Path, children: Children, point: str, after: int) -> None:
    """The recorded extent is never above that of the file."""
    program = """
    from tests.crash.test_extents import fill
    client = txnkv.connect(args[0])
    for n in range(10, 20):
        fill(client, n)
        client.instance.engine.flush()
    """
    children.start(program, path, fault=f"{point}=kill@{after}").finish(-9)
    with txnkv.connect(path, read_only=True) as client:
        for name, written in recorded(client).items():
            assert written <= there(path, name)
    with txnkv.connect(path) as client:
        assert client.check().problems == []


# -- accepting the loss ----------------------------------------------------------------


PARTS = {"tablet": "table:hurt/0", "log": "topic:hurt/0", "side log": "aside/0"}
SURVIVES = {
    "tablet": (0, 100),  # of the older copy the first row set is whole
    "log": ([b"small 7"], [b"large 0", b"small 7"]),
    "side log": ([b"small 7"], [b"large 0", b"small 7"]),
}


def spoil(folder: Path, older: Path) -> None:
    """Flip bits of a page in the middle."""
    with open(folder / "data.mdb", "r+b") as file:
        file.write(b"\x5a" * 8192)


def end_offset(client: txnkv.Client, part: str) -> int:
    return client.topic("hurt" if part == "log" else "aside").end_offsets()[0]


@pytest.mark.parametrize("lose", [*LOSSES, spoil], ids=lambda each: each.__name__)
@pytest.mark.parametrize("part", FOLDERS)
def test_loss_is_accepted(made: Path, path: Path, part: str, lose: Loss) -> None:
    """The rest works again, nothing that was given is given again, and it is said what went."""
    with txnkv.connect(path) as client:
        before = 0 if part == "tablet" else end_offset(client, part)
    lose(path / FOLDERS[part], made / "older" / FOLDERS[part])
    copied = lose in (replace, overwrite)
    with txnkv.connect(path) as client:
        would = client.accept_loss(PARTS[part], dry_run=True)
        with pytest.raises(txnkv.CorruptionError):
            read(client, part)
        assert client.accept_loss(PARTS[part]) == would
        assert would
        assert all(NAMES[part] in line for line in would.lines())
        assert client.check().problems == []
        if part == "tablet":
            kept = read(client, part).num_rows  # type: ignore[attr-defined]
            assert kept == (100 if copied else 1)  # the small commit's is among them
            assert sum(each.rows for each in would.rows) == 200 - SURVIVES[part][copied]
            assert all(each.min_key <= each.max_key for each in would.rows)
            assert {type(value) for each in would.rows for value in each.min_key} == {int}
        else:
            assert read(client, part) == SURVIVES[part][copied]
            assert end_offset(client, part) == before
        write(client, part)
        found = read(client, part)
        if part != "tablet":
            assert found == [*SURVIVES[part][copied], b"more"]  # type: ignore[misc]
            assert end_offset(client, part) > before
    with txnkv.connect(path) as client:
        assert client.check().problems == []
        assert client.metrics()["failing_parts"] == 0
        assert not client.accept_loss(PARTS[part], dry_run=True)
        sound(client)


@pytest.mark.parametrize("part", ["tablet", "log"])
@pytest.mark.parametrize(
    ("point", "hits"),
    [
        ("status.before_commit", (2, 3, 4)),
        ("status.after_commit", (2, 3, 4)),
        ("status.unsynced", (2, 3, 4)),
        ("mending.written", (1, 1)),
        ("mending.named", (1, 1)),
    ],
)
def test_killed_while_it_accepts(
    made: Path, path: Path, children: Children, part: str, point: str, hits: tuple[int, ...]
) -> None:
    """Wherever it dies, it is begun again, and loses no more."""
    replace(path / FOLDERS[part], made / "older" / FOLDERS[part])
    program = "txnkv.connect(args[0]).accept_loss(args[1])"
    deaths = [
        children.start(program, path, PARTS[part], fault=f"{point}=kill@{hit}").popen.wait(120)
        for hit in hits
    ]
    assert deaths == [-signal.SIGKILL] * len(hits)
    with txnkv.connect(path) as client:
        client.accept_loss(PARTS[part])
        assert client.check().problems == []
        found = read(client, part)
        assert getattr(found, "num_rows", 100) == 100
        assert part == "tablet" or found == [b"large 0", b"small 7"]
        write(client, part)
        sound(client)


@pytest.mark.parametrize("point", ["status.before_commit", "mending.written", "mending.named"])
def test_killed_while_indexes_go_with_rows(
    made: Path, path: Path, children: Children, point: str
) -> None:
    """They are there while all rows are, by status.db, and gone when it gives up some."""
    with txnkv.connect(path) as client:
        client.create_index("hurt", "text")
    replace(path / FOLDERS["tablet"], made / "older" / FOLDERS["tablet"])
    program = "client = txnkv.connect(args[0]); arm(args[2], 'kill'); client.accept_loss(args[1])"
    child = children.start(program, path, PARTS["tablet"], point)
    assert child.popen.wait(120) == -signal.SIGKILL
    with txnkv.connect(path) as client:
        given_up = point == "mending.named"
        assert bool(client.table("hurt").indexes) != given_up
        assert client.accept_loss(PARTS["tablet"]).indexes == (() if given_up else (("text",),))
        assert client.table("hurt").indexes == []
        client.create_index("hurt", "text")
        assert client.check().problems == []


def test_nothing_is_accepted_while_another_process_has_it_open(
    path: Path, children: Children
) -> None:
    program = """
    from tests.crash.test_extents import read
    client = txnkv.connect(args[0], read_only=True)
    with client.topic("hurt").consumer() as consumer:
        assert consumer.poll(timeout=0.0)
    say("open")
    wait()
    """
    child = children.start(program, path)
    assert child.line() == "open"
    with txnkv.connect(path) as client, pytest.raises(txnkv.UnavailableError, match="another proc"):
        client.accept_loss("topic:hurt/0")
    child.tell()
    child.finish()


@pytest.mark.parametrize("part", ["hurt", "hurt/x", "hurt/\u0660", "/0", "hurt/0"])
def test_parts_that_are_none(path: Path, part: str) -> None:
    with txnkv.connect(path) as client:
        with pytest.raises(ValueError, match=part):
            client.accept_loss(part)
        with pytest.raises(txnkv.TableNotFoundError):
            client.accept_loss("nobody/0")
        with pytest.raises(txnkv.TopicNotFoundError):
            client.accept_loss("aside/7")


def test_repair_asks_before_it_gives_up(path: Path) -> None:
    remove_file(path / FOLDERS["log"], path)
    asked = CliRunner().invoke(main, ["repair", str(path), "--accept-loss", "topic:hurt/0"])
    assert asked.exit_code == 1
    assert "topic 'hurt', partition 0: offsets 0 to" in asked.output
    assert "--yes" in asked.output
    done = CliRunner().invoke(main, ["repair", str(path), "--accept-loss", "topic:hurt/0", "--yes"])
    assert done.exit_code == 0, done.output
    assert "topic 'hurt', partition 0 works again" in done.output


@pytest.mark.parametrize("part", FOLDERS)
def test_ended_before_the_mended_file_is_in_its_place(made: Path, path: Path, part: str) -> None:
    """It is another file than status.db says: told, and begun again."""
    replace(path / FOLDERS[part], made / "older" / FOLDERS[part])
    with txnkv.connect(path) as client:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("txnkv.storage.lmdb_replace.os.replace", fail)
            with pytest.raises(RuntimeError, match="broken off"):
                client.accept_loss(PARTS[part])
        with pytest.raises(txnkv.CorruptionError, match="is not the file that was there") as caught:
            write(client, part)
        assert "--accept-loss " in str(caught.value)
        assert str(caught.value).endswith(PARTS[part])
    with txnkv.connect(path) as client:
        client.accept_loss(PARTS[part])
        write(client, part)
        assert client.check().problems == []


def fail(*_: object) -> None:
    raise RuntimeError("broken off")


def begin_and_die(path: Path, commit: bool) -> None:
    """For a child: a transaction of all parts, left as it is, or killed in its commit."""
    client = txnkv.connect(path)
    with large():
        txn = client.new_transaction(timeout=None)
        for name in ("hurt", "sound"):
            txn.write(name, rows(5000, 10))
        for name in ("hurt", "sound", "aside"):
            txn.send(name, b"of the transaction", partition=0)
        txn.flush()
        print(int(txn.id), flush=True)
        if commit:
            txn.commit()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("fault", ["", "commit.started=kill", "commit.decided=kill"])
@pytest.mark.parametrize("part", FOLDERS)
def test_loss_beside_a_transaction(path: Path, children: Children, part: str, fault: str) -> None:
    """One that is decided stays what it is in all other parts, any other one is aborted."""
    program = "from tests.crash.test_extents import *\nbegin_and_die(Path(args[0]), bool(args[1]))"
    child = children.start(program, path, fault and "commit", fault=fault)
    txn_id = int(child.line())
    assert child.popen.wait(120) == -signal.SIGKILL
    spoil(path / FOLDERS[part], path)
    with txnkv.connect(path) as client:
        loss = client.accept_loss(PARTS[part])
        assert loss
        state = client.transaction_state(txn_id)
        decided = state is txnkv.TxnState.COMMITTED
        assert decided or state is txnkv.TxnState.ABORTED
        # One that was committing may have been decided when the store was opened.
        assert "started" in fault or decided == bool(fault)
        assert client.table("sound").count() == 200 + 10 * decided
        with client.topic("sound").consumer() as consumer:
            found = [message.value for message in consumer.poll(max_messages=100, timeout=0.0)]
        assert (b"of the transaction" in found) == decided
        write(client, part)
        assert client.check().problems == []
    with txnkv.connect(path) as client:
        assert client.table("sound").count() == 200 + 10 * decided
        assert client.check().problems == []


def test_a_file_whose_loss_was_accepted_comes_not_back(made: Path, path: Path) -> None:
    """What was made of its older copy is another file, that has gone on by itself."""
    folder = path / FOLDERS["log"]
    lost = path.with_name("lost")
    shutil.copytree(folder, lost)
    shutil.copyfile(made / "older" / FOLDERS["log"] / "data.mdb", folder / "data.mdb")
    with txnkv.connect(path) as client:
        client.accept_loss("topic:hurt/0")
    shutil.copyfile(lost / "data.mdb", folder / "data.mdb")
    gone = pytest.raises(txnkv.CorruptionError, match="is not the file that was there")
    with txnkv.connect(path) as client, gone:
        client.topic("hurt").consumer().poll(timeout=0)
