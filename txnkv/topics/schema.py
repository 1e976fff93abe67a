"""All tables of status.db that belong to topics. They came with version 3, at once."""

from __future__ import annotations

from txnkv.topics import catalog_schema, producers_schema, subscriptions_schema

SCHEMA = catalog_schema.SCHEMA + producers_schema.PRODUCERS_SCHEMA + subscriptions_schema.SCHEMA

UPGRADE_2_TO_3 = SCHEMA
