"""From memory to row sets, and fewer of them: flush, intents, compaction, history, checks."""

from txnkv.tables.maintenance import flush, history
from txnkv.tables.maintenance.compactor import Compactor
from txnkv.tables.maintenance.intents import Resolution
from txnkv.tables.maintenance.table_backup import back_up_tablet, committed_row_sets
from txnkv.tables.maintenance.table_check import (
    Counted,
    accept_loss,
    check_row_set,
    check_together,
    row_set_ids,
)
