"""Output for people: tables, sizes, durations. JSON for programs."""

from __future__ import annotations

import base64
import json
import math
import os
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Literal, TextIO
from unicodedata import category

import click
import pyarrow as pa
from click.shell_completion import CompletionItem

import txnkv
from txnkv.core import (
    JSON,
    UUID,
    JsonField,
    JsonKind,
    duration_text,
    json_kind,
    json_rows,
    uuid_texts,
)
from txnkv.errors import NotSupportedError, TxnkvError
from txnkv.remote import is_address

if TYPE_CHECKING:  # loaded when something is shown to people
    from rich.console import Console
    from rich.progress import Progress

_PIPE_WIDTH: Final = 1 << 16

json_option = click.option("--json", "as_json", is_flag=True, help="JSON, for programs.")


def _folders(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(incomplete, type="dir")]


def _names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The tables or topics of the store that stands before, for a shell's completion."""
    try:
        with txnkv.connect(ctx.params["store"], create=False, read_only=True) as client:
            names = client.topics() if param.name == "topic" else client.tables()
    except (TxnkvError, OSError, KeyError, TypeError):
        return []
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


store_argument = click.argument("store", metavar="STORE", shell_complete=_folders)
table_argument = click.argument("table", metavar="TABLE", shell_complete=_names)
topic_argument = click.argument("topic", metavar="TOPIC", shell_complete=_names)
topic_or_none_argument = click.argument(
    "topic", metavar="[TOPIC]", required=False, shell_complete=_names
)
snapshot_option = click.option(
    "--snapshot", "at", metavar="WHEN", help="A timestamp, or a time with its zone."
)
yes_option = click.option("--yes", is_flag=True, help="Do not ask.")
partitions_option = click.option(
    "-p",
    "--partition",
    "partitions",
    multiple=True,
    type=click.IntRange(min=0),
    help="This partition alone; may be repeated.",
)


def require_folder(store: str, what: str, command: str) -> None:
    """Refuse the address of a server where a command looks into the store's folder.

    Args:
        store: as it was given.
        what: is done there, as "topics are listed".
        command: that does it.

    Raises:
        NotSupportedError: it is an address.
    """
    if is_address(store):
        raise NotSupportedError(f"{what} on the store's host: `txnkv {command}` there")


_CLOSED: Final = "stdout is closed: there is nowhere to write to"


def out() -> Console:
    """Stdout; without line breaks of its own when it is a pipe or a file."""
    from rich.console import Console

    class Out(Console):
        """One that leaves the error of a pipe that nobody reads any more to the command."""

        def on_broken_pipe(self) -> None:
            raise  # It is called while the error is handled.

    if sys.stdout is None:
        raise click.ClickException(_CLOSED)
    console = Out(file=sys.stdout, highlight=False, soft_wrap=False)
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    return console


def err() -> Console:
    """Stderr."""
    from rich.console import Console

    return Console(file=sys.stderr, highlight=False)


def confirm(question: str, yes: bool) -> None:
    """Ask before something goes for good, unless `yes` was said.

    Raises:
        click.ClickException: the answer is no.
        click.UsageError: nobody is there to be asked.
    """
    if yes:
        return
    if sys.stdin is None or not sys.stdin.isatty():
        raise click.UsageError(f"{question} Say --yes")
    if not click.confirm(question, err=True):
        raise click.ClickException("nothing was changed")


def stdout() -> BinaryIO:
    """Stdout for bytes, behind what was printed.

    Raises:
        click.ClickException: it is closed.
    """
    if sys.stdout is None:  # as Python has it
        raise click.ClickException(_CLOSED)
    sys.stdout.flush()
    return sys.stdout.buffer


def stdin() -> TextIO:
    """Stdin.

    Raises:
        click.ClickException: it is closed.
    """
    if sys.stdin is None:  # as Python has it
        raise click.ClickException("stdin is closed: there is nothing to read")
    return sys.stdin


def open_bytes(path: str) -> BinaryIO:
    """A file to read, or stdin for "-", which `close_bytes` leaves open.

    Raises:
        click.ClickException: stdin is closed.
    """
    return stdin().buffer if path == "-" else open(path, "rb")


def length_of(raw: BinaryIO) -> int | None:
    """The bytes of a file; None of a pipe."""
    with suppress(OSError):
        if os.path.isfile(raw.fileno()):
            return os.fstat(raw.fileno()).st_size
    return None


def close_bytes(file: BinaryIO) -> None:
    """Give back what `open_bytes` opened."""
    if sys.stdin is None or file is not sys.stdin.buffer:
        file.close()


def print_json(value: Any) -> None:
    """One JSON document on one line."""
    stdout()
    click.echo(json_text(value))


def tell(as_json: bool, document: Any, text: str) -> None:
    """Tell a program, or people, what was done."""
    click.echo(json_text(document) if as_json else text)


def json_text(value: Any) -> str:
    """Strict JSON: NaN and infinities, which it does not have, are null."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), ensure_ascii=False, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value


def row_text(row: Mapping[str, Any], schema: pa.Schema) -> str:
    """A row as JSON: columns of JSON are part of it, as they are in the store."""
    return object_text(
        {
            name: value
            if value is not None and schema.field(name).type == JSON
            else json_text(json_value(value, schema.field(name).type))
            for name, value in row.items()
        }
    )


def object_text(members: Mapping[str, str]) -> str:
    """An object of members that are JSON."""
    return f"{{{', '.join(f'{json_text(name)}: {text}' for name, text in members.items())}}}"


def json_value(value: Any, kind: pa.DataType | None = None) -> Any:
    """A value for JSON: what it has not as text, binary as base64.

    Args:
        value: as Python has it.
        kind: its type, which tells a map without pairs from a list.
    """
    if isinstance(value, dict):
        fields = kind if isinstance(kind, pa.StructType) else ()
        kinds = {field.name: field.type for field in fields}
        return {name: json_value(item, kinds.get(name)) for name, item in value.items()}
    if isinstance(value, list):
        is_map = isinstance(kind, pa.MapType)
        inner = getattr(kind, "item_type" if is_map else "value_type", None)
        if is_map or (value and all(type(i) is tuple for i in value)):
            return {str(json_value(name)): json_value(item, inner) for name, item in value}
        return [json_value(item, inner) for item in value]
    if isinstance(value, datetime) and (before := value.utcoffset()) is not None:
        # Before its standard time a zone has seconds, of which other readers know nothing.
        return (value.astimezone(UTC) if before.seconds % 60 else value).isoformat()
    if isinstance(value, (date, datetime, time)):
        return value.isoformat()
    if isinstance(value, timedelta):
        return duration_text(value)
    if isinstance(value, pa.MonthDayNano):
        return _interval_text(value)
    if isinstance(value, (Decimal, uuid.UUID)):
        return str(value)
    return base64.b64encode(value).decode() if isinstance(value, bytes) else value


def _interval_text(value: pa.MonthDayNano) -> str:
    """An interval of DuckDB as ISO 8601 writes it, each part with its sign: P14M3DT-4S."""
    months, days, nanoseconds = value
    if not months and not days:
        return duration_text(timedelta(microseconds=nanoseconds // 1000))
    seconds = Decimal(nanoseconds).scaleb(-9).normalize()
    parts = (f"{months}M" * bool(months), f"{days}D" * bool(days), f"T{seconds:f}S" * bool(seconds))
    return "P" + "".join(parts)


# -- JSON by columns -------------------------------------------------------------------


def json_lines(batch: pa.RecordBatch) -> pa.Buffer | bytes:
    """The rows as lines of JSON, made in the core; the GIL is free most of the time."""
    if not batch.num_columns:
        return b"{}\n" * batch.num_rows
    columns = zip(batch.schema.names, batch.columns, strict=True)
    return objects([(name, *json_form(column)) for name, column in columns])


def objects(members: Sequence[tuple[str, pa.Array, JsonKind]]) -> pa.Buffer:
    """A JSON object a line, of the names of members, their values and the form of these."""
    return json_rows(json_fields(members), len(members[0][1]), "}\n")


def json_fields(members: Sequence[tuple[str, pa.Array, JsonKind]]) -> list[JsonField]:
    """The members of objects, of which each wants a brace behind it."""
    marks = ["{", *[", "] * (len(members) - 1)]
    return [
        (f"{mark}{json_text(name)}: ", values, kind)
        for mark, (name, values, kind) in zip(marks, members, strict=True)
    ]


def json_form(column: pa.Array) -> tuple[pa.Array, JsonKind]:
    """Values, and the form in which the core writes them as `json_text(json_value(value))` does."""
    kind = column.type
    form = json_kind(kind)
    if form is not None:
        return column, form
    if kind == JSON:
        return column.storage, JsonKind.RAW
    if kind == UUID:
        return uuid_texts(column), JsonKind.STRING
    if pa.types.is_decimal(kind):
        return column.cast(pa.string()), JsonKind.STRING
    values = (json_value(value, kind) for value in column.to_pylist())
    return pa.array(map(json_text, values), pa.string()), JsonKind.RAW


# -- tables and bars for people --------------------------------------------------------


def printable(text: str) -> str:
    """The same with what would change a terminal as Python escapes it."""
    if text.isprintable():
        return text
    return "".join(
        each.encode("unicode_escape").decode()
        if (category(each) in ("Cc", "Cs") and each != "\n") or each in _TURNS
        else each
        for each in text
    )


_TURNS: Final = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
"""Signs that turn the direction of all text that follows."""


def print_grid(
    head: Sequence[str], rows: Iterable[Sequence[str]], right: Iterable[str] = ()
) -> None:
    """A table; the columns named in `right` are aligned to the right.

    Where a terminal is too narrow for it, each row is names and values, one a line.
    """
    from rich import box
    from rich.table import Table as Grid
    from rich.text import Text

    grid = Grid(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    numbers = set(right)
    names, cells = [printable(name) for name in head], [list(map(printable, row)) for row in rows]
    console = out()
    columns = [(name, *(row[i] for row in cells)) for i, name in enumerate(names)]
    widths = _widths(columns, [name in numbers for name in head], console.width)
    if widths is None:
        for i, row in enumerate(cells):
            if i:
                click.echo()
            print_pairs(zip(names, row, strict=True))
        return
    for name, printed, width in zip(head, names, widths, strict=True):
        justify: Literal["right", "left"] = "right" if name in numbers else "left"
        grid.add_column(Text(printed), justify=justify, overflow="fold", width=width)
    for row in cells:
        grid.add_row(*map(Text, row))
    console.print(grid, crop=False)


_GAP: Final = 3
"""Between two columns."""
_LONG_WORD: Final = 24
"""Longer ones may be broken, to have a table."""


def _widths(columns: Sequence[Sequence[str]], whole: Sequence[bool], room: int) -> list[int] | None:
    """Return how wide columns of these texts are in a table.

    Args:
        columns: names first.
        whole: those with texts that are not broken, as numbers are.
        room: of the table.

    Returns:
        None: names, numbers and words do not fit.
    """
    from rich.cells import cell_len

    room -= _GAP * (len(columns) - 1)
    least, widths = [], []
    for texts, number in zip(columns, whole, strict=True):
        longest = max(cell_len(line) for text in texts for line in text.split("\n"))
        name = max(map(cell_len, texts[0].split()), default=0)
        word = max((cell_len(word) for text in texts[1:] for word in text.split()), default=0)
        least.append(max(1, name, word if number else min(word, _LONG_WORD)))
        widths.append(max(1, min(longest, room)))
    if sum(least) > room:
        return None
    while (over := sum(widths) - room) > 0:
        widest = max(range(len(widths)), key=lambda i: (widths[i] > least[i], widths[i]))
        widths[widest] -= min(over, max(1, (widths[widest] - least[widest]) // 8))
    return widths


def print_pairs(pairs: Iterable[tuple[str, str]]) -> None:
    """Name and value, one a line."""
    from rich.table import Table as Grid
    from rich.text import Text

    grid = Grid.grid(padding=(0, 2))
    grid.add_column(style="bold", overflow="fold")
    grid.add_column(overflow="fold")
    for name, value in pairs:
        grid.add_row(Text(printable(name)), Text(printable(value)))
    out().print(grid, crop=False)


def bar(unit: str = "") -> Progress:
    """A progress bar on stderr, there only while it is a terminal that watches."""
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    console = err()
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[note]}" + unit),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


@contextmanager
def steps(what: str, noun: str = "") -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr while steps are done, which are of this noun, or "bytes", or not counted."""
    with bar() as progress:
        task = progress.add_task(what, total=None, note="")

        def step(done: int, total: int) -> None:
            counted = f"{done:,}/{total:,} {noun}" if noun else ""
            note = f"{size(done)} of {size(total)}" if noun == "bytes" else counted
            progress.update(task, completed=done, total=total, note=note)

        yield step


def size(count: float) -> str:
    """Bytes, as 1.5 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def rate(count: int, seconds: float, noun: str = "row") -> str:
    """Return a rate per second as text: 2.4 M rows/s."""
    per_second = count / max(seconds, 1e-9)
    if per_second >= 1e6:
        return f"{per_second / 1e6:.1f} M {noun}s/s"
    return f"{per_second:,.0f} {noun}s/s"


def duration(seconds: float) -> str:
    """Return a duration as text: 4.2 s, 3 min 20 s, 2 h 5 min, 3 d 4 h."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    for unit, small, large in (("min", "s", 60), ("h", "min", 3600)):
        if seconds < large * 60:
            return f"{seconds // large:.0f} {unit} {seconds % large // (large // 60):.0f} {small}"
    return f"{seconds // 86400:,.0f} d {seconds % 86400 // 3600:.0f} h"


def oldest_snapshot(stats: dict[str, Any]) -> str | None:
    """Return the oldest snapshot that keeps versions as text: 3 min 20 s, process 22885."""
    found = stats["oldest_snapshot"]
    return found and f"{duration(found['seconds'])}, process {found['pid']}"


def plural(count: int, noun: str) -> str:
    """Return a count with its noun: 1 row, 2,000 rows."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
