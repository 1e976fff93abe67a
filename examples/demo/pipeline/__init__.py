"""A pipeline that may be killed anywhere, at any moment: text files in, counts and mails out.

    files of a directory                 Spark                              a mailbox
      |  feed                              |  count                           ^  mail
      v                                    v                                  |
    TOPIC lines  ---------------->  words of a micro batch  ---------->  TOPIC alerts
    TABLE files (where it is)       TABLE counts (totals)                TABLE mails (what it sent)
                                    subscription counting                subscription mailer
    |___ one transaction ____|      |_____ one transaction ____________|  |_ one transaction _|

`feed`, `count` and `mail` are programs of their own, as a user would write them, each started
and stopped as one likes; `layout` has their tables and topics. `watch` looks on, by `reading`.
`run` starts them all as `program`s, has `writing` append text, kills at random, and lets `checking`
count in the end: it is `txnkv demo --streaming`.
"""
