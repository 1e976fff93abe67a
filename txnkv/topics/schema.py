"""All tables of status.db that belong to topics. All but one came with version 3, at once."""

from __future__ import annotations

from txnkv.topics import (
    catalog_schema,
    producers_schema,
    staged_schema,
    subscriptions_schema,
)

UPGRADE_2_TO_3 = (
    catalog_schema.SCHEMA + producers_schema.PRODUCERS_SCHEMA + subscriptions_schema.SCHEMA
)

UPGRADE_3_TO_4 = staged_schema.SCHEMA

SCHEMA = UPGRADE_2_TO_3 + UPGRADE_3_TO_4
