"""The programs of docs/spark.md run as they stand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import txnkv
from txnkv.spark.option_table import OPTIONS, Kind

pytestmark = pytest.mark.spark

MANUAL = Path(__file__).resolve().parents[2] / "docs" / "spark.md"


def test_the_manual(
    spark: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # Spark's workers have the working directory of its JVM, so the store goes by its whole path.
    program = "\n".join(re.findall(r"```python\n(.*?)```", MANUAL.read_text(), re.DOTALL))
    names: dict[str, Any] = {}
    try:
        for name in ("shop", "checkpoint", "seen", "mirrored", "numbers-read", "copied"):
            program = program.replace(f'"{name}"', repr(str(tmp_path / name)))
        exec(program, names)
        wanted = ["1000", "1100", "10", "1100", "10", "5", "100", "0"]
        wanted += ["1100", "1099", "8.0", "50", "150", "150", "2", "0"]
        assert capsys.readouterr().out.split() == wanted
        assert names["client"].table("archive").count() == 100
    finally:
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")
        names["client"].close()
    with txnkv.connect(tmp_path / "shop") as client:
        assert client.check().ok


KINDS = {
    "Reads": (Kind.READ_TABLE, Kind.READ_TOPIC, Kind.STREAM_TOPIC, Kind.STREAM_CHANGES),
    "Writes": (Kind.WRITE_TABLE, Kind.WRITE_TOPIC, Kind.SINK_TABLE, Kind.SINK_TOPIC),
}


@pytest.mark.parametrize("part", KINDS)
def test_the_manual_has_every_option(part: str) -> None:
    text = MANUAL.read_text().split(f"**{part}.**")[1].split("\n## ")[0].split("\n**")[0]
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    wanted = [
        " | ".join(
            [
                f"| `{option.name}`",
                option.default,
                *("yes" if kind in option.kinds else "" for kind in KINDS[part]),
                f"{option.meaning} |",
            ]
        )
        for option in OPTIONS
        if any(kind in option.kinds for kind in KINDS[part])
    ]
    assert [row.replace(" ", "") for row in rows] == [row.replace(" ", "") for row in wanted]
