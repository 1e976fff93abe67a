"""Who is let in and what they may do; and what a bad client cannot do."""

from __future__ import annotations

import errno
import os
import random
import re
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.flight as fl
import pytest
from click.testing import CliRunner

import txnkv
from tests.remote.conftest import SCHEMA
from txnkv.cli import main
from txnkv.remote import ACTION, VERSION, pack
from txnkv.remote.channel import Call
from txnkv.remote.remote_handles import RemoteTable
from txnkv.server import Limits, Server, Users, add_user


@pytest.fixture
def users(tmp_path: Path) -> tuple[Users, dict[str, str]]:
    path = tmp_path / "users.toml"
    tokens = {
        "ann": add_user(path, "ann", "admin", ["*"], ["*"]),
        "bob": add_user(path, "bob", "write", ["t"], []),
        "eve": add_user(path, "eve", "read", ["other*"], ["*"]),
    }
    assert path.stat().st_mode & 0o077 == 0
    assert not any(token.partition(".")[2] in path.read_text() for token in tokens.values())
    return Users(path), tokens


def test_credentials_that_are_no_token(
    store: txnkv.Client, serve: Callable[..., Server], users: tuple[Users, dict[str, str]]
) -> None:
    """The server was said not to answer."""
    known, tokens = users
    address, token = f"grpc://127.0.0.1:{serve(known).port}", tokens["bob"]
    for fine in (token + "\n", f" {token}\r\n", {"token": token + "\n"}):
        txnkv.connect(address, credentials=fine).close()
    for wrong in ("\xfc.x", "bob.\nx", {"token": "bob.\0"}):
        with pytest.raises(ValueError, match="no characters but ASCII's"):
            txnkv.connect(address, credentials=wrong)
    bad: list[Any] = [token.encode(), {"token": token.encode()}, {"ca": b""}, 7]
    for none in bad:
        with pytest.raises(TypeError, match=r"credentials.* str.*, not (bytes|int)"):
            txnkv.connect(address, credentials=none)


@pytest.mark.parametrize("option", ["--max-message", "--max-transactions", "--max-streams"])
def test_a_bound_that_lets_nothing_through(option: str) -> None:
    found = CliRunner().invoke(main, ["serve", "x", option, "0"])
    assert found.exit_code == 2
    assert f"'{option}': 0 is not in the range x>=1" in found.output


def test_users_have_their_rights(
    store: txnkv.Client, serve: Callable[..., Server], users: tuple[Users, dict[str, str]]
) -> None:
    known, tokens = users
    address = f"grpc://127.0.0.1:{serve(known).port}"
    for wrong in (None, "bob", "bob.wrong", "nobody.secret", tokens["bob"] + "x"):
        with pytest.raises(txnkv.AuthenticationError) as caught:
            txnkv.connect(address, credentials=wrong)
        assert tokens["bob"] not in str(caught.value)
    store.create_table("other", store.table("t").schema)
    store.table("t").insert((1, "a"))
    (part,) = store.table("t").scan().tokens()
    with txnkv.connect(address, credentials=tokens["bob"]) as bob:
        assert bob.tables() == ["t"]
        assert bob.topics() == []
        bob.table("t").upsert((1, "b"))
        assert part.open(bob).to_arrow().num_rows == 1
        for refused in (
            lambda: bob.table("other"),
            lambda: bob.topic("events"),
            lambda: bob.drop_table("t"),
            lambda: bob.create_table("t2", store.table("t").schema),
            lambda: bob.transactions(),
        ):
            with pytest.raises(txnkv.AuthenticationError, match="no right"):
                refused()
    with txnkv.connect(address, credentials=tokens["eve"]) as eve:
        other = eve.table("other")
        assert other.count() == 0
        with pytest.raises(txnkv.AuthenticationError, match="no right to write"):
            other.insert((1, "x"))
        with pytest.raises(txnkv.AuthenticationError), eve.transaction() as txn:
            txn.insert(other, (1, "x"))
        with pytest.raises(txnkv.AuthenticationError):
            part.open(eve)
        with pytest.raises(txnkv.AuthenticationError):
            eve.table("t")
    assert store.table("other").count() == 0


@pytest.mark.parametrize("kind", ["Transaction", "Session"])
def test_rights_are_asked_whatever_a_table_is_named_by(
    store: txnkv.Client,
    serve: Callable[..., Server],
    users: tuple[Users, dict[str, str]],
    kind: str,
) -> None:
    """A hostile client sends a name, or anything, in place of a handle."""
    known, tokens = users
    other = store.create_table("other", store.table("t").schema)
    other.insert((1, "a"))
    subscription = store.topic("events").subscribe("s")
    rows, messages = pa.table({"id": [2], "v": ["x"]}), pa.table({"value": [b"x"]})
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
        ("write", ("other", rows), {"op": "insert"}),
        ("write", (), {"table": "other", "data": rows}),
        ("send_batch", ("events", messages), {}),
        ("ack", (subscription.info.name, []), {}),
        ("ack_cumulative", (None, []), {}),
        ("rows", ([["upsert", "other", [1, 2], [[2, "x"]]]],), {}),
        ("sends", ([["events", [[b"x"]]]],), {}),
    ]
    if kind == "Transaction":
        for name, of in (("get", 1), ("get_many", [1]), ("get_by", "v"), ("scan", ["id"])):
            calls += [(name, ("other", of), {}), (name, (), {"table": "other", "key": of})]
    address = f"grpc://127.0.0.1:{serve(known).port}"
    with txnkv.connect(address, credentials=tokens["bob"]) as bob:
        txn = bob.new_transaction()
        target = txn if kind == "Transaction" else txn.new_session()
        for name, args, named in calls:
            with pytest.raises(ValueError, match=r"reference|request names"):
                bob.channel.call(Call(kind, target, name, args, named))
        assert txn.get("t", 1) is None
        with pytest.raises(txnkv.AuthenticationError):
            bob.planning.kept("other")
        txn.commit()
    assert other.count() == 1
    assert store.topic("events").end_offsets() == {0: 0}


def test_who_may_not_write_keeps_nobodys_transaction_alive(
    store: txnkv.Client, serve: Callable[..., Server], users: tuple[Users, dict[str, str]]
) -> None:
    known, tokens = users
    txn = store.new_transaction()
    token = txn.serialize()
    address = f"grpc://127.0.0.1:{serve(known).port}"
    with txnkv.connect(address, credentials=tokens["eve"]) as eve:
        with pytest.raises(txnkv.AuthenticationError, match="no right to write"):
            eve.keep_transaction_alive(txn.id)
        mine = txnkv.Transaction.deserialize(eve, token)
        assert mine.state is txnkv.TxnState.OPEN
        eve.keep_transaction_alive(txn.id)
    with txnkv.connect(address, credentials=tokens["bob"]) as bob:
        bob.keep_transaction_alive(txn.id)
    txn.rollback()


def test_dead_letters_go_where_their_user_may_send(
    store: txnkv.Client, serve: Callable[..., Server], tmp_path: Path
) -> None:
    path = tmp_path / "users.toml"
    token = add_user(path, "joe", "write", [], ["in", "mine"])
    for name in ("in", "mine", "secret"):
        store.create_topic(name)
    address = f"grpc://127.0.0.1:{serve(Users(path)).port}"
    with txnkv.connect(address, credentials=token) as joe:
        topic = joe.topic("in")
        for other in ("secret", "new"):
            with pytest.raises(txnkv.AuthenticationError, match=f"no right to .* topic '{other}'"):
                topic.subscribe("s", max_deliveries=1, dead_letter=other)
        topic.subscribe("s", max_deliveries=1, dead_letter="mine").close()
        topic.subscribe("t", max_deliveries=1).close()
    assert sorted(store.topics()) == ["events", "in", "in.t.dead", "mine", "secret"]


def test_a_table_has_the_rights_of_its_present_name(
    store: txnkv.Client, serve: Callable[..., Server], users: tuple[Users, dict[str, str]]
) -> None:
    known, tokens = users
    address = f"grpc://127.0.0.1:{serve(known).port}"
    with txnkv.connect(address, credentials=tokens["bob"]) as bob:
        table = bob.table("t")
        table.upsert((1, "b"))
        (part,) = table.scan().tokens()
        store.rename_table("t", "hidden")
        for refused in (
            lambda: table.get(1),
            lambda: table.insert((2, "x")),
            lambda: part.open(bob),
        ):
            with pytest.raises(txnkv.AuthenticationError, match="no right"):
                refused()
        store.rename_table("hidden", "t")
        assert table.get(1) == {"id": 1, "v": "b"}
    assert store.table("t").count() == 1


def test_who_changes_a_table_by_a_handle_has_the_right_to_it(
    store: txnkv.Client, serve: Callable[..., Server], tmp_path: Path
) -> None:
    """A hostile client gives the number of another table, or a handle of another kind."""
    path = tmp_path / "users.toml"
    token = add_user(path, "joe", "admin", ["t", "mine"], [])
    hidden = store.create_table("hidden", SCHEMA)
    with txnkv.connect(f"grpc://127.0.0.1:{serve(Users(path)).port}", credentials=token) as joe:
        table = joe.table("t")
        wrong = RemoteTable(joe, {"name": "t", "id": hidden.info.id, "schema": SCHEMA})
        calls: list[tuple[str, tuple[Any, ...]]] = [
            ("table", ()), ("create_index", ("v",)), ("drop_index", ("v",)),
            ("rename_table", ("mine",)), ("drop_table", ()),
        ]  # fmt: skip
        for name, args in calls:
            with pytest.raises(txnkv.AuthenticationError, match="table 'hidden'"):
                getattr(joe, name)(wrong, *args)
            for other in (joe, joe.new_transaction()):
                with pytest.raises(ValueError, match=f"{name} takes the name of a table"):
                    joe.channel.call(Call("Client", joe, name, (other, *args)))
        for name in ("create_table", "recall_table"):
            with pytest.raises(ValueError, match=f"{name} takes the name of a table"):
                joe.channel.call(Call("Client", joe, name, (table,)))
        assert store.tables() == ["hidden", "t"]
        joe.create_index(table, "v")
        assert joe.rename_table(table, "mine").indexes
        joe.drop_table(table)
    assert store.tables() == ["hidden"]
    assert hidden.indexes == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("users = 3", "users is a table, not of type int"),
        ("[[users]]\nrights = 'read'", "users is a table, not of type list"),
        ("[users]\nann = 'x'", "user 'ann' is a table, not of type str"),
        ("[users.ann]\nrights = ['read']", "rights of user 'ann' are one of"),
        ("[users.ann.org]\nrights = 'read'", "write, admin; a name with dots stands in quotes"),
        ("[users.ann]\nrights = 'read'\ntables = 3", "tables of user 'ann' is a list"),
        ("users = ", "is no file of users"),
    ],
)
def test_a_file_of_users_of_another_shape(
    store: txnkv.Client,
    serve: Callable[..., Server],
    users: tuple[Users, dict[str, str]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    text: str,
    found: str,
) -> None:
    known, tokens = users
    path = tmp_path / "users.toml"
    sound = path.read_text()
    address = f"grpc://127.0.0.1:{serve(known).port}"
    with txnkv.connect(address, credentials=tokens["ann"]) as ann:
        path.write_text(text)
        with pytest.raises(ValueError, match=re.escape(found)) as caught:
            Users(path)
        assert str(path) in str(caught.value)
        with pytest.raises(txnkv.AuthenticationError, match="nobody can be let in now"):
            ann.tables()
        assert found in caplog.text
        path.write_text(sound)
        assert ann.tables() == ["t"]


def test_many_users_are_added_at_once(tmp_path: Path) -> None:
    """By eight commands at once, two were in the file in the end."""
    path = tmp_path / "users.toml"
    names = [f"u{number}" for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        tokens = list(pool.map(lambda name: add_user(path, name, "read", ["*"], ["*"]), names))
    assert [Users(path).of_token(token).name for token in tokens] == names
    assert os.listdir(tmp_path) == ["users.toml"]


def test_a_file_of_users_stays_what_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link was replaced by a file; one of another user became root's, whose server lost it."""
    path, link = tmp_path / "users.toml", tmp_path / "link.toml"
    link.symlink_to(path.name)
    add_user(link, "ann", "read", ["*"], ["*"])
    path.chmod(0o640)
    owner = 65533 if os.geteuid() == 0 else os.geteuid()
    os.chown(path, owner, -1)
    before = add_user(link, "bob", "read", ["*"], ["*"])
    found = path.stat()
    assert (link.is_symlink(), found.st_uid, found.st_mode & 0o777) == (True, owner, 0o640)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("txnkv.server.users.sync", full)
    with pytest.raises(txnkv.StorageFullError, match=str(link)):
        add_user(link, "joe", "read", ["*"], ["*"])
    assert sorted(os.listdir(tmp_path)) == ["link.toml", "users.toml"]
    assert Users(link).of_token(before).name == "bob"


def test_an_old_token_ends_though_size_and_time_are_the_same(tmp_path: Path) -> None:
    old = add_user(tmp_path / "users", "ann", "read", ["*"], ["*"])
    new = add_user(tmp_path / "new", "ann", "read", ["*"], ["*"])
    for path in (tmp_path / "users", tmp_path / "new"):
        os.utime(path, (1, 1))
    known = Users(tmp_path / "users")
    assert known.of_token(old).name == "ann"
    (tmp_path / "new").rename(tmp_path / "users")
    assert known.of_token(new).name == "ann"
    with pytest.raises(txnkv.AuthenticationError):
        known.of_token(old)


def certified(folder: Path, name: str, *more: str) -> tuple[Path, Path]:
    """A certificate that vouches for itself, and its key."""
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj",
         f"/CN={name}", *more, "-keyout", str(key), "-out", str(cert)],
        check=True, capture_output=True,
    )  # fmt: skip
    return cert, key


def test_tls_both_ways(
    store: txnkv.Client,
    serve: Callable[..., Server],
    tmp_path: Path,
    users: tuple[Users, dict[str, str]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    cert, key = certified(tmp_path, "127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1")
    pair = [(cert.read_bytes(), key.read_bytes())]
    address = f"grpc+tls://127.0.0.1:{serve(tls_certificates=pair).port}"
    with txnkv.connect(address, credentials={"ca": str(cert)}) as client:
        assert client.tables() == ["t"]
    with pytest.raises(txnkv.UnavailableError, match=r"Does the server want grpc\+tls://\?"):
        txnkv.connect(address.replace("+tls", ""))
    other, _ = certified(tmp_path, "other")
    for at, trusted, words in (
        (address, {}, "credentials have `ca`"),
        (address, {"ca": str(other)}, "credentials have `ca`"),
        (address.replace("127.0.0.1", "localhost"), {"ca": str(cert)}, "take an address with a"),
    ):
        with pytest.raises(txnkv.AuthenticationError, match=f"is not trusted: .*: {words}"):
            txnkv.connect(at, credentials=trusted)
    own = {name: certified(tmp_path, name) for name in ("bob", "mallory")}
    known = b"".join(each.read_bytes() for each, _ in own.values())
    mutual = {"tls_certificates": pair, "verify_client": True, "root_certificates": known}
    for server in (serve(**mutual), serve(users[0], **mutual)):
        with pytest.raises(txnkv.UnavailableError, match="Does the server want a certificate"):
            txnkv.connect(f"grpc+tls://127.0.0.1:{server.port}", credentials={"ca": str(cert)})
    address = f"grpc+tls://127.0.0.1:{server.port}"

    def shown(name: str) -> dict[str, str]:
        return {"ca": str(cert), "cert": str(own[name][0]), "key": str(own[name][1])}

    with txnkv.connect(address, credentials=shown("bob")) as client:  # by the certificate's name
        client.table("t").insert((1, "by bob"))
        with pytest.raises(txnkv.AuthenticationError, match="'bob' has no right to admin"):
            client.create_table("more", SCHEMA)
    for _ in range(2):
        with pytest.raises(
            txnkv.AuthenticationError, match="the certificate is of 'mallory', whom"
        ):
            txnkv.connect(address, credentials=shown("mallory"))
    assert caplog.text.count("the certificate is of 'mallory', whom the file of users has not") == 1
    ann = shown("mallory") | {"token": users[1]["ann"]}  # a token goes before a certificate
    with txnkv.connect(address, credentials=ann) as client:
        assert client.table("t").get(1) == {"id": 1, "v": "by bob"}


NO_CERTIFICATE = "is no certificate in PEM"
NO_KEY = "is no private key in PEM, or has a password"
NOT_ITS = "is not the key of"


@pytest.mark.parametrize("text", [False, True])
@pytest.mark.parametrize(
    ("wrong", "content", "words"),
    [
        ("key", "other.key", NOT_ITS),
        ("key", "locked.key", NO_KEY),
        ("key", "ours.pem", NO_KEY),
        ("cert", "ours.key", NO_CERTIFICATE),
        ("cert", "broken", NO_CERTIFICATE),
        ("ca", "broken", NO_CERTIFICATE),
        ("ca", "empty", NO_CERTIFICATE),
    ],
)
def test_files_that_are_no_certificates_or_do_not_fit(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    wrong: str,
    content: str,
    words: str,
    text: bool,
) -> None:
    """Neither side takes them, and of a key that was given as text no file is left."""
    ours, key = certified(tmp_path, "ours")
    certified(tmp_path, "other")
    locked = ["-aes128", "-passout", "pass:x", "-in", str(key), "-out", tmp_path / "locked.key"]
    subprocess.run(["openssl", "rsa", *locked], check=True, capture_output=True)
    (tmp_path / "broken").write_text("-----BEGIN CERTIFICATE-----\nx\n-----END CERTIFICATE-----\n")
    (tmp_path / "empty").write_text("")
    files = {"ca": ours, "cert": ours, "key": key, wrong: tmp_path / content}
    shown = {name: path.read_text() if text else str(path) for name, path in files.items()}
    if not text or content != "empty":
        scratch = tmp_path / "scratch"
        scratch.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(scratch))
        with pytest.raises(ValueError, match=f"credentials: {wrong} {words}"):
            txnkv.connect("grpc+tls://127.0.0.1:1", credentials=shown)
        assert list(scratch.iterdir()) == []
    options = [word for name, path in files.items() for word in (f"--tls-{name}", str(path))]
    found = CliRunner().invoke(main, ["serve", "x", "--listen", "grpc+tls://127.0.0.1:0", *options])
    assert found.exit_code == 2
    assert f"--tls-{wrong} {files[wrong]} {words}" in found.output


KAFKA = ["--kafka", "127.0.0.1:0"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--listen", "grpc://0.0.0.0:0"], "--insecure"),
        (["--listen", "grpc+tls://0.0.0.0:0"], "--tls-cert"),
        (["--listen", "nowhere"], "grpc://HOST:PORT"),
        (["--add-user", "ann"], "--auth FILE"),
        (["--kafka-create-topics", "1025"], "0<=x<=1024"),
        (["--kafka", "127.0.0.1:65536"], "a port up to 65535"),
        ([*KAFKA, "--kafka-advertise", "store-host"], "--kafka-advertise store-host: take HOST"),
        ([*KAFKA, "--kafka-advertise", "store-host:0"], "no client can reach port 0"),
        (["--kafka-advertise", "store-host:9092"], "--kafka-advertise is for --kafka"),
        (["--kafka-create-topics", "3"], "--kafka-create-topics is for --kafka"),
        (["--auth", __file__, "--rights", "read"], "--rights is for --add-user"),
        (["--tables", "orders*"], "--tables is for --add-user"),
        (["--topics", "events"], "--topics is for --add-user"),
        (["--advertise", "foo"], "--advertise foo: take grpc://HOST:PORT or grpc+tls://"),
        (["--advertise", "grpc://[::1]:0"], "--advertise grpc://[::1]:0: take grpc://HOST:PORT"),
    ],
)
def test_the_command_lets_in_nobody_unawares(options: list[str], words: str) -> None:
    found = CliRunner().invoke(main, ["serve", "nowhere", *options])
    assert found.exit_code == 2
    assert words in found.output


EXPIRED = """\
-----BEGIN CERTIFICATE-----
MIIBAzCBqgIBATAKBggqhkjOPQQDAjAOMQwwCgYDVQQDDANvbGQwHhcNMjAwMTAx
MDAwMDAwWhcNMjEwMTAxMDAwMDAwWjAOMQwwCgYDVQQDDANvbGQwWTATBgcqhkjO
PQIBBggqhkjOPQMBBwNCAAS6iBmFa7XqPxLRlxXnhcBX2X3IuFXKSIACzs4id5kO
RvRgoMwgF36qT5QU3gZYVu2Wfk+Wf+x4HPZJDVfhH+nwMAoGCCqGSM49BAMCA0gA
MEUCIQDf0NHtaBhGkkD1MEV200vNTHDZ8oQHDU80J4diqvb63QIgfz8s6pvpWCqa
J3UF9NKTvrurpU2exsw9a2f+JcnBJow=
-----END CERTIFICATE-----
"""
"""Of the year 2020, and its key."""
EXPIRED_KEY = """\
-----BEGIN EC PRIVATE KEY-----
MHcCAQEEILe41zSHrn2jOZx4wjOxPke1Ool9pM/uJ0IPHp1L5Op8oAoGCCqGSM49
AwEHoUQDQgAEuogZhWu16j8S0ZcV54XAV9l9yLhVykiAAs7OIneZDkb0YKDMIBd+
qk+UFN4GWFbtln5Pln/seBz2SQ1X4R/p8A==
-----END EC PRIVATE KEY-----
"""


def test_a_certificate_out_of_its_time_is_told_at_the_start(tmp_path: Path) -> None:
    """The server began without a word, and no client connected."""
    old, old_key = tmp_path / "old.pem", tmp_path / "old.key"
    old.write_text(EXPIRED)
    old_key.write_text(EXPIRED_KEY)
    (tmp_path / "store").write_text("no folder, so that it does not begin")
    for cert, key in ((old, old_key), certified(tmp_path, "new")):
        options = ["--listen", "grpc+tls://127.0.0.1:0", "--tls-cert", cert, "--tls-key", key]
        found = CliRunner().invoke(main, ["serve", str(tmp_path / "store"), *map(str, options)])
        assert found.exit_code != 0
        said = f"clients do not trust --tls-cert {cert}: certificate has expired"
        assert (said in found.output) == (cert == old)


def test_one_user_cannot_take_all(store: txnkv.Client, serve: Callable[..., Server]) -> None:
    server = serve(limits=Limits(transactions=2, guests=2, message_bytes=1 << 16))
    address = f"grpc://127.0.0.1:{server.port}"
    with txnkv.connect(address) as client, txnkv.connect(address) as other:
        kept = [client.new_transaction() for _ in range(2)]
        assert len({txn.id for txn in kept}) == 2
        with pytest.raises(txnkv.UnavailableError, match="open transactions"):
            _ = other.new_transaction().id
        with pytest.raises(txnkv.UnavailableError, match="clients"):
            txnkv.connect(address)
        with pytest.raises(ValueError, match="65,536"):
            client.table("t").insert((1, "x" * (1 << 17)))
        for txn in kept:
            txn.rollback()


def test_hostile_bytes(store: txnkv.Client, serve: Callable[..., Server]) -> None:
    server = serve(limits=Limits(columns=100))
    port = server.port
    client = fl.FlightClient(f"grpc://127.0.0.1:{port}")
    chance = random.Random(14)
    head: dict[str, Any] = {
        "version": VERSION, "guest": "g" * 20, "keepalive": 5.0, "number": 1
    }  # fmt: skip
    sound = [
        pack(head | {"calls": [[0, "tables", 0, None]]}),
        pack(head | {"calls": [[0, "begin", 3, None, {"timeout": 1.0}]]}),
        pack(head | {"first": [[1, 2, 3]], "calls": [["x", "__class__", [], {}, -1]]}),
        pack({"a": [[[[[1]]]]] * 3, "b": b"bytes", "c": (1, 2)}),
        b"\0\0\0\x02\0\0\0\0[]", b"", b"{", b'{"table": 1}', b"\xff" * 100,
        b"\0\1\0\0\0\0\0\0" + b"[" * 65536,
    ]  # fmt: skip

    def attempt(do: Callable[[], Any]) -> None:
        with suppress(fl.FlightError, pa.ArrowException, NotImplementedError):
            do()

    for _ in range(150):
        data = bytearray(chance.choice(sound))
        for _ in range(chance.randrange(4)):
            if data:
                data[chance.randrange(len(data))] = chance.randrange(256)
        data = data[: chance.randrange(len(data) + 1)] if chance.random() < 0.3 else data
        action = fl.Action(chance.choice([ACTION, "txnkv.ping", "none"]), bytes(data))
        attempt(lambda: list(client.do_action(action)))  # noqa: B023
        attempt(lambda: client.do_get(fl.Ticket(bytes(data))).read_all())  # noqa: B023
    with txnkv.connect(f"grpc://127.0.0.1:{port}") as good:
        wide = pa.table({f"c{n}": [1] for n in range(200)})
        with pytest.raises((ValueError, txnkv.TxnkvError)), good.new_session() as session:
            session._data("write", good.table("t"), wide.schema, wide.to_batches(), None, "insert")  # type: ignore[attr-defined]
        good.table("t").insert((1, "still there"))
        assert good.check().problems == []
    assert store.table("t").count() == 1
