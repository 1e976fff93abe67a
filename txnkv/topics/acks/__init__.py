"""Acknowledgements as they are kept. Rows of status.db are the truth; memory is a cache of them.

ack_rows     what is deleted (cursors), and what transactions hold (pending acks); the rule of both
exclusive    the same, in the memory of the process that has the one consumer of a subscription
"""

from txnkv.topics.acks import ack_rows
from txnkv.topics.acks.ack_rows import NONE, Holder
from txnkv.topics.acks.exclusive import Exclusive, HeldAcks
from txnkv.topics.ranges import Acked, Cursor, Held
