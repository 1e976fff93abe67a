"""The ground: the store's directory, LMDB, SQLite, shared memory, time and fork safety.

    clocks, faults   time, fault points, errors of the disk
    locks, fork, threads    who may be inside while the map moves or the process forks; calls
                     that no signal interrupts, work of dropped objects
    directory        the layout on disk and FORMAT
    lmdb_open, environment, environments    LMDB
    extents, lmdb_replace    how far each LMDB file was written, and room that goes back to the
                     disk; what takes the place of one
    runtime_file, runtime    what the processes share in memory
    right_of_way             whose turn it is after conflicts
    sqlite_connection, write_queue, status_db    SQLite
    store            all of it, once a process
    backup_files     what a backup is made of; a folder that is whole or not there
    backup_uploads   backups in other file systems

What is exported here is what other layers use.
"""

from txnkv.storage import extents
from txnkv.storage.backup_files import (
    STATUS,
    Backup,
    BackupWriter,
    EntryFile,
    changed_copy,
    each_between,
    put_entries,
    read_copy,
    whole_folder,
)
from txnkv.storage.backup_uploads import (
    Place,
    backups_at,
    check_backup,
    fetching,
    open_backup,
    place_of,
    writing,
)
from txnkv.storage.clocks import EPOCH_SECONDS, back_off, boot_id, clock
from txnkv.storage.directory import (
    INDEXES,
    KEY_SHARING,
    LIST,
    PLACES,
    READ_OTHERWISE,
    TABLE_HISTORY,
    VALUE_SCHEMAS,
    StoreDirectory,
    folder_at,
    make_private_directory,
    make_private_file,
    numbers_in,
    opened,
    store_path,
    sync,
    sync_directory,
)
from txnkv.storage.environment import EPOCH, READ_ID, Environment, new_epoch
from txnkv.storage.environments import Environments
from txnkv.storage.extents import giving_up
from txnkv.storage.faults import (
    FAULT_POINTS,
    FULL_ERRNOS,
    NO_DESCRIPTOR_ERRNOS,
    DatabaseDamagedError,
    DeniedError,
    InjectedFault,
    arm,
    armed,
    declare_fault_point,
    descriptor_limit,
    disarm,
    disk_errors,
    fault_point,
    is_there,
    lmdb_error,
    no_thread,
    open_private,
    require_of_store,
    storage_full,
    with_descriptor,
)
from txnkv.storage.fork import GATE, leak
from txnkv.storage.lmdb_open import Map, StaleHandleError
from txnkv.storage.lmdb_replace import mend, shrink
from txnkv.storage.locks import (
    CachedProperty,
    SharedWeakSet,
    new_baton,
    new_condition,
    new_event,
    new_lock,
    new_rlock,
    pass_baton,
)
from txnkv.storage.right_of_way import CONFLICTS, Contender, has_others_to_do
from txnkv.storage.runtime import Runtime
from txnkv.storage.runtime_file import CHANGE
from txnkv.storage.status_db import StatusDatabase
from txnkv.storage.store import Store, require_same
from txnkv.storage.threads import (
    TaskThread,
    WhenDropped,
    brief,
    caller,
    calls_ended,
    done_here,
    go_on,
    is_calm,
    later,
    lengthy,
    settle_dropped,
    shielded,
    shielded_steps,
    shielded_unless,
    submitted,
)
from txnkv.storage.write_queue import (
    HASTE,
    BusyError,
    MaintenanceLock,
    not_waiting,
    patience,
    waiting_for,
)
