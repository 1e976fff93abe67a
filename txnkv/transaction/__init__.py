"""Transactions and sessions of a process, from the first change to the commit.

connection                              a client's hold on a store, for its handles
transaction, session                    what a user holds
context, small_parts, local_state       what is not committed yet, and how a transaction stands
session_rows, send_buffer               what waits to be flushed
one_phase_commit, two_phase_commit      small ones, in a row of the commit log; large ones
autocommit, job, token                  writes outside of a transaction; attempts; other processes
"""
