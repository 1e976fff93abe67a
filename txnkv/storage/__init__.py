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

from txnkv.storage import extents, finalizers
from txnkv.storage.directory import StoreDirectory, make_private_directory, sync_directory
from txnkv.storage.environment import Environment
from txnkv.storage.environments import Environments
from txnkv.storage.finalizers import WhenDropped
from txnkv.storage.fork import GATE, ForkGate
from txnkv.storage.lmdb_errors import FULL_ERRNOS, descriptor_limit, storage_full
from txnkv.storage.lmdb_handles import StaleHandleError
from txnkv.storage.lmdb_open import Map
from txnkv.storage.locks import new_baton, new_condition, new_event, new_lock, new_rlock
from txnkv.storage.maintenance_lock import MaintenanceLock
from txnkv.storage.mending import mend
from txnkv.storage.runtime import Pin, Runtime
from txnkv.storage.seam import (
    EPOCH_SECONDS,
    FAULT_POINTS,
    InjectedFault,
    arm,
    back_off,
    boot_id,
    clock,
    declare_fault_point,
    disarm,
    fault_point,
)
from txnkv.storage.shield import go_on, shielded, shielded_steps
from txnkv.storage.status_db import StatusDatabase
from txnkv.storage.store import Store, require_same
from txnkv.storage.write_queue import BusyError, not_waiting, patience, waiting_for

__all__ = [
    "BusyError",
    "EPOCH_SECONDS",
    "Environment",
    "Environments",
    "FAULT_POINTS",
    "FULL_ERRNOS",
    "ForkGate",
    "GATE",
    "InjectedFault",
    "MaintenanceLock",
    "Map",
    "Pin",
    "Runtime",
    "StaleHandleError",
    "StatusDatabase",
    "Store",
    "StoreDirectory",
    "WhenDropped",
    "arm",
    "back_off",
    "boot_id",
    "clock",
    "declare_fault_point",
    "descriptor_limit",
    "disarm",
    "extents",
    "fault_point",
    "finalizers",
    "go_on",
    "make_private_directory",
    "mend",
    "new_baton",
    "new_condition",
    "new_event",
    "new_lock",
    "new_rlock",
    "not_waiting",
    "patience",
    "require_same",
    "shielded",
    "shielded_steps",
    "storage_full",
    "sync_directory",
    "waiting_for",
]
