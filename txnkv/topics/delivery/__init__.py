"""Subscriptions at work: messages to consumers, and their acknowledgements.

subscriptions       begin, seek, close, drop; sweeps; the part in the commit of stored transactions
redelivery          the messages of an exclusive consumer, those that come back first; failover
leases              those of a shared one, or where deliveries are counted: a row each
key_shared          those of a key_shared one: who has which keys, and of each key one consumer's,
                    in order
transaction_acks    the acks of one transaction, in memory or in rows, from the call to the end
"""

from txnkv.topics.delivery.key_shared import KeySharedReader
from txnkv.topics.delivery.leases import LeaseReader
from txnkv.topics.delivery.redelivery import ExclusiveReader
from txnkv.topics.delivery.subscriptions import Belongings, Standby, Subscriptions
from txnkv.topics.delivery.transaction_acks import TransactionAcks, refuse
