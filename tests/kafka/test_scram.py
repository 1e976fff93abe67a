"""SCRAM-SHA-256: the example of RFC 7677, log ins by requests, and files of users of before."""

from __future__ import annotations

import base64
import hashlib
import hmac
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import txnkv
from tests.kafka.test_groups import until
from tools.kafka_wire import Wire
from txnkv.errors import AuthenticationError
from txnkv.kafka import KafkaServer
from txnkv.server import ScramExchange, Users, add_user, users
from txnkv.server.users import ScramVerifier, read_users

Dial = Callable[[KafkaServer], Wire]

SALT = base64.b64decode("W22ZaJ0SNY7soEsUEjb6gQ==")
FIRST = b"n,,n=user,r=rOprNGfwEbeRWgbNEkqO"
ANSWER = b"r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096"
LAST = (
    b"c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,"
    b"p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ="
)
SIGNATURE = b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of users with the one of the example."""
    verifier = ScramVerifier.of("pencil", SALT, 4096)
    assert ScramVerifier.parse(str(verifier)) == verifier
    path = tmp_path / "users.toml"
    path.write_text(f'[users.user]\nscram = "{verifier}"\nrights = "read"\n')
    return path


def exchange(path: Path) -> ScramExchange:
    return ScramExchange(Users(path), "%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0")


def test_the_example(path: Path) -> None:
    log_in = exchange(path)
    assert log_in.answer(FIRST) == ANSWER
    assert log_in.user is None
    assert log_in.answer(LAST) == SIGNATURE
    assert log_in.user is not None
    assert (log_in.user.name, log_in.user.rights) == ("user", "read")


@pytest.mark.parametrize(
    "first",
    [
        b"",
        b"n,,",
        b"n,,n=user",
        b"n,,r=abc",
        b"n,,n=user,r",
        b"p=tls-unique,,n=user,r=abc",
        b"\xff,,n=user,r=abc",
        b"n=user,r=abc",
    ],
)
def test_what_is_no_first_message(path: Path, first: bytes) -> None:
    with pytest.raises(ValueError):  # of several kinds
        exchange(path).answer(first)


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        (b"p=dHzb", b"p=eHzb", AuthenticationError),
        (b"p=dHzb", b"p=*Hzb", ValueError),
        (b",p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ=", b"", ValueError),
        (b",p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ=", b",p=dHzb", AuthenticationError),
        (b"c=biws", b"c=eSws", ValueError),
        (b"r=rOpr", b"r=sOpr", ValueError),
        (b"c=biws,", b"c=biws,x=y,", AuthenticationError),
    ],
)
def test_what_is_no_last_message(path: Path, old: bytes, new: bytes, error: type) -> None:
    log_in = exchange(path)
    log_in.answer(FIRST)
    with pytest.raises(error):
        log_in.answer(LAST.replace(old, new))
    assert log_in.user is None


def test_of_nobody_it_is_asked_as_of_somebody(path: Path) -> None:
    """Under a salt that stays, and whatever is proved then is wrong."""
    users = Users(path)
    salts = {
        bytes(ScramExchange(users, "n").answer(b"n,,n=%s,r=abc" % name)).split(b",")[1]
        for name in (b"eve", b"eve", b"eva")
    }
    assert len(salts) == 2
    log_in = ScramExchange(users)
    log_in.answer(b"n,,n=eve,r=abc")
    nonce = log_in._nonce.encode()
    proof = base64.b64encode(bytes(32))
    with pytest.raises(AuthenticationError, match="nobody's"):
        log_in.answer(b"c=biws,r=%s,p=%s" % (nonce, proof))


def test_who_is_right_waits_for_nobody_who_is_wrong(tmp_path: Path, monkeypatch: Any) -> None:
    """Eight wrong tokens in each half second locked everybody out."""
    token = add_user(tmp_path / "users", "ann", "read", [], [])
    known = Users(tmp_path / "users")
    go_on = threading.Event()
    slow = SimpleNamespace(sleep=lambda _: go_on.wait(60), monotonic=time.monotonic)
    monkeypatch.setattr(users, "time", slow)
    with ThreadPoolExecutor(8) as pool:
        wrong = [pool.submit(known.of_token, f"ann.wrong{number}") for number in range(8)]
        try:
            until(lambda: known._failing == 8)
            assert known.of_token(token).name == "ann"
            verifier = known.scram_of("ann")
            assert known.by_proof("ann", verifier, b"m", _proof(token, verifier)).name == "ann"
        finally:
            go_on.set()
        for each in wrong:
            with pytest.raises(txnkv.AuthenticationError):
                each.result(60)


def test_wrong_tokens_are_told_of_now_and_then(
    tmp_path: Path, monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Of each user: nobody hides behind another. A line for each filled the log."""
    now = [1.0]
    clock = SimpleNamespace(sleep=lambda _: None, monotonic=lambda: now[0])
    monkeypatch.setattr(users, "time", clock)
    add_user(tmp_path / "users", "ann", "read", [], [])
    known = Users(tmp_path / "users")
    for seconds in (1.0, 10.0, 11.0):
        now[0] = seconds
        for token in ("ann.wrong", "eve.wrong", "joe.wrong"):
            with pytest.raises(AuthenticationError):
                known.of_token(token)
    told = ["a wrong token, for ann", "a wrong token, for nobody that is known"]
    assert caplog.messages == told * 2


def _proof(token: str, verifier: ScramVerifier) -> bytes:
    salted = hashlib.pbkdf2_hmac("sha256", token.encode(), verifier.salt, verifier.iterations)
    key = hmac.digest(salted, b"Client Key", "sha256")
    signature = hmac.digest(verifier.stored_key, b"m", "sha256")
    return bytes(one ^ other for one, other in zip(key, signature, strict=True))


def test_a_user_that_is_turned_out_meanwhile(path: Path) -> None:
    users = Users(path)
    log_in = ScramExchange(users, "%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0")
    log_in.answer(FIRST)
    path.write_text("")
    users.scram_of("another")  # the file is read again
    with pytest.raises(AuthenticationError):
        log_in.answer(LAST)


# -- by requests -----------------------------------------------------------------------


def log_in(wire: Wire, name: str, token: str) -> dict[str, Any]:
    """Log in; the answer to the last message."""
    wire.ask("SaslHandshake", mechanism="SCRAM-SHA-256")
    bare = f"n={name},r=abc"
    first = wire.ask("SaslAuthenticate", auth_bytes=f"n,,{bare}".encode())
    assert first["error_code"] == 0
    told = bytes(first["auth_bytes"]).decode()
    nonce, salt, count = (each[2:] for each in told.split(","))
    salted = hashlib.pbkdf2_hmac("sha256", token.encode(), base64.b64decode(salt), int(count))
    unproved = f"c=biws,r={nonce}"
    message = f"{bare},{told},{unproved}".encode()

    def mac(key: bytes, of: bytes) -> bytes:
        return hmac.digest(key, of, hashlib.sha256)

    client_key = mac(salted, b"Client Key")
    signature = mac(hashlib.sha256(client_key).digest(), message)
    proof = bytes(a ^ b for a, b in zip(client_key, signature, strict=True))
    said = f"{unproved},p={base64.b64encode(proof).decode()}".encode()
    last = wire.ask("SaslAuthenticate", auth_bytes=said)
    if last["error_code"] == 0:
        proved = base64.b64encode(mac(mac(salted, b"Server Key"), message))
        assert bytes(last["auth_bytes"]) == b"v=" + proved
    return last


def test_users_log_in(
    store: txnkv.Client, serve: Callable[..., KafkaServer], dial: Dial, tmp_path: Path
) -> None:
    store.create_topic("ours")
    path = tmp_path / "users.toml"
    token = add_user(path, "ann", "read", ["*"], ["*"])
    assert token.partition(".")[2] not in path.read_text()
    server = serve(Users(path))
    wire = dial(server)
    refused = wire.ask("SaslHandshake", mechanism="SCRAM-SHA-512")
    assert refused["mechanisms"] == ["PLAIN", "SCRAM-SHA-256"]
    assert log_in(wire, "ann", "ann.wrong")["error_code"] == 58
    assert log_in(wire, "bob", token)["error_code"] == 58
    assert log_in(wire, "ann", token)["error_code"] == 0
    assert [each["name"] for each in wire.ask("Metadata", topics=None)["topics"]] == ["ours"]
    # One of its messages without the other leads nowhere.
    other = dial(server)
    other.ask("SaslHandshake", mechanism="SCRAM-SHA-256")
    other.ask("SaslAuthenticate", auth_bytes=b"n,,n=ann,r=abc")
    with pytest.raises((EOFError, ConnectionError)):
        other.ask("Metadata", topics=None)


def test_a_file_of_before(
    store: txnkv.Client, serve: Callable[..., KafkaServer], dial: Dial, tmp_path: Path
) -> None:
    """Its users log in by their tokens alone."""
    path = tmp_path / "users.toml"
    token = add_user(path, "ann", "write", ["*"], ["*"])
    lines = [line for line in path.read_text().splitlines() if not line.startswith("scram")]
    path.write_text("\n".join(lines))
    (ann,) = read_users(path)
    assert ann.scram is None
    wire = dial(serve(Users(path)))
    assert log_in(wire, "ann", token)["error_code"] == 58
    wire.ask("SaslHandshake", mechanism="PLAIN")
    said = b"\0ann\0" + token.encode()
    assert wire.ask("SaslAuthenticate", auth_bytes=said)["error_code"] == 0


@pytest.mark.parametrize("scram", ["", "SCRAM-SHA-1$4096:YQ==$YQ==:YQ==", "SCRAM-SHA-256$x"])
def test_no_file_of_users(tmp_path: Path, scram: str) -> None:
    path = tmp_path / "users.toml"
    path.write_text(f'[users.ann]\nrights = "read"\nscram = "{scram}"\n')
    with pytest.raises(ValueError, match="scram of user 'ann' is none"):
        Users(path)
