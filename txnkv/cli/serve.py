"""`txnkv serve`: a store for programs on other hosts."""

from __future__ import annotations

import ipaddress
import logging
import os
import re
import select
import signal
import socket
import ssl
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click
from click.core import ParameterSource

from txnkv.cli.command_group import Stopped
from txnkv.cli.console import store_argument
from txnkv.errors import StoreNotFoundError, UnavailableError
from txnkv.kafka import KafkaServer
from txnkv.remote import require_certificates, require_pair, why_untimely
from txnkv.server import Limits, Server, Users
from txnkv.server import add_user as add_user_to
from txnkv.topics import MAX_PARTITIONS

_LISTEN: Final = re.compile(r"(grpc|grpc\+tls)://(\[[0-9a-fA-F:]+\]|[^/:]+):(\d+)")

_ADDRESS: Final = re.compile(r"(\[[0-9a-fA-F:]+\]|[^/:]+):(\d+)")

_ADVERTISED: Final = re.compile(rf"grpc(?:\+tcp|\+tls)?://{_ADDRESS.pattern}")

_ONLY_WITH: Final = {
    "rights": "add_user",
    "tables": "add_user",
    "topics": "add_user",
    "kafka_advertise": "kafka",
    "kafka_create_topics": "kafka",
}
"""Options that mean nothing without another."""

_STOPS: Final = (signal.SIGINT, signal.SIGTERM)
_PATIENCE: Final = 5
"""Seconds for calls that are under way when the server is stopped."""
_LOOK_EVERY: Final = 1.0
"""Seconds until it is seen whether the store is still there."""

_limit = click.IntRange(min=1)
_file = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command()
@store_argument
@click.option(
    "--listen",
    default="grpc://127.0.0.1:8815",
    show_default=True,
    metavar="ADDRESS",
    help="grpc://HOST:PORT, or grpc+tls://HOST:PORT; port 0 takes a free one.",
)
@click.option(
    "--kafka",
    metavar="HOST:PORT",
    help="Serve topics to Kafka's clients too; with the same users and certificate.",
)
@click.option(
    "--kafka-advertise",
    metavar="HOST:PORT",
    help="Where Kafka's clients reach it, which they are told; else where they have come.",
)
@click.option(
    "--kafka-create-topics",
    type=click.IntRange(0, MAX_PARTITIONS),
    default=0,
    metavar="PARTITIONS",
    help="Make topics for which Kafka's clients ask and that there are not.",
)
@click.option(
    "--advertise",
    multiple=True,
    metavar="ADDRESS",
    help="Where others reach it, which tokens tell; else where the client does that makes one.",
)
@click.option("--tls-cert", type=_file, help="The server's certificate, PEM.")
@click.option("--tls-key", type=_file, help="Its key, PEM.")
@click.option(
    "--tls-ca", type=_file, help="Clients show a certificate of this authority (mutual TLS)."
)
@click.option(
    "--auth",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Users, the hashes of their tokens, and their rights.",
)
@click.option("--insecure", is_flag=True, help="Let anybody in, from other hosts too.")
@click.option("--add-user", metavar="NAME", help="Add a user to --auth FILE, print the token, end.")
@click.option(
    "--rights",
    type=click.Choice(["read", "write", "admin"]),
    default="read",
    show_default=True,
    help="Of the user that is added.",
)
@click.option("--tables", multiple=True, metavar="PATTERN", help="Its tables; all by default.")
@click.option("--topics", multiple=True, metavar="PATTERN", help="Its topics; all by default.")
@click.option(
    "--max-message", type=_limit, default=Limits.message_bytes, show_default=True, help="Bytes."
)
@click.option(
    "--max-transactions",
    type=_limit,
    default=Limits.transactions,
    show_default=True,
    help="Open ones of a user.",
)
@click.option(
    "--max-streams",
    type=_limit,
    default=Limits.streams,
    show_default=True,
    help="At once, of a user.",
)
def serve(store: str, listen: str, auth: Path | None, add_user: str | None, **given: Any) -> None:
    """Serve STORE to programs on other hosts, until it is stopped.

    They connect by the address: txnkv.connect("grpc+tls://host:8815", credentials="TOKEN").
    """
    if add_user is not None:
        _add(auth, add_user, given)
        return
    tls, host = _checked(listen, auth, given)
    logging.basicConfig(format="%(asctime)s %(name)s: %(message)s", level=logging.INFO)
    limits = Limits(
        message_bytes=given["max_message"],
        transactions=given["max_transactions"],
        streams=given["max_streams"],
    )
    users = None if auth is None else Users(auth)
    try:
        server = Server(store, listen, users, limits, given["advertise"], **tls)
    except UnavailableError as error:
        raise _cannot_listen(listen, host) or error from None
    kafka = None if given["kafka"] is None else _kafka(store, users, given)
    stopped = _stops()
    scheme = listen.partition("://")[0]
    click.echo(f"serving {store} at {scheme}://{host}:{server.port}")
    if kafka is not None:
        at = given["kafka"].rpartition(":")[0]
        click.echo(f"serving its topics to Kafka's clients at {at}:{kafka.port}")
    end: Exception | None = None
    try:
        if _stopped_by(stopped, server, store) == signal.SIGINT:
            end = Stopped("stopped")
    except Exception as error:  # told when all is closed
        end = error
    if kafka is not None:
        kafka.close()
    if not server.close(_PATIENCE):
        click.echo(f"calls that had not ended after {_PATIENCE} s were cut off", err=True)
        _exit(end)
    if end is not None:
        raise end


def _cannot_listen(listen: str, host: str) -> UnavailableError | None:
    """Tell why, which gRPC does not; None: for another reason."""
    port = int(listen.rpartition(":")[2])
    try:
        socket.create_server((host.strip("[]"), port), family=_family(host)).close()
    except OSError as error:
        return UnavailableError(f"cannot listen at {listen}: {os.strerror(error.errno or 0)}")
    return None


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _exit(end: Exception | None) -> None:
    """End the process, whatever its threads are at."""
    code = 0
    if end is not None:
        told = end if isinstance(end, click.ClickException) else click.ClickException(str(end))
        told.show()
        code = told.exit_code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _stops() -> int:
    """Return a pipe out of which the numbers of signals come, from here on.

    They are written where the signal arrives. Python's own handlers run in the main thread when it
    comes back from what it waits for: one that arrives as it begins to wait, or in another thread,
    would not end the wait.
    """
    stopped, stop = os.pipe()
    os.set_blocking(stop, False)
    signal.set_wakeup_fd(stop)
    for number in _STOPS:
        signal.signal(number, lambda *_: None)
    return stopped


def _stopped_by(stopped: int, server: Server, store: str) -> int:
    """Wait for a signal that stops the server; its number.

    Raises:
        ClickException: the store is gone: a server that is started again serves what is there then.
    """
    while True:
        readable, _, _ = select.select([stopped], [], [], _LOOK_EVERY)
        if readable and (number := os.read(stopped, 1)[0]) in _STOPS:
            return number
        try:
            server.require_store()
        except StoreNotFoundError:
            raise click.ClickException(
                f"{store} was removed, moved or replaced: the server ends. Put the store back, or "
                "name where it is now, and start the server again"
            ) from None


def _add(auth: Path | None, name: str, given: dict[str, Any]) -> None:
    if auth is None:
        raise click.UsageError("--add-user adds to a file: say which by --auth FILE")
    tables, topics = given["tables"] or ("*",), given["topics"] or ("*",)
    token = add_user_to(auth, name, given["rights"], tables, topics)
    click.echo(token)
    click.echo(f"{auth} has its hash; the token itself is nowhere but here", err=True)


def _checked(listen: str, auth: Path | None, given: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Options of the Flight server, and the host, of a server that lets in nobody unawares."""
    found = _LISTEN.fullmatch(listen)
    if found is None:
        raise click.UsageError(f"--listen {listen}: take grpc://HOST:PORT or grpc+tls://HOST:PORT")
    _check_others(given)
    if given["kafka"] is not None:
        _check_kafka(given["kafka"], auth, given)
    scheme, host, _ = found.groups()
    cert, key, ca = given["tls_cert"], given["tls_key"], given["tls_ca"]
    insecure = given["insecure"]
    if scheme == "grpc":
        if cert or key or ca:
            raise click.UsageError("a certificate is for grpc+tls://")
        if not _is_loopback(host) and not insecure:
            raise click.UsageError(
                f"{listen} is open to other hosts, without encryption: take grpc+tls:// with "
                "--tls-cert and --tls-key, or say --insecure"
            )
        return {}, host
    if cert is None or key is None:
        raise click.UsageError("grpc+tls:// needs --tls-cert and --tls-key")
    if auth is None and not _is_loopback(host) and not insecure:
        raise click.UsageError(
            f"{listen} lets in anybody: say who may by --auth FILE, or say --insecure"
        )
    try:
        require_pair(str(cert), str(key), f"--tls-cert {cert}", f"--tls-key {key}")
        if ca is not None:
            require_certificates(str(ca), f"--tls-ca {ca}")
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    if said := why_untimely(str(cert), str(key)):
        click.echo(f"clients do not trust --tls-cert {cert}: {said}. Take another", err=True)
    options: dict[str, Any] = {"tls_certificates": [(cert.read_bytes(), key.read_bytes())]}
    if ca is not None:
        options |= {"verify_client": True, "root_certificates": ca.read_bytes()}
    return options, host


def _check_others(given: dict[str, Any]) -> None:
    """Refuse options that would do nothing, and addresses that nobody could reach."""
    source = click.get_current_context().get_parameter_source
    for name, other in _ONLY_WITH.items():
        if source(name) is not ParameterSource.DEFAULT and given.get(other) is None:
            option, needed = (f"--{each.replace('_', '-')}" for each in (name, other))
            raise click.UsageError(f"{option} is for {needed}")
    for address in given["advertise"]:
        found = _ADVERTISED.fullmatch(address)
        if found is None or not 0 < int(found[2]) < 1 << 16:
            raise click.UsageError(
                f"--advertise {address}: take grpc://HOST:PORT or grpc+tls://HOST:PORT"
            )
    told = given["kafka_advertise"]
    if told is not None and not _kafka_address("--kafka-advertise", told)[1]:
        raise click.UsageError(f"--kafka-advertise {told}: no client can reach port 0")


def _check_kafka(address: str, auth: Path | None, given: dict[str, Any]) -> None:
    host, _ = _kafka_address("--kafka", address)
    if _is_loopback(host) or given["insecure"]:
        return
    if given["tls_cert"] is None or auth is None:
        raise click.UsageError(
            f"--kafka {address} is open to other hosts: take --tls-cert, --tls-key and --auth "
            "FILE, or say --insecure"
        )


def _kafka_address(option: str, address: str) -> tuple[str, int]:
    found = _ADDRESS.fullmatch(address)
    if found is None or int(found[2]) >= 1 << 16:
        raise click.UsageError(f"{option} {address}: take HOST:PORT, with a port up to 65535")
    return found[1].strip("[]"), int(found[2])


def _kafka(store: str, users: Users | None, given: dict[str, Any]) -> KafkaServer:
    host, port = _kafka_address("--kafka", given["kafka"])
    told = given["kafka_advertise"]
    told = None if told is None else _kafka_address("--kafka-advertise", told)
    tls = None
    if given["tls_cert"] is not None:
        sys.unraisablehook = without_names(sys.unraisablehook)
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(given["tls_cert"], given["tls_key"])
        if given["tls_ca"] is not None:
            tls.load_verify_locations(given["tls_ca"])
            tls.verify_mode = ssl.CERT_REQUIRED
    made = given["kafka_create_topics"]
    return KafkaServer(store, host, port, users, tls, made, told)


def without_names(tell: Callable[[Any], object]) -> Callable[[Any], object]:
    """A hook for errors that nobody catches, without those of TLS names that are not ASCII: anybody
    can send these, and Python tells of each in five lines.
    """

    def told(error: Any) -> None:
        named = isinstance(error.object, bytes) and error.exc_type is UnicodeDecodeError
        if not named:
            tell(error)

    return told


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
