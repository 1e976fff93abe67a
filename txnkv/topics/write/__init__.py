"""Batches into logs, and what waits on the way there.

append            the batches of large transactions, under the log's write lock
roll_forward      a log up to the offsets that were given; recovery
producers         idempotent producers: names, epochs, the batches that were sent
producer_sender   what such a producer sends, each message once
staged_sends      what attempts of jobs send, until the job ends
staged_files      the files in which that waits, and their rows in status.db
"""

from txnkv.topics.write import append, producers, roll_forward, staged_files
from txnkv.topics.write.append import AppendAttempt, Note, is_appended
from txnkv.topics.write.producer_sender import PATIENCE, Delivered, Sender
from txnkv.topics.write.roll_forward import regain
from txnkv.topics.write.staged_sends import StagedLots, StagedSends, StagedSendsFolder
