"""How a command ends: errors become one line on stderr."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click
import pyarrow as pa

from txnkv.errors import RowErrors, StoreNotFoundError, TxnkvError


class Group(click.Group):
    """A click group that lists commands in the order they were added, and tells errors."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        with told():
            return super().invoke(ctx)


@contextmanager
def told(prefix: str = "") -> Iterator[None]:
    """Turn what a user can mend into a ClickException of one line.

    Args:
        prefix: what was being done, before the error's own words.
    """
    try:
        yield
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise  # The reader of a pipe went away; click ends quietly.
        raise click.ClickException(prefix + words(error)) from error
    except (TxnkvError, ValueError, pa.ArrowException) as error:
        raise click.ClickException(prefix + words(error)) from error


def words(error: BaseException) -> str:
    """An error in one line."""
    if isinstance(error, RowErrors):
        return refused(error)
    if isinstance(error, StoreNotFoundError):
        return f"{str(error).split('. ')[0]}; `txnkv init` makes one"
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__


def refused(errors: RowErrors) -> str:
    """Row errors without the library's advice, which is for programs."""
    shown = "; ".join(f"key {error.key!r}: {error.error}" for error in errors.errors[:3])
    more = f"; and {errors.count - 3:,} more" if errors.count > 3 else ""
    return f"{errors.count:,} row{'s' if errors.count != 1 else ''} refused: {shown}{more}"
