"""The programs of docs/spark.md and README.md run as they stand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import txnkv
from txnkv.spark.option_table import OPTIONS, Kind

pytestmark = pytest.mark.spark

ROOT = Path(__file__).resolve().parents[2]
MANUAL = ROOT / "docs" / "spark.md"


def programs(path: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)


def test_the_manual(
    spark: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # Spark's workers have the working directory of its JVM, so the store goes by its whole path.
    program = "\n".join(programs(MANUAL))
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


def test_the_readme(spark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It runs, and runs again; tests/cli/test_docs.py starts a Spark for it each time."""
    plain, with_spark = programs(ROOT / "README.md")
    assert with_spark.endswith("spark.stop()\n")
    with_spark = with_spark.removesuffix("spark.stop()\n")
    for program in (plain, with_spark, with_spark):
        exec(program.replace('"shop"', repr(str(tmp_path / "shop"))), {})
    assert capsys.readouterr().out.splitlines()[-2:] == ["3 2", "3 2"]


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
