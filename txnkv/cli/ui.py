"""`txnkv ui`: a store as it lives, as a page in a browser of this machine.

A thread takes a view a second (`top.views`), the numbers of the last ones are kept in a ring
(`Samples`) for the plots; the page asks for what is new. Tables and topics are looked at when they
are opened in the page.

    thread    view view view view ...      ring: the numbers of the last quarter of an hour
    page      GET /state?of=TIME           the last view, and the numbers after a time
              POST /abort?of=ID, /compact  with the page's token: `txnkv txn abort`, `txnkv compact`
              POST /lost?of=PART, /repair  `txnkv repair --accept-loss`, first without --yes

Other pages of the browser are not let in: a request names the address that was printed as
its host (a name that somebody has pointed at 127.0.0.1 is another one), comes from no other
page, and one that changes something shows the token that only this page has.

The ring lies in the runtime folder of the store. So the numbers outlive the server that took them,
and another one goes on with them. Each second has a place:

    place   at % 900      f64 at | f64 x 6 numbers, NaN where there is none | u32 checksum

Where two servers look at one store, both write the same numbers to the same places. The folder
is volatile, as what is in it may be: what does not check is no sample, and where nothing can be
written the ring is of this process alone.
"""

from __future__ import annotations

import math
import os
import secrets
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import click

import txnkv
from txnkv.cli.command_group import words
from txnkv.cli.console import json_text, json_value, require_folder, store_argument
from txnkv.cli.top import views
from txnkv.coordinator import FAILING
from txnkv.core import CoreError
from txnkv.errors import ClosedError, TxnkvError
from txnkv.storage import new_lock, open_private
from txnkv.tables import Tablet
from txnkv.topics import Partition, PartitionOverview, look_at_partition

_DRAWN: Final = 500
"""Row sets and segments of a drawing, at most; offsets on each side of the last stable one."""
_SENT: Final = 300
"""Tables, topics, transactions, ... that the page is sent, at most of each."""
_HEADERS: Final = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


@click.command()
@store_argument
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    help="Of 127.0.0.1; a free one by default.",
)
@click.option("--read-only", is_flag=True, help="No buttons that change something.")
def ui(store: str, port: int, read_only: bool) -> None:
    """Show a store as it lives in a browser on this machine, until Ctrl-C.

    What `txnkv top` shows, with plots over time, and drawings of tables and topics. Needs
    `pip install 'txnkv[ui]'`.
    """
    require_folder(store, "a store is watched", "ui")
    try:
        import uvicorn

        watched = Watched(store)
        server = socket.create_server(("127.0.0.1", port))
        address = "127.0.0.1:{1}".format(*server.getsockname())
        token = "" if read_only else secrets.token_urlsafe()
        app = application(watched, address, token)
    except ModuleNotFoundError as error:
        raise click.ClickException(
            f"{error.name} is missing, by which the page is served: pip install 'txnkv[ui]'"
        ) from None
    signal.signal(signal.SIGTERM, _terminated)
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, lifespan="on", ws="none", server_header=False,
        timeout_graceful_shutdown=2,
    )  # fmt: skip
    with server, watched:
        uvicorn.Server(config).run(sockets=[server])


def _terminated(*_: object) -> None:
    raise SystemExit(0)


class Watched:
    """A store that is looked at once a second, and the numbers of its last views.

    Raises:
        StoreNotFoundError: there is none.
    """

    def __init__(self, path: str, interval: float = 1.0) -> None:
        self.path = path
        self._interval = interval
        self._client = txnkv.connect(path, create=False, read_only=True)
        self._samples = Samples(self._client.instance.store.directory.runtime_path)
        self._view: dict[str, Any] = {}
        self._error: str | None = None
        self._ended = False
        self._mending = new_lock()
        self._thread = threading.Thread(target=self._look, name="txnkv-ui", daemon=True)

    def __enter__(self) -> Watched:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = True
        self._thread.join(60)
        self._client.close()
        self._samples.close()

    def state(self, since: float) -> dict[str, Any]:
        """The last view, and the numbers of those after a time, in seconds since 1970."""
        ring = self._samples.since(since, time.time())
        return {"view": self._view, "ring": ring, "error": self._error}

    def table(self, name: str) -> dict[str, Any]:
        """The schema of a table, and its tablets with the key ranges of their row sets."""
        with self._mending:
            return self._table(name)

    def _table(self, name: str) -> dict[str, Any]:
        schema = self._client.table(name).schema
        engine = self._client.instance.engine
        columns = list(schema.type_names().items())
        tablets = []
        for number, tablet in enumerate(engine.tablets(engine.get(name))):
            found: dict[str, Any] = {"id": tablet.id, "part": f"table:{name}/{number}"}
            try:
                tablets.append({**found, **_row_sets(tablet), "error": None})
            except FAILING as error:
                tablets.append({**found, "error": str(error)})
        return {
            "primary_key": list(schema.primary_key),
            "columns": columns,
            "indexes": [
                {
                    "columns": [columns[number][0] for number in index.columns],
                    "unique": index.unique,
                    "ready": index.ready,
                }
                for index in schema.indexes
            ],
            "tablets": tablets,
        }

    def topic(self, name: str) -> dict[str, Any]:
        """The partitions of a topic: offsets, segments, and transactions that are open there."""
        with self._mending:
            return self._topic(name)

    def _topic(self, name: str) -> dict[str, Any]:
        engine = self._client.instance.topics
        topic = engine.get(name)
        found = []
        for partition in engine.partitions(topic):
            seen = look_at_partition(engine, partition)
            found.append(
                {
                    "number": seen.number,
                    "part": f"topic:{name}/{seen.number}",
                    "start": seen.start,
                    "end": seen.end,
                    "stable": seen.last_stable_offset,
                    "bytes": seen.bytes,
                    "open": [{"id": each.txn_id, "first": each.first_offset} for each in seen.open],
                    "waiting": sum(seen.waiting.values()),
                    **_ended(partition, seen),
                }
            )
        return {"buffer": topic.buffer, "partitions": found}

    def find(self, name: str) -> dict[str, Any]:
        """Tell whether a table or a topic has a name, or neither."""
        with self._mending:
            kinds = {"table": self._client.tables, "topic": self._client.topics}
            return {"kind": next((kind for kind, names in kinds.items() if name in names()), None)}

    def lost(self, part: str) -> dict[str, Any]:
        """Tell what is given up when a damaged part is made to work again, in lines.

        Raises:
            ValueError: it cannot be told, with the reason.
        """
        with self._aside():
            done = self._call("repair", "--accept-loss", part, "--", self.path)
        lines = done.stdout.splitlines()
        if done.returncode and not lines:
            raise ValueError(_reason(done))
        return {"lines": lines, "any": bool(done.returncode)}

    def mend(self, part: str) -> str:
        """Give up what a damaged part has lost, and return what the command says.

        Raises:
            ValueError: it failed, with its own text.
        """
        with self._aside():
            return self.act("repair", "--accept-loss", part, "--yes", "--", self.path)

    def act(self, *command: str) -> str:
        """Call a command, and return what it says.

        It has a process of its own: one that has a store open to read cannot write to it.

        Raises:
            ValueError: it failed, with its own text.
        """
        done = self._call(*command)
        if done.returncode:
            raise ValueError(_reason(done))
        return done.stdout.strip()

    def _call(self, *command: str) -> subprocess.CompletedProcess[str]:
        called = [sys.executable, "-P", "-m", "txnkv", *command]
        return subprocess.run(called, stdin=subprocess.DEVNULL, capture_output=True, text=True)

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Have no file of the store open meanwhile: one that is mended must be nobody's."""
        with self._mending:
            self._client.close()
            try:
                yield
            finally:
                self._client = txnkv.connect(self.path, create=False, read_only=True)

    def _look(self) -> None:
        while not self._ended:
            try:
                for view in views(self._client, self._interval):
                    if self._ended:
                        return
                    self._view, self._error = _cut(view), None
                    self._samples.add(time.time(), _numbers(view))
            except ClosedError:
                time.sleep(self._interval)  # a part is being mended
            except (TxnkvError, OSError) as error:
                self._error = words(error)
                time.sleep(self._interval)


def _reason(done: subprocess.CompletedProcess[str]) -> str:
    return done.stderr.strip().removeprefix("Error: ")


def _row_sets(tablet: Tablet) -> dict[str, Any]:
    """The row sets of a tablet; ranges are places among the ends of all, in the order of keys."""
    infos = tablet.reload().infos
    ends = sorted({key for each in infos for key in (each.min_key, each.max_key)})
    place = {key: at for at, key in enumerate(ends)}
    return {
        "ends": len(ends),
        "count": len(infos),
        "row_sets": [
            {
                "id": each.id,
                "from": place[each.min_key],
                "to": place[each.max_key],
                "first": _key(tablet, each.min_key),
                "last": _key(tablet, each.max_key),
                "rows": each.rows,
                "deleted": each.deleted,
                "bytes": each.size,
                "versioned": each.versioned,
            }
            for each in infos[:_DRAWN]
        ],
    }


def _ended(partition: Partition, seen: PartitionOverview) -> dict[str, Any]:
    """The segments of a log, and the ends of transactions around its last stable offset."""
    low = max(seen.start, seen.last_stable_offset - _DRAWN)
    high = min(seen.end, seen.last_stable_offset + _DRAWN)
    found: dict[str, Any] = {"error": seen.error, "low": low, "high": high}
    found |= {"segments": [], "committed": [], "aborted": []}
    if seen.error is not None or not partition.exists:
        return found
    try:
        with partition.environment.read() as txn:
            log = partition.log
            segments = [(each.base, each.bytes) for each in log.segments(txn)]
            commits = log.commits(txn, low, 2 * _DRAWN)
            aborted = log.aborted(txn, low, high)
    except FAILING as error:
        return {**found, "error": str(error)}
    found["segments"] = segments[-_DRAWN:]
    found["committed"] = [  # a batch that was decided when it was written has no marker
        {"id": each.txn_id, "first": each.first_offset, "marker": each.marker_offset}
        for each in commits
        if each.first_offset < each.marker_offset < high
    ]
    found["aborted"] = [
        {"id": each.txn_id, "first": each.first_offset, "marker": each.last_offset}
        for each in aborted
    ]
    return found


def _key(tablet: Tablet, key: bytes) -> str:
    """A key as text; where it cannot be read, its bytes."""
    try:
        values = [json_value(value) for value in tablet.codec.decode_one(key)]
    except CoreError:
        values = [key.hex()]
    text = ", ".join(str(value) for value in values)
    return text if len(text) <= 60 else f"{text[:59]}\u2026"


def _cut(view: dict[str, Any]) -> dict[str, Any]:
    """A view with the largest of its many tables and topics, and how many there are."""
    floor = txnkv.Timestamp(view["history_floor"])
    cut = {**view, "counts": {}, "history": floor.datetime.isoformat() if floor else None}
    for name in ("tables", "topics"):
        largest = sorted(view[name].items(), key=lambda each: -each[1]["bytes"])
        cut["counts"][name], cut[name] = len(largest), dict(largest[:_SENT])
    for name in ("transactions", "held_up", "subscriptions", "applications"):
        cut["counts"][name], cut[name] = len(view[name]), view[name][:_SENT]
    # Text: numbers of JavaScript are exact to 2^53.
    cut["applications"] = [{**e, "version": str(e["version"])} for e in cut["applications"]]
    return cut


def _numbers(view: dict[str, Any]) -> Sample:
    """The numbers of a view that are plotted."""
    return {
        "commits": view["per_second"]["commits"],
        "p99": view["commit_seconds"]["p99"],
        "conflicts": view["per_second"]["conflicts"],
        "lag": sum(each["lag"] for each in view["subscriptions"]),
        "memory": view["memory_bytes"],
        "files": view["files_bytes"],
    }


# -- the page and its answers ----------------------------------------------------------


def application(watched: Watched, address: str, token: str) -> Any:
    """The ASGI application.

    Args:
        watched: the store.
        address: host and port, by which alone it is asked for.
        token: shown by requests that change something; empty: none may.
    """
    from starlette.applications import Starlette
    from starlette.responses import Response
    from starlette.routing import Route

    own = files("txnkv.cli")
    html = own.joinpath("ui.html").read_text().replace("TOKEN", token)
    pages = {
        "/": (html, "text/html"),
        "/ui.css": (own.joinpath("ui.css").read_text(), "text/css"),
        "/ui.js": (own.joinpath("ui.js").read_text(), "text/javascript"),
    }
    hosts = {address, address.replace("127.0.0.1", "localhost")}
    hosts |= {host.removesuffix(":80") for host in hosts}  # browsers leave that port out
    actions: dict[str, Callable[[str], Any]] = {
        "abort": lambda id: watched.act("txn", "abort", "--", watched.path, str(int(id))),
        "compact": lambda _: watched.act("compact", "--", watched.path),
        "lost": watched.lost,
        "repair": watched.mend,
    }
    looks: dict[str, Callable[[str], Any]] = {
        "state": lambda since: watched.state(float(since or 0)),
        "table": watched.table,
        "topic": watched.topic,
        "find": watched.find,
    }

    def answer(request: Any) -> Response:
        origin = request.headers.get("origin")
        if request.headers.get("host") not in hosts:
            return Response("this page has another address", 403, _HEADERS)
        if origin is not None and origin.removeprefix("http://") not in hosts:
            return Response("another page may not ask this", 403, _HEADERS)
        path = request.url.path
        if path in pages:
            text, kind = pages[path]
            return Response(text, 200, _HEADERS, kind)
        name, of = path.removeprefix("/"), request.query_params.get("of", "")
        if request.method == "POST":
            shown = request.headers.get("x-token", "")
            if not token or not secrets.compare_digest(shown.encode(), token.encode()):
                return Response("the page's token is missing", 403, _HEADERS)
        try:
            found = (actions if request.method == "POST" else looks)[name](of)
        except (TxnkvError, ValueError, OSError) as error:
            return Response(json_text({"error": words(error)}), 400, _HEADERS, "application/json")
        return Response(json_text(found), 200, _HEADERS, "application/json")

    gets = [Route(path, answer, methods=["GET"]) for path in (*pages, *(f"/{n}" for n in looks))]
    posts = [Route(f"/{name}", answer, methods=["POST"]) for name in actions]

    @asynccontextmanager
    async def begun(app: Starlette) -> AsyncIterator[None]:
        click.echo(f"showing {watched.path} at http://{address}/")  # signals end it from here on
        yield

    return Starlette(routes=[*gets, *posts], lifespan=begun)


# -- samples ---------------------------------------------------------------------------

SAMPLED: Final = ("commits", "p99", "conflicts", "lag", "memory", "files")
KEPT_SECONDS: Final = 900
"""Seconds of the ring."""

Sample = dict[str, float | None]

_PLACE: Final = struct.Struct(f"<d{len(SAMPLED)}dI")


class Samples:
    """The samples of the last quarter of an hour. Shared by threads.

    Args:
        folder: of the store's runtime.
    """

    def __init__(self, folder: Path) -> None:
        self._lock = new_lock()
        self._places: dict[int, Sample] = {}
        self._file: int | None = None
        with suppress(OSError):
            self._file = open_private(folder / "ui-samples", os.O_RDWR | os.O_CREAT)
            self._read(os.pread(self._file, KEPT_SECONDS * _PLACE.size, 0))

    def close(self) -> None:
        """Leave the file to the next one."""
        with self._lock:
            file, self._file = self._file, None
            if file is not None:
                os.close(file)

    def add(self, at: float, numbers: Sample) -> None:
        """Keep the numbers of a time, in seconds since 1970."""
        place = int(at) % KEPT_SECONDS
        values = [_number_or_nan(numbers[name]) for name in SAMPLED]
        packed = _PLACE.pack(at, *values, 0)[:-4]
        with self._lock:
            self._places[place] = {"at": at, **numbers}
            if self._file is not None:
                with suppress(OSError):
                    line = packed + struct.pack("<I", zlib.crc32(packed))
                    os.pwrite(self._file, line, place * _PLACE.size)

    def since(self, time: float, now: float) -> list[Sample]:
        """The samples behind a time, of the last quarter of an hour, in their order."""
        begin = max(time, now - KEPT_SECONDS)
        with self._lock:
            found = [(each["at"] or 0.0, each) for each in self._places.values()]
        found.sort(key=lambda each: each[0])
        return [each for at, each in found if begin < at <= now]

    def _read(self, data: bytes) -> None:
        for place in range(len(data) // _PLACE.size):
            packed = data[place * _PLACE.size : (place + 1) * _PLACE.size]
            at, *values, checksum = _PLACE.unpack(packed)
            if checksum == zlib.crc32(packed[:-4]) and int(at) % KEPT_SECONDS == place:
                numbers = (None if math.isnan(value) else value for value in values)
                self._places[place] = {"at": at, **dict(zip(SAMPLED, numbers, strict=True))}


def _number_or_nan(value: float | None) -> float:
    return math.nan if value is None else value
