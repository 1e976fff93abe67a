"""The audit: holds the store against what was acknowledged, at one snapshot after the other."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import Final

import pyarrow.compute as pc

import txnkv
from tools.soak.scene import ACCOUNTS, CHAINS, GENERATION, STAGES, START, STREAMED, Place, floor

STUCK: Final = 150
"""Audits after which a number that has not gone all the way is taken to be stuck: some 420 s, and
more on a machine so busy that audits, too, take longer."""


class LostError(Exception):
    """Something is not as what was acknowledged says."""


def auditor(
    client: txnkv.Client, place: Place, chance: random.Random, chain: str
) -> Callable[[], None]:
    """Audits, and takes away what has gone all the way."""
    oldest: dict[str, tuple[int, int]] = {}

    def step() -> None:
        written = {each: place.acknowledged(each) for each in CHAINS}
        with client.snapshot() as snapshot:
            problems = list(_problems(snapshot, client.tables(), written))
            lows = {each: _through(snapshot, client.tables(), each) for each in CHAINS}
        if problems:
            raise LostError("\n".join(problems))
        for each, (low, waiting) in lows.items():
            if waiting is not None:
                number, audits = oldest.get(each, (waiting, 0))
                oldest[each] = (waiting, audits + 1 if number == waiting else 1)
                if oldest[each][1] > STUCK:
                    raise LostError(
                        f"{each}: {waiting} is stuck: {_whereabouts(client, each, waiting)}"
                    )
            else:
                oldest.pop(each, None)
            _take(client, each, low)
        time.sleep(2.0)

    return step


def settled(client: txnkv.Client, place: Place) -> str | None:
    """The first thing that is under way still; None: all has gone all the way."""
    with client.snapshot() as snapshot:
        for chain in CHAINS:
            _, waiting = _through(snapshot, client.tables(), chain)
            if waiting is not None:
                return f"{chain}: {waiting}"
    return None


def problems(client: txnkv.Client, place: Place) -> list[str]:
    """Whatever is not as it should be, in words."""
    written = {chain: place.acknowledged(chain) for chain in CHAINS}
    with client.snapshot() as snapshot:
        return list(_problems(snapshot, client.tables(), written))


def _problems(
    snapshot: txnkv.Snapshot, tables: list[str], written: dict[str, list[tuple[int, int]]]
) -> Iterator[str]:
    for chain in CHAINS:
        low = floor(snapshot, chain)
        sent, billed, *later = (_numbers(snapshot, name) for name in _stages(tables, chain))
        for first, last in written[chain]:
            lost = set(range(max(first, low + 1), last + 1)) - sent
            if lost:
                yield f"{chain}: {_few(lost)} were acknowledged and are not there"
        if billed - sent:
            yield f"{chain}: {_few(billed - sent)} were billed and never sent"
        for name, numbers in zip(_stages(tables, chain)[2:], later, strict=True):
            if numbers - billed:
                yield f"{name}: {_few(numbers - billed)} were never billed"
    balances = snapshot.scan("accounts").to_arrow()["balance"].to_pylist()
    if len(balances) != ACCOUNTS or sum(balances) != ACCOUNTS * START:
        yield f"the sum of the accounts is {sum(balances)}, not {ACCOUNTS * START}"
    for name in {"loaded", "painted"} & set(tables):
        yield from _generations(snapshot, name)


def _generations(snapshot: txnkv.Snapshot, name: str) -> Iterator[str]:
    rows = snapshot.scan(name).to_arrow()
    if rows.num_rows not in (0, GENERATION) or len(pc.unique(rows["generation"])) > 1:
        yield f"{name}: {rows.num_rows} rows of generations {pc.unique(rows['generation'])}"


def _numbers(snapshot: txnkv.Snapshot, table: str) -> set[int]:
    return set(snapshot.scan(table).to_arrow()["number"].to_pylist())


def _through(snapshot: txnkv.Snapshot, tables: list[str], chain: str) -> tuple[int, int | None]:
    """Up to where all have gone all the way, and the first that has not."""
    sent, *later = (_numbers(snapshot, name) for name in _stages(tables, chain))
    under_way = {each for each in sent if not all(each in stage for stage in later)}
    done = sent - under_way
    if not under_way:
        return max(done, default=floor(snapshot, chain)), None
    first = min(under_way)
    return max((each for each in done if each < first), default=floor(snapshot, chain)), first


def _stages(tables: list[str], chain: str) -> list[str]:
    streamed = [STREAMED] if chain == CHAINS[0] and STREAMED in tables else []
    return [f"{stage}_{chain}" for stage in STAGES] + streamed


def _take(client: txnkv.Client, chain: str, low: int) -> None:
    """Take what has gone all the way, and say up to where."""
    names = _stages(client.tables(), chain)

    def take(txn: txnkv.Transaction) -> None:
        for name in names:
            numbers = txn.scan(name, where=[("number", "<=", low)]).to_arrow()
            txn.write(name, numbers, "delete")
        txn.upsert("floors", (chain, low))

    client.run(take, timeout=30.0)


def _whereabouts(client: txnkv.Client, chain: str, number: int) -> str:
    """Say which tables have a number, and which transactions are open."""
    names = _stages(client.tables(), chain)
    there = ", ".join(name for name in names if client.table(name).get(number) is not None)
    opened = "; ".join(map(str, client.transactions())) or "no transaction is open"
    return f"it is in {there}; {opened}"


def _few(numbers: set[int]) -> str:
    low = sorted(numbers)[:5]
    return f"{len(numbers)} numbers ({', '.join(map(str, low))} ...)"
