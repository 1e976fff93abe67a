"""The bytes of a text file: gunzipped, counted, with their beginning known beforehand."""

from __future__ import annotations

import io
import os
import sys
from typing import IO, Any, Final

import pyarrow as pa

HEAD: Final = 8 << 20
BLOCK: Final = 1 << 20
_GZIP: Final = b"\x1f\x8b"


class TextFile(io.RawIOBase):
    """A readable stream over a file or stdin ("-"), with its head for inference.

    Attributes:
        head: the first bytes, up to HEAD; they are part of the stream as well.
        whole: the head is all there is.
        total: bytes of the file as it lies on disk; None for a pipe.
    """

    def __init__(self, path: str) -> None:
        super().__init__()
        self._raw: IO[bytes] = sys.stdin.buffer if path == "-" else open(path, "rb")  # noqa: SIM115
        self.total = _length(self._raw)
        self.consumed = 0
        self._pushed = b""
        self._inflate: Any = None
        self._begin()

    def _begin(self) -> None:
        magic = self._take(2)
        self._pushed = magic
        if magic == _GZIP:
            self._inflate = pa.CompressedInputStream(pa.PythonFile(_Raw(self), "r"), "gzip")
        head = bytearray()
        while len(head) < HEAD and (more := self._decoded(HEAD - len(head))):
            head += more
        self.head = bytes(head)
        self.whole = len(head) < HEAD
        self._at = 0

    def _take(self, n: int) -> bytes:
        """Bytes as they lie on disk."""
        if self._pushed:
            found, self._pushed = self._pushed, b""
            return found
        found = self._raw.read(n)
        self.consumed += len(found)
        return found

    def _decoded(self, n: int) -> bytes:
        return bytes(self._inflate.read(n)) if self._inflate is not None else self._take(n)

    def readable(self) -> bool:
        return True

    def read(self, n: int | None = -1) -> bytes:
        """Up to n bytes; empty at the end."""
        wanted = BLOCK if n is None or n < 0 else n
        if self._at < len(self.head):
            found = self.head[self._at : self._at + wanted]
            self._at += len(found)
            return found
        return self._decoded(wanted)

    def close(self) -> None:
        if not self.closed and self._raw is not sys.stdin.buffer:
            self._raw.close()
        super().close()


class _Raw(io.RawIOBase):
    """The file as it lies on disk, for the inflater."""

    def __init__(self, file: TextFile) -> None:
        super().__init__()
        self._file = file

    def readable(self) -> bool:
        return True

    def read(self, n: int | None = -1) -> bytes:
        return self._file._take(BLOCK if n is None or n < 0 else n)


def _length(raw: IO[bytes]) -> int | None:
    try:
        status = os.fstat(raw.fileno())
    except OSError:
        return None
    return status.st_size if os.path.isfile(raw.fileno()) else None
