"""The handles of a store, each one class in one file.

opening                               the way in
client, table, topic                  the store; tables and snapshots; topics
consumer, subscription, producer      what a topic gives
group_consumer, group_members         who shares the partitions of a topic with others
attempts                              transactions of one `run`, and those that have a name
replica, admin                        copies of topics; a whole store seen, checked and compacted
indexes                               made, filled, compared with their tables
planning                              what Spark asks of a store, in its planners and tasks, and
                                      the command line of topics
backup, dump_files                    a store copied at one timestamp, as it is or in plain files,
                                      and made of such a copy

With them come the words that options take, as types: a checker finds a wrong one before the program
runs.
"""

from txnkv.client.admin import CheckReport as CheckReport
from txnkv.client.admin import CompactReport as CompactReport
from txnkv.client.admin import TxnInfo as TxnInfo
from txnkv.client.attempts import NAMES_TABLE as NAMES_TABLE
from txnkv.client.attempts import Attempts as Attempts
from txnkv.client.attempts import Claim as Claim
from txnkv.client.attempts import NamedTransaction as NamedTransaction
from txnkv.client.attempts import begin_transaction as begin_transaction
from txnkv.client.attempts import claim_name as claim_name
from txnkv.client.attempts import has_committed as has_committed
from txnkv.client.attempts import names_table as names_table
from txnkv.client.attempts import producer_number as producer_number
from txnkv.client.attempts import require_done as require_done
from txnkv.client.backup import BackupReport as BackupReport
from txnkv.client.backup import RestoreReport as RestoreReport
from txnkv.client.backup import restore as restore
from txnkv.client.client import Client as Client
from txnkv.client.consumer import MESSAGE_COLUMNS as MESSAGE_COLUMNS
from txnkv.client.consumer import Consumer as Consumer
from txnkv.client.dump_files import DumpReport as DumpReport
from txnkv.client.dump_files import dump as dump
from txnkv.client.group_consumer import GroupConsumer as GroupConsumer
from txnkv.client.group_members import LATEST_NOTE as LATEST_NOTE
from txnkv.client.group_members import MEMBERS_TABLE as MEMBERS_TABLE
from txnkv.client.group_members import OFFSETS_TABLE as OFFSETS_TABLE
from txnkv.client.group_members import live_members as live_members
from txnkv.client.group_members import offsets_table as offsets_table
from txnkv.client.indexes import Index as Index
from txnkv.client.opening import connect as connect
from txnkv.client.planning import Planning as Planning
from txnkv.client.planning import inode_of as inode_of
from txnkv.client.producer import Producer as Producer
from txnkv.client.replica import replicate as replicate
from txnkv.client.subscription import Subscription as Subscription
from txnkv.client.subscription import subscribe as subscribe
from txnkv.client.table import DiffToken as DiffToken
from txnkv.client.table import Snapshot as Snapshot
from txnkv.client.table import Table as Table
from txnkv.client.topic import Topic as Topic
from txnkv.tables import Operation as Operation
from txnkv.topics import Buffer as Buffer
from txnkv.topics import Cleanup as Cleanup
from txnkv.topics import Compression as Compression
from txnkv.topics import FetchIsolation as FetchIsolation
from txnkv.topics import Order as Order
from txnkv.topics import ReadIsolation as ReadIsolation
from txnkv.topics import Start as Start
from txnkv.topics import SubscriptionType as SubscriptionType
from txnkv.transaction import FlushMode as FlushMode
from txnkv.transaction import Isolation as Isolation
from txnkv.transaction import Locking as Locking
