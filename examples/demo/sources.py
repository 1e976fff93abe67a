"""The input as documents: a path and a text each.

directory         each text file is a document; its path is relative to the directory
CSV, Parquet      each row is one: the text is that of its values, the path name#row
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

LARGEST: Final = 64 << 20
_HEAD: Final = 4096
_SKIPPED: Final = ("__pycache__", "site-packages", "dist-packages", "node_modules")


@dataclass(frozen=True)
class Input:
    """The input of the demo.

    Attributes:
        kind: "text", "csv" or "parquet".
        root: the directory or file.
        files: of a directory of text, relative to it.
    """

    kind: str
    root: Path
    files: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.kind == "text":
            return f"{len(self.files):,} text files below {self.root}"
        return f"the rows of {self.root}"


def find_input(path: str | None) -> Input:
    """Find the input at a path; by default the sources of Python's standard library.

    Raises:
        ValueError: there is nothing at the path that the demo can read.
    """
    root = Path(path if path is not None else sysconfig.get_path("stdlib")).resolve()
    name = root.name.lower().removesuffix(".gz")
    if root.is_dir():
        if any(root.glob("*.parquet")):
            return Input("parquet", root)
        files = tuple(_text_files(root, ".py" if path is None else ""))
        if not files:
            raise ValueError(f"{root}: there are no text files in this directory")
        return Input("text", root, files)
    if not root.exists():
        raise ValueError(f"{root}: there is no such file or directory")
    if name.endswith(".csv"):
        return Input("csv", root)
    if name.endswith((".parquet", ".pq")):
        return Input("parquet", root)
    raise ValueError(f"{root}: the demo reads a directory of text files, a CSV or a Parquet file")


def _text_files(root: Path, suffix: str) -> Iterator[str]:
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(n for n in folders if n not in _SKIPPED and not n.startswith("."))
        for name in sorted(names):
            path = Path(folder, name)
            if name.endswith(suffix) and not name.startswith(".") and _is_text(path):
                yield path.relative_to(root).as_posix()


def _is_text(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return (
                path.is_file() and path.stat().st_size <= LARGEST and b"\0" not in file.read(_HEAD)
            )
    except OSError:
        return False


def documents(spark: Any, given: Input, parts: int) -> Any:
    """The input as a DataFrame of path, bytes and text, in `parts` partitions."""
    if given.kind == "text":
        return _documents_of_files(spark, given, parts)
    from pyspark.sql import functions as f

    if given.kind == "csv":
        rows = spark.read.option("header", True).option("multiLine", True).csv(str(given.root))
    else:
        rows = spark.read.parquet(str(given.root))
    values = [f.col(f"`{name}`").cast("string") for name in rows.columns]
    text = f.concat_ws(" ", *values)
    return (
        rows.select(text.alias("text"), f.monotonically_increasing_id().alias("row"))
        .select(
            f.concat(f.lit(f"{given.root.name}#"), f.col("row").cast("string")).alias("path"),
            f.octet_length("text").cast("long").alias("bytes"),
            "text",
        )
        .repartition(parts)
    )


def _documents_of_files(spark: Any, given: Input, parts: int) -> Any:
    # Dealt out like cards, so that a folder of large files does not end up in one part.
    root = str(given.root)
    dealt = [name for part in range(parts) for name in given.files[part::parts]]
    # Not by mapInArrow, for which pyspark wants pandas.
    rows = spark.sparkContext.parallelize(dealt, parts).map(_Reading(root))
    return spark.createDataFrame(rows, "path string, bytes long, text string", verifySchema=False)


@dataclass(frozen=True)
class _Reading:
    """Reads files, in Spark's workers."""

    root: str

    def __call__(self, name: str) -> tuple[str, int, str]:
        raw = Path(self.root, name).read_bytes()
        return name, len(raw), raw.decode(errors="replace")
