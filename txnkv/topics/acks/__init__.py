"""Acknowledgements as they are kept. Rows of status.db are the truth; memory is a cache of them.

subscription_rows   what a subscription is: name, kind, options, and who consumes it alone
ack_rows            what is deleted (cursors), and what transactions hold (pending acks)
exclusive           both, in the memory of the process that has the one consumer of a subscription
"""

from txnkv.topics.acks import ack_rows, subscription_rows
from txnkv.topics.acks.ack_rows import Cursor, Holder, conflict
from txnkv.topics.acks.exclusive import Acked, Exclusive, Held, Hold, LocalSubscriptions
from txnkv.topics.acks.subscription_rows import (
    EXCLUSIVE,
    FAILOVER,
    OPTIONS,
    SHARED,
    Place,
    SubscriptionInfo,
    SubscriptionOptions,
    SubscriptionType,
    dropped,
)
