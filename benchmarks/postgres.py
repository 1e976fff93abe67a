"""PostgreSQL as a contestant, where it is: `--postgres DIR`, on the path, or Debian's package.

A server of its own for each race, over TCP on the loopback address, durable at COMMIT, and psycopg.
"""

from __future__ import annotations

import importlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from . import rows

POSTGRES: Final = "postgresql"
_BATCH_ROWS: Final = 1 << 16
_PATIENCE: Final = 60.0

_COPIED: Final = np.dtype(
    [("columns", ">i2")]
    + [
        part
        for name, kind in (("id", ">i8"), ("x", ">f8"), ("n", ">i8"))
        for part in ((f"{name} size", ">i4"), (name, kind))
    ]
)
"""A row of `data` as COPY has it in binary."""


class Postgres:
    """A PostgreSQL server with a database of its own, durable at COMMIT, over TCP.

    Args:
        stack: stops it.
        base: where its data is.
        programs: the folder of initdb and postgres.
        driver: psycopg.
    """

    def __init__(self, stack: ExitStack, base: Path | None, programs: Path, driver: Any) -> None:
        self._driver = driver
        folder = Path(tempfile.mkdtemp(prefix="txnkv-bench-postgres-", dir=base))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        who: dict[str, Any] = {}
        if os.getuid() == 0:  # which it refuses to run as
            who = {"user": "nobody", "group": "nogroup", "extra_groups": []}
            shutil.chown(folder, "nobody", "nogroup")
        db, port = folder / "db", _free_port()
        subprocess.run(
            [programs / "initdb", "-D", db, "-U", "bench", "-A", "trust", "-E", "UTF8"],
            check=True, capture_output=True, cwd=folder, **who,
        )  # fmt: skip
        options = f"port={port} listen_addresses=127.0.0.1 max_connections=300"
        more = f"unix_socket_directories={folder} max_wal_size=4GB jit=off"
        command = [str(programs / "postgres"), "-D", str(db)]
        for option in f"{options} {more}".split():
            command += ["-c", option]
        popen = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=folder, **who
        )
        stack.callback(popen.wait)
        stack.callback(popen.terminate)
        self._at = f"host=127.0.0.1 port={port} user=bench dbname=postgres"
        self._own = stack.enter_context(self._connected())
        self._own.execute(
            "CREATE TABLE r (id bigint PRIMARY KEY, region text, total double precision, "
            "n bigint, note text)"
        )

    @classmethod
    def found(cls, stack: ExitStack, base: Path | None, programs: Path | None) -> Postgres | None:
        """Start one, or say in a line why there is none."""
        places = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
        known = shutil.which("postgres")
        folder = programs or (Path(known).parent if known else places[-1] if places else None)
        try:
            if folder is None:
                raise FileNotFoundError("its server's programs are not there")
            return cls(stack, base, folder, importlib.import_module("psycopg"))
        except (OSError, ImportError, subprocess.CalledProcessError) as error:
            print(f"without {POSTGRES}: {error}")
            return None

    def _connected(self) -> Any:
        give_up = time.monotonic() + _PATIENCE
        while True:
            try:
                return self._driver.connect(self._at, autocommit=True)
            except self._driver.OperationalError as error:
                if time.monotonic() > give_up:
                    raise OSError(f"it does not start: {error}") from error
                time.sleep(0.1)

    def empty(self, name: str) -> None:
        """Make a table for the rows of `data` anew."""
        self._own.execute(f"DROP TABLE IF EXISTS {name}")
        self._own.execute(
            f"CREATE TABLE {name} (id bigint PRIMARY KEY, x double precision, n bigint)"
        )

    def copy_in(self, name: str, table: pa.Table) -> int:
        """Bring rows of `data` into an empty table."""
        made = np.zeros(len(table), dtype=_COPIED)
        made["columns"] = 3
        for column in ("id", "x", "n"):
            made[f"{column} size"] = 8
            made[column] = table[column].to_numpy()
        statement = f"COPY {name} FROM STDIN (FORMAT BINARY)"
        with self._own.cursor() as cursor, cursor.copy(statement) as copy:
            copy.write(b"PGCOPY\n\xff\r\n\0" + bytes(8))
            for first in range(0, len(made), _BATCH_ROWS):
                copy.write(made[first : first + _BATCH_ROWS].tobytes())
            copy.write(b"\xff\xff")
        return len(table)

    def copy_out(self, name: str, count: int) -> int:
        """Read a table of `data`, as bytes."""
        statement = f"COPY {name} TO STDOUT (FORMAT BINARY)"
        with self._own.cursor() as cursor, cursor.copy(statement) as copy:
            size = sum(len(part) for part in copy)
        assert size == 19 + 2 + count * _COPIED.itemsize, f"{size} bytes came"
        return count

    def load(self, known: int) -> None:
        """Bring in rows of `rows`."""
        with self._own.cursor() as cursor, cursor.copy("COPY r FROM STDIN") as copy:
            for some in rows.chunks(np.arange(known)):
                for row in some:
                    copy.write_row(row)

    def count(self, name: str) -> int:
        """Return the number of rows of a table."""
        return int(self._own.execute(f"SELECT count(*) FROM {name}").fetchone()[0])

    @contextmanager
    def upserts(self) -> Iterator[Callable[[rows.Row], None]]:
        """One row a transaction, over a connection of its own."""
        statement = (
            "INSERT INTO r VALUES (%s, %s, %s, %s, %s) ON CONFLICT (id) DO UPDATE SET region = "
            "excluded.region, total = excluded.total, n = excluded.n, note = excluded.note"
        )
        with self._connected() as connection:
            yield lambda row: connection.execute(statement, row, prepare=True)

    @contextmanager
    def gets(self, known: int) -> Iterator[Callable[[rows.Row], None]]:
        """One row by its key."""
        with self._connected() as connection:

            def one(row: rows.Row) -> None:
                statement = "SELECT * FROM r WHERE id = %s"
                found = connection.execute(statement, (row[0] % known,), prepare=True).fetchone()
                assert found[0] == row[0] % known

            yield one


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])
