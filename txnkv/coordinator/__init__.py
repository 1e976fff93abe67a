"""Transactions: their states, the status table, and how they are driven to their end.

    ids, states, clock        names and time
    status_table, locks, jobs rows of status.db and the moves on them
    participant               what is asked of those who hold the data
    orchestration             the protocol, over all of these
    lease, id_ranges, liveness, maintenance   who does the work that nobody waits for
    coordinator               all of it, for the layers above

It knows no tables: they register as participants.
"""
