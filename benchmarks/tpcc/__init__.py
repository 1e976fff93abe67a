"""TPC-C's new-order and payment, the two transactions that make up most of its mix.

`schema` has the tables, `load` fills them, `transactions` is what is done, once for all stores,
`stores` does it in txnkv and SQLite, `checks` looks at what is left, `race` runs it all.
"""
