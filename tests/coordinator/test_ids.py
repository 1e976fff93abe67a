"""Transaction ids and timestamps: layout, order, uniqueness (Kudu's txn_id-test and ids)."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import txnkv
from tests import internals
from tests.threads import at_once
from txnkv.coordinator.ids import EPOCH, MAX_TIMESTAMP, RANGE, Timestamp, TxnId
from txnkv.tables import history

TIMES = st.datetimes(
    min_value=datetime(2020, 1, 1), max_value=datetime(2091, 1, 1), timezones=st.just(UTC)
)


@given(TIMES)
def test_timestamp_keeps_the_microsecond_of_its_datetime(when: datetime) -> None:
    stamp = Timestamp.from_datetime(when)
    assert stamp.datetime == when
    assert stamp.micros == (when - EPOCH) // timedelta(microseconds=1)


@given(TIMES, TIMES)
def test_timestamps_order_as_their_datetimes(a: datetime, b: datetime) -> None:
    first, second = Timestamp.from_datetime(a), Timestamp.from_datetime(b)
    assert (first < second) == (a < b)


@given(TIMES, st.integers(0, 4095))
def test_a_datetime_names_the_last_timestamp_of_its_microsecond(when: datetime, n: int) -> None:
    named = Timestamp.from_datetime(when)
    assert Timestamp.from_micros(named.micros, n) <= named < Timestamp.from_micros(named.micros + 1)


def test_timestamp_of_another_zone_is_the_same_instant() -> None:
    when = datetime(2026, 3, 4, 5, 6, tzinfo=UTC)
    shifted = when.astimezone(timezone(timedelta(hours=9)))
    assert Timestamp.from_datetime(shifted) == Timestamp.from_datetime(when)


@pytest.mark.parametrize(
    "when",
    [
        pytest.param(datetime(2026, 1, 1), id="naive"),
        pytest.param(datetime(2019, 12, 31, 23, 59, tzinfo=UTC), id="before the epoch"),
    ],
)
def test_timestamp_refuses(when: datetime) -> None:
    with pytest.raises(ValueError, match=r"time zone|before 2020"):
        Timestamp.from_datetime(when)


@pytest.mark.parametrize("value", [-1, MAX_TIMESTAMP + 1, 1 << 80])
def test_timestamp_has_63_bits(value: int) -> None:
    with pytest.raises(ValueError, match="63 bits"):
        Timestamp(value)


def test_timestamp_survives_text() -> None:
    stamp = Timestamp(123456789012345)
    assert Timestamp(str(stamp)) == stamp
    assert repr(stamp) == "Timestamp(123456789012345)"


@given(st.integers(0, (1 << 16) - 1), st.integers(0, (1 << 63) - 1))
def test_txn_id_is_a_coordinator_and_a_number(tcid: int, local: int) -> None:
    id = TxnId.of(tcid, local)
    assert (id.tcid, id.local) == (tcid, local)
    assert id < 1 << 128
    assert repr(id) == f"TxnId({tcid}:{local})"


def test_ids_carry_the_coordinator_of_their_store(client: txnkv.Client, tmp_path: Any) -> None:
    with txnkv.connect(tmp_path / "other") as other:
        ours, theirs = client.new_transaction().id, other.new_transaction().id
    assert ours.tcid == client.new_transaction().id.tcid
    assert ours.tcid != theirs.tcid
    with pytest.raises(txnkv.TxnNotFoundError):
        client.transaction_state(theirs)


def test_many_transactions_begin_in_order(client: txnkv.Client) -> None:
    """testStartManyTransactions, TestWriteToNewRangeOfTxnIds: more than one range of ids."""
    made = [client.new_transaction() for _ in range(RANGE + 50)]
    ids = [txn.id.local for txn in made]
    assert ids == sorted(set(ids))
    made[-1].insert(client.create_table("t", _schema()), {"id": 1})
    made[-1].commit()
    for txn in made[:-1]:
        txn.rollback()
    assert client.table("t").count() == 1


def test_ids_of_threads_are_unique(client: txnkv.Client) -> None:
    """BeginManyTransactions: unique in all, rising in each thread."""
    found = at_once(*[lambda: [client.new_transaction().id for _ in range(700)]] * 4)
    assert all(mine == sorted(mine) for mine in found)
    assert len({id for mine in found for id in mine}) == 4 * 700


def test_ids_of_processes_are_unique(
    client: txnkv.Client, process: Callable[..., Any], connect: Any
) -> None:
    code = """
        ids = [client.new_transaction().id for _ in range(1100)]
        client.close()
        client = txnkv.connect(_path)
        say([*ids, client.new_transaction().id])
    """
    others = [process(code) for _ in range(2)]
    lists = [[client.new_transaction().id for _ in range(1100)], *(o.finish() for o in others)]
    assert all(ids == sorted(ids) for ids in lists)
    assert len({id for ids in lists for id in ids}) == 1100 + 2 * 1101


def test_highest_id_covers_every_id_given(client: txnkv.Client) -> None:
    coordinator = internals.coordinator(client)
    before = coordinator.highest_id()
    id = client.new_transaction().id.local
    assert before < id <= coordinator.highest_id()


@pytest.mark.parametrize("offset", [0, 7, 1 << 100])
def test_an_unknown_id_is_told_with_the_highest(client: txnkv.Client, offset: int) -> None:
    """testCommitNonExistentTransaction: 'transaction ID .* not found, current highest'."""
    id = TxnId.of(internals.coordinator(client).tcid, 123456 + offset)
    highest = internals.coordinator(client).highest_id()
    for call in (client.transaction_state, client.abort_transaction, client.keep_transaction_alive):
        with pytest.raises(txnkv.TxnNotFoundError, match="not found") as caught:
            call(id)
        assert f"highest id given so far is {highest}" in str(caught.value)


def _schema() -> txnkv.Schema:
    return txnkv.Schema({"id": "int64"}, primary_key=["id"])


def test_a_begin_beside_the_close_of_the_store_is_refused(
    client: txnkv.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asked for ids for ever: those that it looked at were not those that it was given."""
    coordinator = internals.coordinator(client)
    while coordinator.ids.numbers.take() is not None:
        pass
    reserve = coordinator.ids.reserve

    def closing() -> None:
        coordinator.ids.close()
        reserve()

    monkeypatch.setattr(coordinator.ids, "reserve", closing)
    with pytest.raises(txnkv.ClosedError, match="is closed"):
        history.hold(coordinator)
