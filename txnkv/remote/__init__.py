"""Stores on other hosts: the client's interface over Arrow Flight.

address                 a folder or an address: which client it is
channel                 requests, answers and heartbeats of one client
methods, wire           the calls that there are, and the bytes that they are
remote_client           the client
remote_handles          tables, scans, topics and their readers and producers
remote_session          rows and messages that wait
remote_transaction      transactions

The other side is `txnkv.server`. Both take their calls from one table, `methods`.
"""

from txnkv.remote.address import Credentials, connect, is_address
from txnkv.remote.methods import (
    ACTION,
    BYE,
    END_OF_PUT,
    METHODS,
    PING,
    RIGHTS,
    VERSION,
    Method,
    Right,
)
from txnkv.remote.wire import LostHandleError, pack, unpack
