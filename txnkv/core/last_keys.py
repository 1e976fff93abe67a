"""The last offset of each key of a topic, and which messages that leaves."""

from __future__ import annotations

import pyarrow as pa

from txnkv.core.log_messages import message_source
from txnkv.core.native import allocate, check, ffi, lib, pointer, readable

_TWO = ffi.typeof("uint64_t[2]")
_NONE: int = (1 << 64) - 1
_MESSAGES = ["value", "key", "timestamp"]


class LastKeys:
    """A table of the keys of messages, each with the last offset that was noted for it.

    Rows are given as `decode` gives them. One thread at a time.
    """

    def __init__(self) -> None:
        made = lib.last_keys_create()
        if made == ffi.NULL:
            raise MemoryError("a table of keys: no memory")
        self._c = ffi.gc(made, lib.last_keys_destroy)

    def __len__(self) -> int:
        return self._held()[0]

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return self._held()[1]

    def note(self, rows: pa.RecordBatch) -> None:
        """Note the offset of each message that has a key, in place of an earlier one."""
        if rows.num_rows:
            held, source = message_source(rows.select(_MESSAGES), 0)
            status = lib.last_keys_note(self._c, source, _offsets(rows))
            check(status, f"noting the keys of {rows.num_rows} messages")
            del held

    def last(self, key: bytes | None) -> int:
        """The last offset of a key; -1: it has none."""
        if key is None:
            return -1
        found: int = lib.last_keys_find(self._c, readable(key), len(key))
        return -1 if found == _NONE else found

    def choose(self, rows: pa.RecordBatch, oldest: int) -> pa.UInt32Array:
        """Return the places of the messages that stay: without a key, or the last of theirs.

        Args:
            rows: some messages.
            oldest: microseconds since 1970; a last one without a value that is older goes.
        """
        n = rows.num_rows
        out, found = allocate(4 * n), ffi.new("uint32_t *")
        if n:
            held, source = message_source(rows.select(_MESSAGES), 0)
            chosen = pointer(out, "uint32_t *")
            status = lib.last_keys_choose(self._c, source, _offsets(rows), oldest, chosen, found)
            check(status, f"looking for the keys of {n} messages")
            del held
        return pa.Array.from_buffers(pa.uint32(), found[0], [None, out])

    def _held(self) -> tuple[int, int]:
        found = ffi.new(_TWO)
        lib.last_keys_held(self._c, found, found + 1)
        return found[0], found[1]


def _offsets(rows: pa.RecordBatch) -> object:
    column = rows.column("offset")
    return ffi.cast("uint64_t *", column.buffers()[1].address + 8 * column.offset)
