"""Claims that must hold when the pipeline has come to the end of the text."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Final

import txnkv
from examples.demo.pipeline import layout
from examples.demo.report import Claim

_WORD: Final = re.compile(r"[a-z_]+")


def claims(client: txnkv.Client, directory: Path) -> list[Claim]:
    """The claims, and whether they hold."""
    lines: list[bytes] = []
    for path in directory.iterdir():
        lines += path.read_bytes().removesuffix(b"\n").split(b"\n")
    sent = Counter(message.value for message in _all(client, layout.LINES))
    words = Counter(
        word for line in lines for word in _WORD.findall(line.decode(errors="replace").lower())
    )
    counted = {row["word"]: row["total"] for row in client.table(layout.COUNTS).scan()}
    passed = Counter(
        (word, threshold)
        for word, total in words.items()
        for threshold in layout.THRESHOLDS
        if threshold <= total
    )
    alerts = Counter(
        (str(m.key or b"", "utf-8"), int(m.value)) for m in _all(client, layout.ALERTS)
    )
    mails = Counter((row["word"], row["total"]) for row in client.table(layout.MAILS).scan())
    report = client.check()
    return [
        Claim("each line is in the topic, once", sent == Counter(lines), f"{len(lines):,} lines"),
        Claim(
            "the totals are those of a plain count",
            counted == dict(words),
            f"{len(words):,} words, {words.total():,} in all",
        ),
        Claim("each alert was sent, once", alerts == passed, f"{len(passed):,} alerts"),
        Claim("each mail is noted, once", mails == passed, f"{mails.total():,} mails"),
        Claim("the store is whole", report.ok, "; ".join(report.problems) or "all was checked"),
    ]


def _all(client: txnkv.Client, topic: str) -> list[txnkv.Message]:
    found = []
    with client.topic(topic).consumer() as consumer:
        while messages := consumer.poll(max_messages=10_000, timeout=0.5):
            found += messages
    return found
