"""The native hot path; csrc/native says in its headers what each of these does."""

from collections.abc import Callable
from typing import Any

Column = tuple[
    str, int, int, bool, type | None, bool, object, Callable[[Any], Any] | None,
    Callable[[Any], Any] | None,
]  # fmt: skip

class Table:
    """Rows of one table between Python values and bytes (csrc/native/row_table.h)."""

    def __new__(
        cls, columns: tuple[Column, ...], key: tuple[int, ...], error: type[Exception], /
    ) -> Table: ...
    def key(self, given: Any, /) -> bytes | None: ...
    def row(self, given: Any, /) -> tuple[bytes, bytes] | None: ...
    def values(self, given: tuple[Any, ...], /) -> tuple[bytes, bytes]: ...
    def dict(self, key: bytes, row: bytes, /) -> dict[str, Any]: ...
