"""`txnkv demo`: the example of `examples/demo`, which a clone holds and the wheel does not."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Final

import click

from txnkv.cli.console import err, out, print_json

_CLONE: Final = Path(__file__).resolve().parents[2]
"""The directory that holds the package: that of a clone has the examples as well."""


class _NoExamples(click.ClickException):
    """The library alone is installed."""

    exit_code = click.UsageError.exit_code


@click.command()
@click.option("--input", metavar="PATH", help="A directory of text files, a CSV or a Parquet file.")
@click.option("--store", metavar="STORE", help="Make the store here, and leave it.")
@click.option("--keep", is_flag=True, help="Leave the store also when it is a temporary one.")
@click.option("--json", "as_json", is_flag=True, help="JSON, for programs.")
@click.option("--streaming", is_flag=True, help="A pipeline of programs that are killed.")
@click.option("--seconds", type=click.FloatRange(1), help="How long the pipeline runs: 60.")
@click.option("--kills", type=click.IntRange(0), help="How many of its programs are killed: 4.")
def demo(
    input: str | None,
    store: str | None,
    keep: bool,
    as_json: bool,
    streaming: bool,
    seconds: float | None,
    kills: int | None,
) -> None:
    """Show a Spark job that fills two tables in one transaction.

    Reads real text, by default the sources of Python's standard library; kills a worker on
    the way; rolls a second job back; and has another process look on, which sees none of the
    rows and then all. Needs pyspark and Java 17 or later.

    With --streaming, a pipeline: files that grow, a topic of their lines, a Spark query that
    counts words into a table and sends alerts to a second topic, and a program that mails these.
    All are killed at random and started again, and in the end everything is counted.

    Exit status 1 when anything was not as claimed.
    """
    _find_examples()
    if importlib.util.find_spec("pyspark") is None:
        raise click.ClickException("the demo needs pyspark: pip install 'txnkv[spark]'")
    if streaming:
        _stream(input, store, keep, as_json, seconds, kills)
        return
    if seconds is not None or kills is not None:
        raise click.UsageError("--seconds and --kills are for --streaming")
    from examples.demo.job import run
    from examples.demo.report import print_report

    console = err()
    with console.status("") as status:

        def progress(what: str) -> None:
            status.update(what)
            if not console.is_terminal:
                click.echo(what, err=True)

        report = run(input, store, keep, progress)
    report.program = _program()
    if as_json:
        print_json(report.document())
    else:
        print_report(report, out())
    if not report.holds:
        raise click.ClickException("not everything was as it should be")


def _find_examples() -> None:
    """Make `examples.demo` importable here and in the processes that the demo starts.

    Raises:
        _NoExamples: the package does not stand in a clone.
    """
    if not (_CLONE / "examples" / "demo" / "job.py").exists():
        raise _NoExamples(
            "the demo is an example, and only the library is installed here: "
            "run `make demo` in a clone of the repository"
        )
    # First of all: other packages may have left a folder `examples` in site-packages.
    sys.path.insert(0, str(_CLONE))
    paths = (str(_CLONE), os.environ.get("PYTHONPATH"))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))


def _stream(
    input: str | None,
    store: str | None,
    keep: bool,
    as_json: bool,
    seconds: float | None,
    kills: int | None,
) -> None:
    from examples.demo.pipeline import run

    try:
        outcome = run.run(
            input,
            store,
            keep,
            run.SECONDS if seconds is None else seconds,
            run.KILLS if kills is None else kills,
            None if as_json else out(),
        )
    except RuntimeError as error:
        raise click.ClickException(str(error)) from None
    if as_json:
        print_json(outcome.document())
    else:
        outcome.print(out())
    if not outcome.holds:
        raise click.ClickException("not everything was as it should be")


def _program() -> str:
    """Return how to call this command line, also for users without txnkv on the PATH."""
    if shutil.which("txnkv") is not None:
        return "txnkv"
    if os.path.basename(sys.argv[0]) == "txnkv":
        return shlex.quote(os.path.relpath(sys.argv[0]))
    return f"{shlex.quote(sys.executable)} -m txnkv"
