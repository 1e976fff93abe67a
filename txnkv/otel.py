"""Spans and metrics of OpenTelemetry for the work of a program on its stores (extra `otel`).

    import txnkv.otel

    txnkv.otel.instrument()                    once, where the program sets up its tracing

    POST /orders                               a span of the program's own
      txnkv.write    orders, 100,000 rows      Arrow data, or a row outside of a transaction
      txnkv.commit   transaction 4711          also at the end of a `with` block
    mail                                       another process: context_of(message)
      txnkv.fetch    receipts, 12 messages     linked to the spans in which they were sent

A message that is sent inside of a span carries its context in its headers, as W3C writes it
(`traceparent`), and whoever reads it goes on with the trace:

    with tracer.start_as_current_span("mail", context=txnkv.otel.context_of(message)):
        ...

`instrument` puts a method that makes a span in the place of the plain one. So a program that does
not call it loads nothing and pays nothing. Batches of messages (`send_batch`) carry no context, for
they are columns; polls that find nothing make no span.

Metrics are read when they are collected, from what each open store of this process counts anyway:

    txnkv.commits, .conflicts, .memory_bytes, ...       all that `client.metrics()` has, by store
    txnkv.flush_seconds.count and .sum, ...             its histograms
    db.client.operation.duration                        histogram of what has a span: commit, write,
                                                        scan of all, fetch; `error.type` if it fails
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

import pyarrow as pa

from txnkv import __version__
from txnkv.client import Consumer, Producer, Subscription, Table, Topic
from txnkv.metrics import SECONDS, Metrics
from txnkv.topics import Message
from txnkv.transaction import Scan, Session, Transaction, open_instances

try:
    from opentelemetry import metrics, propagate, trace
    from opentelemetry.context import Context
except ImportError as error:
    raise ImportError(
        f"txnkv.otel needs OpenTelemetry ({error}): pip install 'txnkv[otel]'"
    ) from None

_Do = Callable[..., Any]

_FETCHES: Final = ((Consumer, ("poll", "poll_batch")), (Subscription, ("receive", "receive_many")))
_ROWS: Final = ("insert", "upsert", "update", "delete")
_receiving: Final = ContextVar("receiving", default=False)
_LINKS: Final = 128
"""Messages of one fetch whose spans are linked, at most."""


class _Plain(NamedTuple):
    """A method as it was."""

    kind: type
    name: str
    do: _Do


_plain: list[_Plain] = []
_lengths: WeakKeyDictionary[metrics.MeterProvider, metrics.Histogram] = WeakKeyDictionary()
"""By providers that have the instruments: these are not given back."""
_current: metrics.MeterProvider | None = None
"""The provider whose instruments tell something."""


def instrument(
    tracer_provider: trace.TracerProvider | None = None,
    meter_provider: metrics.MeterProvider | None = None,
) -> None:
    """Make spans of commits, writes, scans and fetches, and metrics, from now on, in this process.

    Spans also of stores on other hosts, once the program has connected to one. Called again, the
    later providers count.

    Args:
        tracer_provider: gets the spans; None for the global one.
        meter_provider: gets the metrics; None for the global one.
    """
    global _current
    uninstrument()
    _current = provider = meter_provider or metrics.get_meter_provider()
    if provider not in _lengths:
        _lengths[provider] = _observe(provider)
    told = _Telling(trace.get_tracer("txnkv", __version__, tracer_provider), _lengths[provider])
    _replace(Transaction, "commit", lambda do: _commit(told, do))
    _replace(Transaction, "commit_async", lambda do: _commit_async(told, do))
    _replace(Session, "write", lambda do: _write(told, do))
    for name in _ROWS:
        _replace(Table, name, lambda do: _row(told, do))
    _replace(Scan, "to_arrow", lambda do: _scan(told, do))
    _replace(Scan, "to_batches", lambda do: _scan_batches(told, do))
    _replace(Topic, "fetch", lambda do: _fetch(told, do))
    for kind, names in _FETCHES:
        for name in names:
            _replace(kind, name, lambda do: _receive(told, do))
    for sender in (Transaction, Session):
        _replace(sender, "send", lambda do: _carrying(do, 4))
    _replace(Producer, "send", lambda do: _carrying(do, 3))


def uninstrument() -> None:
    """Put the plain methods back, and tell no numbers. Without `instrument` before, nothing
    happens.
    """
    global _current
    _current = None
    while _plain:
        kind, name, do = _plain.pop()
        setattr(kind, name, do)


def context_of(message: Message) -> Context:
    """The context that a message was sent in; an empty one where it was sent in no span."""
    return propagate.extract(_texts(message))


def _texts(message: Message) -> Mapping[str, str]:
    return {name: value.decode(errors="replace") for name, value in message.headers}


def _replace(kind: type, name: str, made: Callable[[_Do], _Do]) -> None:
    """Put another method in the place of one, there and where it is overridden."""
    if name in vars(kind):
        plain = vars(kind)[name]
        _plain.append(_Plain(kind, name, plain))
        setattr(kind, name, wraps(plain)(made(plain)))
    overriding: list[type] = kind.__subclasses__()
    for other in overriding:
        _replace(other, name, made)


def _of(handle: Any, **more: Any) -> dict[str, Any]:
    """Attributes of a span; the store first."""
    connection = getattr(handle, "connection", None) or handle._connection
    return {"db.system.name": "txnkv", "txnkv.store": connection.path, **more}


def _name(of: Any) -> str:
    """The name of a table or topic, or of a handle of one."""
    return of if isinstance(of, str) else getattr(of, "name", "")


class _Telling(NamedTuple):
    """Spans, and how long what they are of took."""

    tracer: trace.Tracer
    seconds: metrics.Histogram

    @contextmanager
    def span(self, name: str, about: dict[str, Any]) -> Iterator[trace.Span]:
        """Run a block in a span, and count its length."""
        labels = self._labels(name, about)
        begin = time.perf_counter()
        try:
            with self.tracer.start_as_current_span(f"txnkv.{name}", attributes=about) as span:
                yield span
        except BaseException as error:
            labels["error.type"] = type(error).__name__
            raise
        finally:
            self.seconds.record(time.perf_counter() - begin, labels)

    def found(self, name: str, about: dict[str, Any], begin: int, links: list[trace.Link]) -> None:
        """Make a span of what is done already, and count its length.

        Args:
            name: of the work.
            about: attributes of the span.
            begin: nanoseconds since 1970.
            links: to other spans.
        """
        span = self.tracer.start_span(
            f"txnkv.{name}", None, attributes=about, links=links, start_time=begin
        )
        span.end()
        self.seconds.record((time.time_ns() - begin) / 1e9, self._labels(name, about))

    @staticmethod
    def _labels(name: str, about: dict[str, Any]) -> dict[str, Any]:
        kept = ("db.system.name", "txnkv.store", "txnkv.table", "txnkv.topic")
        return {"db.operation.name": name, **{each: about[each] for each in kept if each in about}}


# -- numbers ---------------------------------------------------------------------------


def _observe(provider: metrics.MeterProvider) -> metrics.Histogram:
    """Make an instrument of each number that a store counts, and return that of lengths."""
    meter = provider.get_meter("txnkv", __version__)
    make = {"counter": meter.create_observable_counter, "gauge": meter.create_observable_gauge}
    for name, each in Metrics():
        unit = "s" if name.endswith("_seconds") else "By" if name.endswith("_bytes") else "1"
        if each.kind != "histogram":
            make[each.kind](f"txnkv.{name}", [_reader(provider, name)], unit, each.help)
            continue
        for part, of in (("count", "1"), ("sum", unit)):
            help = f"{each.help}: {part}"
            make["counter"](f"txnkv.{name}.{part}", [_reader(provider, name, part)], of, help)
    return meter.create_histogram(
        "db.client.operation.duration", "s", "Length of commits, writes, scans and fetches",
        explicit_bucket_boundaries_advisory=SECONDS,
    )  # fmt: skip


def _reader(
    provider: metrics.MeterProvider, name: str, part: str | None = None
) -> Callable[[metrics.CallbackOptions], Iterable[metrics.Observation]]:
    """The callback of an instrument: a number of each store that is open here."""

    def read(_: metrics.CallbackOptions) -> Iterable[metrics.Observation]:
        for instance in open_instances() if _current is provider else ():
            found = getattr(instance.coordinator.metrics, name).read()
            about: dict[str, Any] = {
                "db.system.name": "txnkv",
                "txnkv.store": str(instance.store.directory.path),
                "txnkv.read_only": instance.read_only,
            }
            yield metrics.Observation(found if part is None else found[part], about)

    return read


# -- methods that make a span ----------------------------------------------------------


def _commit(told: _Telling, do: _Do) -> _Do:
    def commit(txn: Any) -> Any:
        with told.span("commit", _of(txn)) as span:
            found = do(txn)
            span.set_attribute("txnkv.transaction", str(int(txn.id)))
            span.set_attribute("txnkv.timestamp", str(int(found)))
            return found

    return commit


def _commit_async(told: _Telling, do: _Do) -> _Do:
    """A span that ends with the future."""

    def commit_async(txn: Any) -> Any:
        about, begin = _of(txn), time.perf_counter()
        span = told.tracer.start_span("txnkv.commit", attributes=about)
        span.set_attribute("txnkv.transaction", str(int(txn.id)))

        def end(future: Any) -> None:
            labels = told._labels("commit", about)
            if (error := future.exception()) is None:
                span.set_attribute("txnkv.timestamp", str(int(future.result())))
            else:
                labels["error.type"] = type(error).__name__
                span.record_exception(error)
                span.set_status(trace.StatusCode.ERROR, str(error))
            span.end()
            told.seconds.record(time.perf_counter() - begin, labels)

        try:
            future = do(txn)
        except BaseException:  # broken off: how it ends is not seen
            span.end()
            raise
        future.add_done_callback(end)
        return future

    return commit_async


def _write(told: _Telling, do: _Do) -> _Do:
    def write(session: Any, table: Any, data: Any, op: str = "insert") -> Any:
        about = _of(session, **{"txnkv.table": _name(table), "db.operation.name": op})
        with told.span("write", about) as span:
            found = do(session, table, data, op)
            for name in ("inserted", "updated", "deleted", "ignored"):
                span.set_attribute(f"txnkv.{name}", getattr(found, name))
            return found

    return write


def _row(told: _Telling, do: _Do) -> _Do:
    def write(table: Any, row: Any) -> Any:
        about = _of(table, **{"txnkv.table": table.name, "db.operation.name": do.__name__})
        with told.span("write", about):
            return do(table, row)

    return write


def _about_scan(scan: Any) -> dict[str, Any]:
    asked = getattr(scan, "_asked", None)
    return _of(scan, **({} if asked is None else {"txnkv.table": asked.table.name}))


def _scan(told: _Telling, do: _Do) -> _Do:
    def to_arrow(scan: Any) -> Any:
        with told.span("scan", _about_scan(scan)) as span:
            found = do(scan)
            span.set_attribute("txnkv.rows", found.num_rows)
            return found

    return to_arrow


def _scan_batches(told: _Telling, do: _Do) -> _Do:
    def to_batches(scan: Any) -> Iterator[pa.RecordBatch]:
        """Not the current span: what the program does between two batches is not the scan's."""
        span = told.tracer.start_span("txnkv.scan", attributes=_about_scan(scan))
        rows = 0
        try:
            for batch in do(scan):
                rows += batch.num_rows
                yield batch
        except Exception as error:
            span.record_exception(error)
            span.set_status(trace.StatusCode.ERROR, str(error))
            raise
        finally:
            span.set_attribute("txnkv.rows", rows)
            span.end()

    return to_batches


def _fetch(told: _Telling, do: _Do) -> _Do:
    def fetch(topic: Any, partition: int, offset: int, *args: Any, **options: Any) -> Any:
        about = {"txnkv.topic": topic.name, "txnkv.partition": partition, "txnkv.offset": offset}
        with told.span("fetch", _of(topic, **about)) as span:
            found = do(topic, partition, offset, *args, **options)
            span.set_attribute("txnkv.bytes", len(found.records))
            return found

    return fetch


def _receive(told: _Telling, do: _Do) -> _Do:
    """A span of what was found, begun when it was looked for."""

    def receive(reader: Any, *args: Any, **options: Any) -> Any:
        if _receiving.get():  # for another of these, which tells of it
            return do(reader, *args, **options)
        begin, token = time.time_ns(), _receiving.set(True)
        try:
            found = do(reader, *args, **options)
        finally:
            _receiving.reset(token)
        messages = [found] if isinstance(found, Message) else found
        count = messages.num_rows if isinstance(messages, pa.RecordBatch) else len(messages or ())
        if count:
            sent = messages[:_LINKS] if isinstance(messages, list) else []
            spans = [trace.get_current_span(context_of(each)).get_span_context() for each in sent]
            links = [trace.Link(span) for span in spans if span.is_valid]
            about = _of(reader, **{"messaging.batch.message_count": count})
            about["txnkv.topic"] = _topic_of(reader)
            told.found("fetch", about, begin, links)
        return found

    return receive


def _topic_of(reader: Any) -> str:
    for name in ("_topic", "_topic_handle"):
        if hasattr(reader, name):
            return _name(getattr(reader, name))
    return str(reader.info.topic.name)


def _carrying(do: _Do, place: int) -> _Do:
    """A `send` whose messages carry the context that they are sent in.

    Args:
        place: of `headers` among the arguments.
    """

    def send(sender: Any, *args: Any, **options: Any) -> Any:
        carrier: dict[str, str] = {}
        propagate.inject(carrier)
        if carrier:
            given = options.pop("headers", None)
            if len(args) > place:
                given, args = args[place], (*args[:place], None, *args[place + 1 :])
            pairs = list(given.items() if isinstance(given, Mapping) else given or ())
            carried = [(name, text.encode()) for name, text in carrier.items()]
            pairs += [pair for pair in carried if pair not in pairs]  # of a session's transaction
            if len(args) > place:
                args = (*args[:place], pairs, *args[place + 1 :])
            else:
                options["headers"] = pairs
        return do(sender, *args, **options)

    return send
