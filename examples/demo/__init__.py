"""The demo: real text, a Spark job, two tables, one transaction, and somebody who looks on.

    driver                         Spark                              reader process
    begin a transaction                                               looks: none
                                   words.save(): tasks stage rows;    looks: none
                                   one worker is killed, its task
                                   runs again
                                   files.save()                       looks: none
    commit                                                            looks: all
    begin another; the same                                           looks: all
    under other names; roll back
    check the store

Everything that the report claims was measured or counted on the way, and a claim that does
not hold ends the demo with exit status 1. `job` is the program that a user would write, with
what it needs to watch itself; `sources` reads the input, `workers` kills a worker at the
right moment, `looker` is the process that looks on (`watcher` starts it), `report` is what
comes out. Importing this package imports no Spark: the reader process has no need of it.

`make demo` runs it, and so does `txnkv demo` of a clone; the command's options are in
`txnkv/cli/demo.py`.
"""
