"""Power loss: records what a run does to its files, and makes the states a crash may leave.

`record.c` is preloaded into the processes of a run and writes down each call that changes files
(`recording`, `log`). `disk` is the model of what a disk may hold when the power goes at some
point of that record; `states` draws such states from a seed and writes them out as folders.
`workload` says what is done to a store, `run` does it and `watch` reads meanwhile; `examine` knows
what must be true afterwards, and `explore` puts all of them together.
"""
