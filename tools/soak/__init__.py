"""Everything at once, for an hour: nothing may be lost, doubled or stuck, and nothing may grow.

    python -m tools.soak FOLDER --seconds 3600

Processes feed topics, bill what they receive, pass it on, move money, load in bulk, flush,
compact, drop, read, and run Spark, while they are killed and stopped, their clocks jump and the
disk fills up. What was acknowledged is written down outside of the store; the audit holds the store
against that, again and again, and takes what has gone all the way, so that the size stays.
"""
