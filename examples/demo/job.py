"""The job: what a user would write, and what it takes to prove what it does."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import txnkv
import txnkv.spark
from examples.demo.report import Claim, Event, Report
from examples.demo.session import LOG, PARTS, WORKERS, local_spark
from examples.demo.sources import Input, documents, find_input
from examples.demo.watcher import Watcher
from examples.demo.workers import NAME, NotedSource, read_notes

FILES: Final = txnkv.Schema({"path": "string", "bytes": "int64", "lines": "int64"}, ["path"])
WORDS: Final = txnkv.Schema(
    {"path": "string", "word": "string", "count": "int64"}, ["path", "word"]
)
_LONGEST_WORD: Final = 64
_KILLED: Final = 1
Progress = Callable[[str], object]


def run(input: str | None, store: str | None, keep: bool, progress: Progress) -> Report:
    """Run the demo.

    Args:
        input: a directory, CSV or Parquet; None for the standard library's sources.
        store: where to make the store; None for a temporary directory.
        keep: leave a temporary store.
        progress: told what is going on.

    Raises:
        ValueError: the input cannot be read, or the store has such tables already.
        NotSupportedError: there is no Java 17 or later.
    """
    txnkv.spark.require_java()
    given = find_input(input)
    scratch = Path(tempfile.mkdtemp(prefix="txnkv-demo-spark-"))
    path = Path(store) if store is not None else Path(tempfile.mkdtemp(prefix="txnkv-demo-"))
    leave = keep or store is not None
    whole = False
    try:
        report = _Demo(given, str(path), leave, scratch, progress).run()
        whole = report.holds
    finally:
        if whole:
            shutil.rmtree(scratch, ignore_errors=True)
        elif (scratch / LOG).exists():
            progress(f"Spark's log is {scratch / LOG}")
        else:
            shutil.rmtree(scratch, ignore_errors=True)
        if not leave:
            shutil.rmtree(path, ignore_errors=True)
    return report


class _Demo:
    def __init__(
        self, given: Input, path: str, kept: bool, scratch: Path, progress: Progress
    ) -> None:
        self._given = given
        self._path = path
        self._scratch = scratch
        self._progress = progress
        self._notes = scratch / "notes"
        self._notes.mkdir()
        self._begin = time.monotonic()
        self._report = Report(str(given), path, kept)

    def run(self) -> Report:
        report = self._report
        with txnkv.connect(self._path) as client:
            self._make_tables(client)
            with self._watched() as watcher, self._spark() as spark:
                files, words = self._frames(spark)
                expected = self._write(client, files, words)
                seen_within = self._roll_back(client, files, words)
                looks = watcher.finish()
            report.looks = [
                replace(look, first=look.first - self._begin, last=look.last - self._begin)
                for look in looks
            ]
            self._progress("checking the store")
            self._prove(client, expected, seen_within)
        report.total_seconds = time.monotonic() - self._begin
        return report

    # -- the job -----------------------------------------------------------------------

    def _make_tables(self, client: txnkv.Client) -> None:
        taken = {"files", "words"} & set(client.tables())
        if taken:
            raise ValueError(
                f"{self._path} has a table {' and '.join(sorted(taken))} already: "
                "give another --store"
            )
        client.create_table("files", FILES, partition_by=txnkv.hash_partition("path", 2))
        client.create_table("words", WORDS, partition_by=txnkv.hash_partition("path", 4))

    def _frames(self, spark: Any) -> tuple[Any, Any]:
        from pyspark.sql import functions as f

        found = documents(spark, self._given, PARTS)
        ends = f.length("text") - f.length(f.translate("text", "\n", ""))
        rest = f.when((f.col("text") == "") | f.endswith("text", f.lit("\n")), 0).otherwise(1)
        files = found.select("path", "bytes", (ends + rest).cast("long").alias("lines"))
        word = f.explode(f.split(f.lower("text"), r"[^\p{L}\p{N}_]+")).alias("word")
        words = (
            found.select("path", word)
            .where((f.col("word") != "") & (f.length("word") <= _LONGEST_WORD))
            .groupBy("path", "word")
            .count()
        )
        return files.persist(), words.persist()

    def _write(self, client: txnkv.Client, files: Any, words: Any) -> dict[str, tuple[int, int]]:
        report = self._report
        txn = client.new_transaction(timeout=None)
        self._happened(f"transaction {txn.id.local} begins")
        self._progress(f"Spark reads {self._given}")
        expected = {"files": _sums(files, "lines"), "words": _sums(words, "count")}
        report.rows = {name: rows for name, (rows, _) in expected.items()}
        self._happened("Spark has read the input and counted the words")

        self._progress("Spark writes words; a worker is killed on the way")
        begin = time.monotonic()
        words.write.format(NAME).options(**txnkv.spark.options(txn, table="words")).option(
            "notes", str(self._notes)
        ).option("kill", str(_KILLED)).mode("append").save()
        report.write_seconds["words"] = time.monotonic() - begin
        self._happened("words are written; a worker was killed, its task ran again")

        self._progress("Spark writes files")
        begin = time.monotonic()
        files.write.format("txnkv").options(**txnkv.spark.options(txn, table="files")).mode(
            "append"
        ).save()
        report.write_seconds["files"] = time.monotonic() - begin
        self._happened("files are written, under the same token")

        begin = time.monotonic()
        self._happened("the driver calls commit()")
        txn.commit()
        report.commit_seconds = time.monotonic() - begin
        self._happened("commit() has returned")
        return expected

    def _roll_back(self, client: txnkv.Client, files: Any, words: Any) -> tuple[int, int]:
        """The same rows under other names; what the transaction itself saw of them."""
        from pyspark.sql import functions as f

        txn = client.new_transaction(timeout=None)
        self._progress("a second job writes, and is rolled back")
        for name, frame in (("files", files), ("words", words)):
            renamed = frame.withColumn("path", f.concat(f.lit("again/"), "path"))
            renamed.write.format("txnkv").options(**txnkv.spark.options(txn, table=name)).mode(
                "append"
            ).save()
        seen = tuple(
            sum(batch.num_rows for batch in txn.scan(name, columns=["path"]).to_batches())
            for name in ("files", "words")
        )
        self._happened("a second job has written as much again")
        txn.rollback()
        self._happened("the second job is rolled back")
        return seen[0], seen[1]

    # -- the proof ---------------------------------------------------------------------

    def _prove(
        self,
        client: txnkv.Client,
        expected: dict[str, tuple[int, int]],
        seen_within: tuple[int, int],
    ) -> None:
        prove = self._report.claims.append
        prove(self._none_then_all())
        prove(_each_row_once(client, expected))
        prove(_retried(read_notes(self._notes)))
        prove(_nothing_left(client, expected, seen_within))
        found = client.check()
        numbers = f"{found.rows:,} rows, {found.blocks:,} blocks"
        prove(Claim("the store is whole", found.ok, numbers if found.ok else found.problems[0]))

    def _none_then_all(self) -> Claim:
        looks, rows = self._report.looks, self._report.rows
        wanted = [(0, 0), (rows["files"], rows["words"])]
        holds = [look.counts for look in looks] == wanted
        if holds:
            numbers = (
                f"of {sum(look.looks for look in looks):,} looks by another process, "
                f"{looks[0].looks:,} saw none and then {looks[1].looks:,} all"
            )
        else:
            numbers = "it saw " + ", then ".join(str(look.counts) for look in looks)
        return Claim("both tables appeared at one instant", holds, numbers)

    # -- watching ----------------------------------------------------------------------

    def _happened(self, what: str) -> None:
        self._report.events.append(Event(time.monotonic() - self._begin, what))

    @contextmanager
    def _watched(self) -> Iterator[Watcher]:
        watcher = Watcher(self._path, ["files", "words"])
        self._happened("two tables are made, a reader looks on")
        try:
            yield watcher
        finally:
            watcher.kill()

    @contextmanager
    def _spark(self) -> Iterator[Any]:
        self._progress("starting Spark")
        with local_spark(self._scratch) as spark:
            txnkv.spark.register(spark)
            spark.dataSource.register(NotedSource)
            self._happened("Spark is up, with two workers")
            yield spark


def _sums(frame: Any, column: str) -> tuple[int, int]:
    """Rows and the sum of a column, as Spark counts them."""
    from pyspark.sql import functions as f

    row = frame.agg(f.count("*").alias("rows"), f.sum(column).alias("sum")).first()
    return row["rows"], row["sum"] or 0


def _stored(client: txnkv.Client) -> dict[str, tuple[int, int]]:
    found = {}
    for name, column in (("files", "lines"), ("words", "count")):
        rows = total = 0
        for batch in client.table(name).scan(columns=[column]).to_batches():
            rows += batch.num_rows
            total += batch.column(0).sum().as_py() or 0
        found[name] = (rows, total)
    return found


def _each_row_once(client: txnkv.Client, expected: dict[str, tuple[int, int]]) -> Claim:
    found = _stored(client)
    numbers = f"{found['files'][0]:,} files with {found['files'][1]:,} lines, "
    numbers += f"{found['words'][0]:,} rows of words for {found['words'][1]:,} words"
    if found != expected:
        numbers += f"; Spark counted {expected}"
    return Claim("the tables hold what Spark counted, each row once", found == expected, numbers)


def _retried(notes: list[dict[str, Any]]) -> Claim:
    killed = [note for note in notes if note["killed"]]
    again = [note for note in notes if note["partition"] == _KILLED and not note["killed"]]
    workers = {note["pid"] for note in notes}
    holds = len(killed) == 1 and len(again) == 1 and len(workers) >= WORKERS
    what = "a worker was killed (kill -9) with its rows staged, and its task was tried again"
    if not holds:
        return Claim(what, False, f"the attempts were {notes}")
    numbers = (
        f"attempt {killed[0]['attempt']} of task {_KILLED} left {killed[0]['rows']:,} rows that "
        f"do not count, attempt {again[0]['attempt']} wrote {again[0]['rows']:,}"
    )
    return Claim(what, holds, numbers)


def _nothing_left(
    client: txnkv.Client, expected: dict[str, tuple[int, int]], seen_within: tuple[int, int]
) -> Claim:
    wrote = tuple(2 * expected[name][0] for name in ("files", "words"))
    staged = client.stats()["staged_row_sets"]
    holds = seen_within == wrote and _stored(client) == expected and staged == 0
    numbers = (
        f"inside it there were {seen_within[0]:,} files and {seen_within[1]:,} rows of words, "
        f"after it there are {expected['files'][0]:,} and {expected['words'][0]:,}"
    )
    if not holds:
        numbers += (
            f"; wanted {wrote} inside, found {_stored(client)} after, {staged} row sets staged"
        )
    return Claim("the job that was rolled back left nothing", holds, numbers)
