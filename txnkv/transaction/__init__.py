"""Transactions and sessions of a process, from the first change to the commit."""
