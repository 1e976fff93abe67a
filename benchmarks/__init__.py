"""Benchmarks: `python -m benchmarks`. Peers run in the same process or beside it, in turn."""
