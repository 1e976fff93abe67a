"""Spark streams: sources and sinks beside those that do nothing, and a pipeline of both.

    python -m benchmarks.streaming [names] [--tiny] [--plots DIR] [--kafka HOST:PORT --jars JARS]

A rate is rows by the time that Spark says its triggers took, from asking the source for offsets
to the commit log of the checkpoint; the start of a query is not counted.

The source that does nothing (`nothing`) has the rows in memory: one batch of those that txnkv
gave, again and again. The sink that does nothing counts rows. They are what a data source
written in Python can reach at most.
"""
