"""Files to load, as streams of Arrow batches.

    text.py      bytes of CSV and JSON lines, gunzipped, with a head to infer types from
    csv.py  jsonl.py  columnar.py        one format each, behind the interface of base.py

A source of text needs types: those of the table that it goes to, or else those that are
inferred from its first megabytes. Whatever comes later in another type is an error that
names the line, never a silent change of type.
"""

from txnkv.cli.sources.base import FORMATS, Options, Source, named
from txnkv.cli.sources.opening import format_of, open_source

__all__ = ["FORMATS", "Options", "Source", "format_of", "named", "open_source"]
