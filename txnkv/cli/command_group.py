"""The end of a command: one line on stderr for an error, and an exit status.

The exit statuses:

    0      done; also when the reader of a pipe went away, as `head` does
    1      it failed
    2      it was called wrongly
    130    Ctrl-C; the line says what of it is durable
"""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import IO, Any, Final

import click
from click.shell_completion import CompletionItem

import txnkv
from txnkv.errors import RowErrors, SchemaError, StoreNotFoundError, TxnkvError


class Group(click.Group):
    """A click group that loads the command which is called, and tells errors.

    Args:
        homes: the commands in their order, and the module of each.
    """

    def __init__(self, *, homes: Mapping[str, str], **options: Any) -> None:
        super().__init__(**options)
        self._homes = homes

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._homes)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._homes:
            return None
        found: click.Command = getattr(import_module(self._homes[cmd_name]), cmd_name)
        return found

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Commands by name, without the help that would load the modules of them all."""
        if incomplete.startswith("-"):
            return super().shell_complete(ctx, incomplete)
        return [CompletionItem(name) for name in self._homes if name.startswith(incomplete)]

    def main(self, *args: Any, **options: Any) -> Any:
        if not args and "args" not in options and sys.argv[1:2] != ["demo"]:
            # The process is this command's alone.
            sys.meta_path.insert(0, _Without("pandas", "numpy"))
        try:
            return super().main(*args, **options)
        except SystemExit as end:
            if end.code == Stopped.exit_code:
                # All is closed. A thread of Arrow that still reads its input would not survive the
                # interpreter's own end, and make a crash of it.
                with suppress(OSError):
                    sys.stdout.flush()
                os._exit(Stopped.exit_code)
            raise
        except OSError as error:  # of --help, which no command writes
            _leave_stdout()
            click.ClickException(words(error)).show()
            sys.exit(1)

    def invoke(self, ctx: click.Context) -> Any:
        with told():
            return super().invoke(ctx)


class _Without:
    """Hides modules from imports.

    Arrow loads numpy with itself, and pandas at the first list that is made an array, if only to
    ask whether the list is a thing of theirs; that takes a tenth of a second and half of one, and
    no command needs them.
    """

    def __init__(self, *names: str) -> None:
        self._names = names

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name in self._names:
            raise ModuleNotFoundError(f"the command line does without {name}", name=name)


class Stopped(click.ClickException):
    """Ctrl-C."""

    exit_code = 128 + signal.SIGINT

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(self.format_message(), file=file, err=True)


@contextmanager
def told() -> Iterator[None]:
    """Turn what a user can mend into a ClickException of one line."""
    try:
        yield
    except KeyboardInterrupt:
        raise Stopped("stopped") from None
    except OSError as error:
        if error.errno == errno.EPIPE:
            _leave_stdout()
            raise click.exceptions.Exit(0) from None
        raise click.ClickException(words(error)) from error
    except _mendable() as error:
        raise click.ClickException(words(error)) from error


def _mendable() -> tuple[type[Exception], ...]:
    import pyarrow as pa  # only when something went wrong: it takes a while

    return (TxnkvError, ValueError, OverflowError, RecursionError, pa.ArrowException)


def _leave_stdout() -> None:
    """Nobody reads it any more: what is still in its buffer is written to nowhere at the exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


@contextmanager
def stopping(tell: Callable[[], str]) -> Iterator[None]:
    """Have Ctrl-C tell what of the command is durable."""
    try:
        yield
    except KeyboardInterrupt:
        raise Stopped(f"stopped; {tell()}") from None


class OneTransaction:
    """The transaction in which a command does all, and what Ctrl-C tells of it.

    Attributes:
        wrote: what it writes, as "5 rows".

    Args:
        store: as it was given.
        done: what is done, as "deleted".
    """

    wrote = "all"

    def __init__(self, store: str, done: str) -> None:
        self._store = store
        self._done = done
        self._txn: txnkv.Transaction | None = None
        self._committed: bool | None = None

    @contextmanager
    def begin(self, client: txnkv.Client) -> Iterator[txnkv.Transaction]:
        """Begin it; it is committed at the end of the block, and has no timeout."""
        try:
            with client.transaction(timeout=None) as self._txn:
                self._committed = False
                yield self._txn
                self.may_commit()
            self._committed = True
        except BaseException:
            if self._txn is not None and self._committed is None:
                try:
                    self._find_out(self._txn)  # now: later the client is closed
                except KeyboardInterrupt:
                    self._find_out(self._txn)
            raise

    def may_commit(self) -> None:
        """Note that it may be committed from here on."""
        self._committed = None

    def _find_out(self, txn: txnkv.Transaction) -> None:
        """Ask for its state, which a commit that goes on by itself has soon."""
        until = time.monotonic() + _PATIENCE
        with suppress(TxnkvError):
            state = txn.state
            while state.committing and not state.decided and time.monotonic() < until:
                time.sleep(0.01)
                state = txn.state
            if state.decided or not state.committing:
                self._committed = state.committing

    def stopped(self, nothing: str = "") -> str:
        """Tell what is durable: all or nothing.

        Args:
            nothing: what there is to say more of nothing.
        """
        if self._txn is None or self._committed is False:
            return f"nothing was {self._done}{nothing}"
        if self._committed:
            return f"{self.wrote} had been {self._done} by then, and stay"
        ask = "`txnkv txn list`"
        with suppress(TxnkvError):
            ask = f"`txnkv txn show {self._store} {self._txn.id.local}`"
        return f"whether anything was {self._done} is not known here: {ask} may know"


_PATIENCE: Final = 5.0
"""Seconds to wait for the outcome of a commit that was interrupted."""


@contextmanager
def given() -> Iterator[None]:
    """Turn what is wrong with a value of the command line into a wrong call of the command."""
    try:
        yield
    except (ValueError, OverflowError, RecursionError, SchemaError) as error:
        context = click.get_current_context(silent=True)
        raise click.UsageError(words(error), context) from error


_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


_COMMANDS: Final = {
    "exists_ok=True": "--exists-ok",
    "Make it with client.create_table(...)": "`txnkv create` or `txnkv load` makes one",
    "Make it with client.create_topic(...)": "`txnkv topics create` makes one",
}
"""Advice of errors to programs, and the same to who types commands."""


def words(error: BaseException) -> str:
    """An error in one line."""
    if isinstance(error, RowErrors):
        return refused(error)
    if isinstance(error, StoreNotFoundError):
        text = str(error).split(". ")[0]
        return text + ("; `txnkv init` makes one" if _is_no_store(text) else "")
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, OSError) and error.strerror and error.errno in _FULL:
        return f"stdout: {error.strerror}"  # all else that is written is told by its name
    if isinstance(error, RecursionError):
        return "what is given is nested too deeply"
    if isinstance(error, OverflowError):  # Python's dates end where those of tables do not
        return f"{error}; `txnkv scan --json` shows dates and times of any year"
    text = str(error)
    for call, command in _COMMANDS.items():
        text = text.replace(call, command)
    return " ".join(text.split()) or type(error).__name__


def _is_no_store(text: str) -> bool:
    return (text.startswith("no store at") and "FORMAT file; put" not in text) or (
        "was removed" in text
    )


def refused(errors: RowErrors) -> str:
    """Row errors without the library's advice, which is for programs."""
    shown = "; ".join(f"key {error.key!r}: {error.error}" for error in errors.errors[:3])
    more = f"; and {errors.count - 3:,} more" if errors.count > 3 else ""
    return f"{errors.count:,} row{'s' if errors.count != 1 else ''} refused: {shown}{more}"


# -- Arrow's errors about text ---------------------------------------------------------

# As text, since most commands need none of them: `re` keeps what it compiled.
_CONVERSION: Final = r"(?s)In CSV column #(?P<column>\d+): (?:Row #(?P<row>\d+): )?(?P<what>.*)"
_VALUE: Final = r"CSV conversion error to (?P<kind>.+?): invalid value '(?P<value>.*)'"
_PARSE: Final = r"(?s)CSV parse error: (?:Row #(?P<row>\d+): )?(?P<what>.*)"
_ROW: Final = r"(?s)(?:JSON parse error: )?(?P<what>.*?) in row (?P<row>\d+)$"
_TWICE: Final = r"^Column\(/(?P<column>.*)\) was specified twice$"
_CHANGED: Final = r"Column\(/(?P<column>.*?)\) changed from (?P<wanted>\w+) to (?P<got>\w+)"


def csv_words(message: str, names: Sequence[str]) -> str:
    """Arrow's error in a user's words: line and column by name."""
    conversion = re.match(_CONVERSION, message)
    found = conversion or re.match(_PARSE, message)
    if found is None:
        return message
    what = found["what"]
    if conversion is not None:
        number = int(conversion["column"])
        column = repr(names[number]) if number < len(names) else f"number {number + 1}"
        if value := re.match(_VALUE, what):
            what = f"{value['value']!r} is no {value['kind']} (--schema sets the types)"
        what = f"column {column}: {what}"
    return what if found["row"] is None else f"line {int(found['row']):,}: {what}"


def json_words(message: str, line: int) -> str:
    """Arrow's error in a user's words: the line, of which so many lie before what was read."""
    found = re.match(_ROW, message)
    if found is None:
        message = message.removeprefix("JSON parse error: ")
        return re.sub(r"decimal256\(76, (\d+)\)", r"decimal of scale \1", message)
    what = re.sub(_TWICE, r"it has column '\g<column>' twice", found["what"])
    if changed := re.match(_CHANGED, what):
        what = (
            f"column {changed['column']!r}: a {changed['got']} where a {changed['wanted']} was "
            "expected (--schema sets the types)"
        )
    return f"line {line + int(found['row']) + 1:,}: {what}"


def mixed_column(error: BaseException | None) -> str | None:
    """The column with the objects or lists of JSON that Arrow's error is about."""
    found = re.search(_CHANGED, str(error))
    if found is None:
        return None
    column, inside, _ = found["column"].partition("/")
    return column if inside or {found["wanted"], found["got"]} & {"object", "array"} else None
