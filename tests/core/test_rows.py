"""Row lists and bitmaps."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from txnkv.core import Bitmap, Rows

BITS = st.lists(st.booleans(), max_size=300)


@given(BITS, st.data())
def test_bitmaps_against_lists(bits, data):
    lo = data.draw(st.integers(0, len(bits)))
    bitmap = Bitmap.from_arrow(pa.array(bits, pa.bool_()).slice(lo))
    part = bits[lo:]
    assert bitmap.to_arrow().to_pylist() == part
    assert bitmap.count == sum(part)
    assert [bitmap.get(i) for i in range(bitmap.n)] == part
    assert bitmap.positions().to_arrow().to_pylist() == [i for i, b in enumerate(part) if b]
    assert bitmap.zeros().to_arrow().to_pylist() == [i for i, b in enumerate(part) if not b]
    again = Bitmap.of(bitmap.n, bitmap.positions().to_arrow())
    assert again.to_arrow().to_pylist() == part


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=200))
def test_combined_bitmaps(pairs):
    a, b = (
        Bitmap.from_arrow(pa.array([pair[side] for pair in pairs], pa.bool_())) for side in (0, 1)
    )
    for combined, expected in [
        (a.or_(b), [x or y for x, y in pairs]),
        (a.and_(b), [x and y for x, y in pairs]),
        (a.and_not(b), [x and not y for x, y in pairs]),
    ]:
        assert combined.to_arrow().to_pylist() == expected
        assert combined.count == sum(expected)


def test_rows():
    rows = Rows.from_arrow(pa.array([9, 1, 2, 3], pa.uint32()).slice(1))
    assert len(rows) == 3
    assert rows.slice(1, 2).to_arrow().to_pylist() == [2, 3]
    assert Rows.range(4).to_arrow().to_pylist() == [0, 1, 2, 3]
    assert Rows.of([]).to_arrow().to_pylist() == []


def test_mistakes_are_errors():
    with pytest.raises(IndexError):
        Rows.of([1]).slice(0, 2)
    with pytest.raises(TypeError):
        Rows.from_arrow(pa.array([1], pa.int64()))
    with pytest.raises(ValueError, match="nulls"):
        Rows.from_arrow(pa.array([None], pa.uint32()))
    with pytest.raises(IndexError):
        Bitmap.none(3).get(3)
    with pytest.raises(ValueError, match="bits"):
        Bitmap.none(3).or_(Bitmap.none(4))
    with pytest.raises(IndexError):
        Bitmap.of(3, pa.array([3], pa.uint32()))
    with pytest.raises(ValueError, match="bytes"):
        Bitmap(9, pa.py_buffer(b"a"))
