"""Stores on other hosts: the client's interface over Arrow Flight.

address                 a folder or an address: which client it is
channel                 requests, answers and heartbeats of one client
wire                    the calls that there are, and the bytes that they are
remote_client           the client
remote_handles          tables and scans
remote_topics           topics and their readers and producers
remote_session          rows and messages that wait
remote_transaction      transactions

The other side is `txnkv.server`. Both take their calls from one table, in `wire`.
"""

from txnkv.remote.address import (
    CREDENTIAL_WORDS,
    Credentials,
    connect,
    is_address,
    require_certificates,
    require_pair,
    why_untimely,
)
from txnkv.remote.wire import (
    ACTION,
    BYE,
    END_OF_PUT,
    METHODS,
    PING,
    RIGHTS,
    VERSION,
    LostHandleError,
    Method,
    Right,
    pack,
    unpack,
)
