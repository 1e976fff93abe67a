"""A store served to other hosts; see `txnkv.remote` for their side.

flight_server    what comes over Arrow Flight
answering        the calls of a request
guests           clients, their handles and their leases
users            who may do what
"""

from txnkv.server.flight_server import Server
from txnkv.server.users import (
    EVERYBODY,
    SCRAM,
    About,
    Limits,
    ScramExchange,
    StoredUser,
    User,
    Users,
    add_user,
)
