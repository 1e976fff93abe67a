"""Arrays of encoded keys: their order, and how their rows are spread over partitions.

Keys are sorted, searched, compared with others, and merged from many sources a block at a time.
The numbers of `hash_partition` are frozen: a stored row stays in the tablet they name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from txnkv.core.native import allocate, check, ffi, lib, pointer, readable
from txnkv.core.rows import Bitmap, Rows, rows_pointer


class Keys:
    """n keys whose bytes, compared by memcmp, stand in the order of their values.

    Keys are either all `width` bytes wide, or of variable length with n + 1 offsets. They
    may borrow their memory: a slice from the keys that it was taken of, `from_block` from
    a plain block. The memory lives as long as any of them.

    Attributes:
        n: how many keys.
        width: bytes of each, 0 when they vary.
    """

    __slots__ = ("_base", "c", "n", "width")

    def __init__(self, c: Any, base: object) -> None:
        """Wraps a filled-in `keys_t *` whose memory `base` keeps alive."""
        self.c = c
        self.n: int = c.n
        self.width: int = c.width
        self._base = base

    # -- making --------------------------------------------------------------------

    @classmethod
    def fixed(cls, data: Any, width: int) -> Keys:
        """Keys of `width` bytes each, borrowed from any buffer object.

        Raises:
            ValueError: width is 0, or the buffer is not a whole number of keys.
        """
        memory = readable(data)
        if width <= 0 or len(memory) % width:
            raise ValueError(f"{len(memory)} bytes are no whole number of {width}-byte keys")
        n = len(memory) // width
        return cls(ffi.new("keys_t *", (memory, len(memory), ffi.NULL, width, n)), data)

    @classmethod
    def variable(cls, data: Any, offsets: Any) -> Keys:
        """Keys of variable length, borrowed from two buffer objects.

        Args:
            data: the bytes of all keys.
            offsets: n + 1 little-endian uint32: key i is data[offsets[i]:offsets[i + 1]].

        Raises:
            CoreError: an offset is below the one before it, or past the data.
            ValueError: there are no offsets, or no whole number of them.
        """
        memory, ends = readable(data), readable(offsets)
        if len(ends) < 4 or len(ends) % 4:
            raise ValueError(f"{len(ends)} bytes of offsets; n keys need 4 * (n + 1)")
        c = ffi.new("keys_t *", (memory, len(memory), ends, 0, len(ends) // 4 - 1))
        check(lib.keys_check(c), "taking keys")
        return cls(c, (data, offsets))

    @classmethod
    def of(cls, keys: Sequence[bytes]) -> Keys:
        """Variable-length keys of a few Python byte strings."""
        array = pa.array(keys, pa.binary())
        return cls.variable(array.buffers()[2] or b"", array.buffers()[1])

    @classmethod
    def one(cls, key: bytes) -> Keys:
        """One key, as a fixed-width array: to probe with. An empty key is variable."""
        return cls.fixed(key, len(key)) if key else cls.of([key])

    @classmethod
    def from_block(cls, block: Any) -> Keys:
        """The keys in a block that `verify_block` has accepted: borrowed from its buffer when it is
        plain, else copied.

        Raises:
            CoreError: it is no block of keys.
        """
        memory = readable(block)
        view = ffi.new("block_t *")
        check(lib.block_parse(memory, len(memory), view), "taking keys from a block")
        if view.encoding == lib.BLOCK_PLAIN:
            c = ffi.new("keys_t *")
            check(lib.block_keys(memory, len(memory), c), "taking keys from a block")
            return cls(c, block)
        size = ffi.new("uint64_t *")
        check(lib.unpack_keys_size(view, size), "taking keys from a block")
        data = allocate(size[0])
        offsets = None if view.width else allocate(4 * (view.rows + 1))
        to = (pointer(data), data.size, pointer(offsets, "uint32_t *"))
        check(lib.unpack_keys(view, *to), "taking keys from a block")
        return cls.adopt(data, offsets, view.width, view.rows)

    @staticmethod
    def concat(parts: Sequence[Keys]) -> Keys:
        """The keys of all parts, one behind the other, copied.

        Raises:
            CoreError: variable keys that together pass 4 GiB.
            ValueError: there are no parts, or their widths differ.
        """
        if not parts or len({part.width for part in parts}) > 1:
            widths = sorted({part.width for part in parts})
            raise ValueError(f"keys of one width can be joined, these have {widths}")
        sizes = [int(lib.keys_data_len(part.c)) for part in parts]
        n = sum(part.n for part in parts)
        variable = parts[0].width == 0
        if n > 0xFFFFFFFF or (variable and sum(sizes) > 0xFFFFFFFF):
            check(lib.STATUS_LIMIT, f"joining {n} keys of {sum(sizes)} bytes")
        data = allocate(sum(sizes))
        offsets = allocate(4 * (n + 1)) if variable else None
        to, ends = pointer(data), pointer(offsets, "uint32_t *")
        if variable:
            ends[0] = 0
        at = row = 0
        for part, size in zip(parts, sizes, strict=True):
            lib.keys_copy(part.c, at if variable else 0, to + at, ends + row if variable else ends)
            at += size
            row += part.n
        return Keys.adopt(data, offsets, parts[0].width, n)

    @classmethod
    def adopt(cls, data: pa.Buffer, offsets: pa.Buffer | None, width: int, n: int) -> Keys:
        """Keys in buffers that the core filled: not checked again."""
        c = ffi.new("keys_t *", (pointer(data), data.size, pointer(offsets), width, n))
        return cls(c, (data, offsets))

    # -- using ---------------------------------------------------------------------

    @property
    def data(self) -> pa.Buffer:
        """The bytes of the keys, not copied. Offsets of variable keys count from its start."""
        size = self.n * self.width if self.width else self.c.data_len
        return pa.foreign_buffer(int(ffi.cast("uintptr_t", self.c.data)), size, self)

    @property
    def offsets(self) -> pa.Buffer | None:
        """The n + 1 uint32 offsets of variable keys, not copied; None when fixed."""
        if self.c.offsets == ffi.NULL:
            return None
        address = int(ffi.cast("uintptr_t", self.c.offsets))
        return pa.foreign_buffer(address, 4 * (self.n + 1), self)

    @property
    def nbytes(self) -> int:
        """Bytes of all keys together, without offsets."""
        return int(lib.keys_data_len(self.c))

    def key(self, i: int) -> bytes:
        """Key i.

        Raises:
            IndexError: i is not in [0, n).
        """
        if not 0 <= i < self.n:
            raise IndexError(f"key {i} of {self.n}")
        c, width = self.c, self.width
        if width:
            return bytes(ffi.buffer(c.data + i * width, width))
        ends = bytes(ffi.buffer(c.offsets + 4 * i, 8))
        lo, hi = int.from_bytes(ends[:4], "little"), int.from_bytes(ends[4:], "little")
        return bytes(ffi.buffer(c.data + lo, hi - lo))

    def slice(self, lo: int, n: int) -> Keys:
        """Keys [lo, lo + n), not copied.

        Raises:
            IndexError: they are not all there.
        """
        if lo < 0 or n < 0 or lo + n > self.n:
            raise IndexError(f"keys [{lo}, {lo + n}) of {self.n}")
        c, width = self.c, self.width
        if c.offsets == ffi.NULL:
            fields = (c.data + lo * width, n * width, ffi.NULL, width, n)
        else:
            fields = (c.data, c.data_len, c.offsets + 4 * lo, 0, n)
        return Keys(ffi.new("keys_t *", fields), self._base)

    def gather(self, rows: Rows) -> Keys:
        """The keys of a row list, in its order, copied.

        Raises:
            CoreError: more than 4 GiB of variable keys.
            IndexError: a row is not in [0, n).
        """
        numbers = rows_pointer(rows)
        size = ffi.new("uint64_t *")
        check(lib.keys_gather_size(self.c, numbers, rows.n, size), "gathering keys")
        data = allocate(size[0])
        offsets = None if self.width or self.c.offsets == ffi.NULL else allocate(4 * (rows.n + 1))
        ends = pointer(offsets, "uint32_t *")
        status = lib.keys_gather(self.c, numbers, rows.n, pointer(data), data.size, ends)
        check(status, "gathering keys")
        return Keys.adopt(data, offsets, self.width, rows.n)

    def without(self, gone: Rows, lo: int = 0, n: int | None = None) -> Keys:
        """Keys [lo, lo + n) but for some, copied in the runs between these.

        Args:
            gone: the keys to leave out, strictly ascending, all in [lo, lo + n).
            lo: the first key.
            n: how many, with those that are left out; None for all from `lo` on.

        Raises:
            IndexError: the keys are not all there, or `gone` is not as it should be.
        """
        n = self.n - lo if n is None else n
        if lo < 0 or n < 0:
            raise IndexError(f"keys [{lo}, {lo + n}) of {self.n}")
        asked = (self.c, lo, n, rows_pointer(gone), gone.n)
        size = ffi.new("uint64_t *")
        if status := lib.keys_but_size(*asked, size):
            check(status, f"taking {n} of {self.n} keys but {gone.n}")
        data = allocate(size[0])
        offsets = None if self.c.offsets == ffi.NULL else allocate(4 * (n - gone.n + 1))
        ends = pointer(offsets, "uint32_t *")
        check(lib.keys_but(*asked, pointer(data), data.size, ends), "taking keys")
        return Keys.adopt(data, offsets, self.width, n - gone.n)

    def to_block(self, seed: int, lo: int = 0, n: int | None = None) -> pa.Buffer:
        """Keys [lo, lo + n) as a block.

        Args:
            seed: of the checksum, a uint32; `verify_block` wants the same.
            lo: the first key.
            n: how many; None for all from `lo` on.

        Raises:
            IndexError: they are not all there.
        """
        part = self.slice(lo, self.n - lo if n is None else n)
        block = pa.allocate_buffer(lib.block_size_of_keys(part.c), resizable=True)
        used = ffi.new("size_t *")
        status = lib.encode_keys(part.c, seed, pointer(block), block.size, used)
        check(status, "encoding keys")
        block.resize(used[0], shrink_to_fit=True)
        return block

    def __len__(self) -> int:
        return self.n

    def __repr__(self) -> str:
        return f"Keys({self.n}, width={self.width or 'variable'})"


# -- orders ----------------------------------------------------------------------------


def sort_keys(keys: Keys, rows: Rows | None = None) -> Rows | None:
    """The stable ascending order of keys.

    Args:
        keys: in any order, equal ones among them.
        rows: the keys to sort, in this order; None for all.

    Returns:
        Row numbers of `keys`; or None when they stand in strictly ascending order as they
        are, and there is nothing to do.

    Raises:
        IndexError: a row is not in `keys`.
        MemoryError: there is no room for 32 bytes a key.
    """
    n = keys.n if rows is None else rows.n
    order = allocate(4 * n)
    ascending = ffi.new("int *")
    status = lib.sort_order(keys.c, rows_pointer(rows), n, pointer(order, "uint32_t *"), ascending)
    check(status, f"sorting {n} keys")
    return None if ascending[0] else Rows(order, n)


def mark_duplicates(keys: Keys, order: Rows | None) -> Bitmap:
    """Marks the keys that equal the one before them.

    Args:
        keys: the keys.
        order: how they stand; None for as they are.

    Returns:
        A bit for each position in `order`; the first is never set.

    Raises:
        IndexError: a row of `order` is not in `keys`.
    """
    n = keys.n if order is None else order.n
    bits = allocate((n + 7) // 8)
    count = ffi.new("uint32_t *")
    status = lib.sort_mark_duplicates(keys.c, rows_pointer(order), n, pointer(bits), count)
    check(status, f"marking duplicates of {n} keys")
    return Bitmap(n, bits, count[0])


def lower_bound(keys: Keys, key: bytes) -> int:
    """Return the number of ascending keys that are below `key`."""
    return int(lib.search_lower_bound(keys.c, readable(key), len(key)))


def find(keys: Keys, probes: Keys) -> pa.Int32Array:
    """The position of each probe in strictly ascending keys, -1 when absent.

    Probes may come in any order; ascending ones go faster.

    Raises:
        ValueError: there are 2^31 keys or more.
    """
    if keys.n > 0x7FFFFFFF:
        raise ValueError(f"positions are int32, {keys.n} keys are too many; search slices")
    out = allocate(4 * probes.n)
    lib.search_batch(keys.c, probes.c, pointer(out, "int32_t *"))
    return pa.Array.from_buffers(_INT32, probes.n, [None, out])


_INT32 = pa.int32()


def mark_common(a: Keys, b: Keys) -> Bitmap:
    """Marks the keys of `a` that are in `b`; both strictly ascending.

    Returns:
        A bit for each key of `a`.
    """
    bits = allocate((a.n + 7) // 8)
    count = ffi.new("uint32_t *")
    lib.merge_common(a.c, b.c, pointer(bits), count)
    return Bitmap(a.n, bits, count[0])


class KeyOwners:
    """Keys, and who may have them. Not for two threads at a time.

    Attributes:
        n: keys of all owners together.
    """

    def __init__(self) -> None:
        made = lib.key_owners_create()
        if made == ffi.NULL:
            raise MemoryError("no memory for the keys of row sets")
        self._c = ffi.gc(made, lib.key_owners_destroy)
        self.n = 0

    def add(self, keys: Keys, owner: int, share: int = 0, shares: int = 1) -> None:
        """One more owner, by its number, has these keys; of all those of one share are kept."""
        check(lib.key_owners_add(self._c, keys.c, owner, share, shares), f"noting {keys.n} keys")
        self.n = int(lib.key_owners_count(self._c))

    def find(self, keys: Keys, owners: int) -> tuple[Rows, Rows] | None:
        """Those of so many owners who may have one of the keys, and the positions of those keys.
        None where most keys have many owners.
        """
        bits, found = (pa.py_buffer(bytes((n + 7) // 8)) for n in (owners, keys.n))
        if not lib.key_owners_find(self._c, keys.c, pointer(bits), pointer(found)):
            return None
        return Bitmap(owners, bits).positions(), Bitmap(keys.n, found).positions()

    def pairs(self, seen: Rows, writers: Rows, cap: int) -> list[tuple[int, int]]:
        """Pairs of owners, the earlier first, that may have a key in common while the later has not
        seen the earlier; each once. The search ends at `cap` of them, with some more than once.

        Args:
            seen: for each owner the number below which it has seen all others.
            writers: for each owner a number; those of the same know of each other.
        """
        out, n = ffi.new("uint32_t[]", 2 * cap), ffi.new("uint32_t *")
        told = rows_pointer(seen), rows_pointer(writers)
        check(lib.key_owners_pairs(self._c, *told, out, cap, n), f"comparing {self.n} keys")
        return list(dict.fromkeys((out[2 * i], out[2 * i + 1]) for i in range(n[0])))


class Merger:
    """Merges ascending sources; equal keys come in the order of their sources.

    `next` stops when a source has run out of keys, for only its owner knows whether another
    block of it follows: every source in `exhausted` is then either continued with `replace`
    or ended with `finish`, and the merge goes on.

        merger = Merger(sources)
        while not merger.done:
            for i in merger.exhausted:
                more = next_block(i)
                merger.replace(i, more) if more else merger.finish(i)
            source, index = merger.next(65536)

    Attributes:
        exhausted: sources without keys left that are not finished.
    """

    def __init__(self, sources: Sequence[Keys], ends: Sequence[bool] = ()) -> None:
        """Begins a merge.

        Args:
            sources: their first keys.
            ends: of each, nothing follows: it is finished by itself. For () that is not known.

        Raises:
            ValueError: there are more than 65536 sources.
        """
        if len(sources) > 65536:
            raise ValueError(f"{len(sources)} sources; merge 65536 at most, then their results")
        k = len(sources)
        self._keys = list(sources)
        self._c = ffi.new("keys_t[]", k)
        self._cursors = ffi.new("uint32_t[]", k)
        self._n = ffi.new("uint32_t *")
        self._ends = bytearray(ends or k)
        self.exhausted: list[int] = []
        for i, keys in enumerate(sources):
            self._c[i] = keys.c[0]
        self._look()

    @property
    def done(self) -> bool:
        """True when every source is finished."""
        return not self.exhausted and self._left == 0

    def next(self, cap: int) -> tuple[pa.UInt16Array, pa.UInt32Array]:
        """The next keys, `cap` at most.

        Returns:
            For each key its source, and its index in that source's present keys. Empty when
            all is done.

        Raises:
            ValueError: a source in `exhausted` was neither replaced nor finished.
            MemoryError: there is no memory; nothing was taken.
        """
        if self.exhausted:
            raise ValueError(f"sources {self.exhausted} ran out: replace or finish them first")
        cap = min(cap, self._left)
        source, index = allocate(2 * cap), allocate(4 * cap)
        to = pointer(source, "uint16_t *"), pointer(index, "uint32_t *")
        k, ends = len(self._keys), ffi.from_buffer(self._ends)
        status = lib.merge_kway(self._c, k, ends, self._cursors, cap, *to, self._n)
        check(status, f"merging {len(self._keys)} sources")
        n = self._n[0]
        self._look()
        return (
            pa.Array.from_buffers(pa.uint16(), n, [None, source]),
            pa.Array.from_buffers(pa.uint32(), n, [None, index]),
        )

    def replace(self, i: int, keys: Keys, end: bool = False) -> None:
        """Continues an exhausted source with its next keys; they are not below its last. Nothing
        follows after them at the end.

        Raises:
            ValueError: the source is not exhausted.
        """
        self._demand_exhausted(i)
        self._keys[i] = keys
        self._c[i] = keys.c[0]
        self._cursors[i], self._ends[i] = 0, end
        self._look()

    def finish(self, i: int) -> None:
        """Says that nothing follows of an exhausted source.

        Raises:
            ValueError: the source is not exhausted.
        """
        self._demand_exhausted(i)
        self._ends[i] = True
        self._look()

    def _demand_exhausted(self, i: int) -> None:
        if i not in self.exhausted:
            raise ValueError(f"source {i} still has keys, or is finished: {self.exhausted} ran out")

    def _look(self) -> None:
        left = [keys.n - cursor for keys, cursor in zip(self._keys, self._cursors, strict=True)]
        self._left = sum(left)
        self.exhausted = [i for i, n in enumerate(left) if n == 0 and not self._ends[i]]


# -- partitions ------------------------------------------------------------------------


def hash_partition(keys: Keys, buckets: int) -> pa.UInt16Array:
    """For each key a bucket in [0, buckets), by the hash of its bytes.

    Args:
        keys: the columns hashed by, encoded with a codec of their own.
        buckets: 1 to 65536.

    Raises:
        ValueError: buckets is outside of that.
    """
    _demand_parts(buckets)
    out = allocate(2 * keys.n)
    lib.partition_hash(keys.c, buckets, pointer(out, "uint16_t *"))
    return pa.Array.from_buffers(pa.uint16(), keys.n, [None, out])


def range_partition(keys: Keys, bounds: Keys) -> pa.UInt16Array:
    """For each key how many of the ascending bounds are at or below it.

    So with bounds [10, 20] keys below 10 are in 0, 10 to 19 in 1, the rest in 2.

    Raises:
        ValueError: there are more than 65535 bounds.
    """
    _demand_parts(bounds.n + 1)
    out = allocate(2 * keys.n)
    lib.partition_range(keys.c, bounds.c, pointer(out, "uint16_t *"))
    return pa.Array.from_buffers(pa.uint16(), keys.n, [None, out])


def scatter(numbers: pa.UInt16Array, nparts: int) -> list[Rows]:
    """The rows of each partition, ascending.

    Args:
        numbers: for each row its partition, without nulls.
        nparts: how many partitions, 1 to 65536.

    Raises:
        IndexError: a number is not below nparts.
        TypeError: the numbers are not uint16.
        ValueError: nparts is outside of that, or there are nulls.
    """
    _demand_parts(nparts)
    if numbers.type != pa.uint16():
        raise TypeError(f"partition numbers are uint16, not {numbers.type}; cast them")
    if numbers.null_count:
        raise ValueError(f"partition numbers have {numbers.null_count} nulls")
    n = len(numbers)
    rows, starts = allocate(4 * n), allocate(4 * (nparts + 1))
    ends = pointer(starts, "uint32_t *")
    source = pointer(numbers.buffers()[1] if n else None, "uint16_t *")
    source = source + numbers.offset if n else source
    status = lib.partition_scatter(source, n, nparts, pointer(rows, "uint32_t *"), ends)
    check(status, f"spreading {n} rows over {nparts} partitions")
    whole = Rows(rows, n)
    return [whole.slice(ends[p], ends[p + 1] - ends[p]) for p in range(nparts)]


def _demand_parts(parts: int) -> None:
    if not 1 <= parts <= 65536:
        raise ValueError(f"{parts} partitions; there can be 1 to 65536")
