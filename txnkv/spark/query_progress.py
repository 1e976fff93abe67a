"""The check whether a micro batch is in the store, and whether those before it are."""

from __future__ import annotations

from txnkv.client import Client
from txnkv.coordinator import Mark, applications


def is_committed(client: Client, mark: Mark) -> bool:
    """Tell whether a query's batch is in the store.

    Raises:
        ValueError: the application is driven by another query, or batches before this one are
            missing: Spark numbers them without gaps.
    """
    with client.instance.store.status.read() as cur:
        if applications.is_applied(cur, mark):
            return True
    last = client.applied(mark.app_id)
    if last is not None and last.version < mark.version - 1:
        raise ValueError(
            f"application {mark.app_id!r} has version {last.version}, and batch {mark.version} of "
            f"its query comes next: batches {last.version + 1} to {mark.version - 1} are not in "
            "the store. Either it was restored to an earlier time, or they went elsewhere. Restore "
            "the query's checkpoint to that time too; or go on without them, after "
            f"client.forget_applied({mark.app_id!r})"
        )
    return False
