"""The ground: the store's directory, LMDB, SQLite, shared memory, time and fork safety.

    seam         time, boot and fault points
    directory    the layout on disk and FORMAT
    gate, fork   who may be inside while the map moves or the process forks
    lmdb_errors, lmdb_open, lmdb_handles, environment, environments    LMDB
    finalizers   what is done when an object is dropped
    slots, runtime_file, runtime    what the processes share in memory
    sqlite_connection, reader_pool, write_queue, status_db    SQLite
    store        all of it, once a process

What is exported here is what other layers use.
"""

from txnkv.storage.directory import StoreDirectory
from txnkv.storage.environment import Environment
from txnkv.storage.environments import Environments
from txnkv.storage.finalizers import WhenDropped
from txnkv.storage.fork import GATE, ForkGate
from txnkv.storage.runtime import Runtime
from txnkv.storage.seam import (
    FAULT_POINTS,
    InjectedFault,
    arm,
    boot_id,
    clock,
    declare_fault_point,
    disarm,
    fault_point,
)
from txnkv.storage.status_db import StatusDatabase
from txnkv.storage.store import Store

__all__ = [
    "FAULT_POINTS",
    "GATE",
    "Environment",
    "Environments",
    "ForkGate",
    "InjectedFault",
    "Runtime",
    "StatusDatabase",
    "Store",
    "StoreDirectory",
    "WhenDropped",
    "arm",
    "boot_id",
    "clock",
    "declare_fault_point",
    "disarm",
    "fault_point",
]
