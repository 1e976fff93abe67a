"""Parts that are held, as who wants one is told of them."""

from __future__ import annotations

import pytest

from txnkv.coordinator import held
from txnkv.errors import CorruptionError, TxnkvError
from txnkv.storage import DatabaseDamagedError, DeniedError


@pytest.mark.parametrize("name", ["a", "tablet 1 cannot be opened: b", "it's", "'\"\\'", "\n\\"])
@pytest.mark.parametrize(
    "label", ["table {!r}, tablet 3", "topic {!r}, partition 0", "partition 7"]
)
@pytest.mark.parametrize("error", [DeniedError("user 1"), CorruptionError("x cannot be opened: y")])
def test_a_name_makes_no_part_denied(name: str, label: str, error: TxnkvError) -> None:
    """Its words were taken for those of the reason."""
    told = held.refusal(held.why(label.format(name), error), "Restore it")
    assert type(told) is type(error)


def test_damage_of_status_db_is_not_that_of_a_part() -> None:
    """Its tablet was to be restored from a backup, or dropped."""
    error = DatabaseDamagedError("status.db is damaged")
    with pytest.raises(DatabaseDamagedError, match=r"^status\.db is damaged$"):
        held.why("table 't', tablet 1", error)
