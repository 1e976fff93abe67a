"""Tests of the client that run twice: over a store that is here, and over a server of it.

A module is named here with the reasons for which tests of it run over the folder alone. What these
reasons mean for users stands in docs/remote.md.
"""

from __future__ import annotations

import pytest

INSIDE = "it looks into parts of the process that has the store open"
LATE = "a call that waits for the next request finds out with that what was done elsewhere"
FAULT = "it injects a fault into a thread, which is the server's"
ERRORS = "it compares errors by identity"
JOBS = "a job is started on the host that has the store"
HISTORY = "the server's own clients keep the history that it drops"

QUICK = {
    "client.test_rows": {},
    "client.test_run": {},
    "client.test_with": {},
    "client.test_one_row": {},
}
SLOW = {
    "client.test_operations": {},
    "client.test_sessions": {
        "test_an_abandoned_background_session_does_not_flush": INSIDE,
        "test_row_errors_name_the_keys": ERRORS,
    },
    "client.test_small_transactions": {
        "test_what_was_forgotten_is_not_known": FAULT,
        "test_a_dropped_handle_leaves_no_pin": INSIDE,
    },
    "client.test_tokens": {"test_what_a_token_says": INSIDE},
    "client.test_topics_sending": {"test_much_at_once_outside_of_a_transaction": INSIDE},
    "client.test_topics_transactions": {
        "test_nothing_is_sent_after_the_end": LATE,
        "test_nothing_is_sent_after_the_timeout": LATE,
        "test_messages_that_wait_for_a_dropped_topic_are_gone_others_are_not": LATE,
        "test_a_topic_made_anew_is_another": LATE,
        "test_an_ack_conflict_ends_the_later_transaction": LATE,
        "test_an_attempt_of_a_job_does_not_acknowledge": JOBS,
    },
    "client.test_write_arrow": {},
    "spark.test_changes_stream": {},
    "spark.test_foreach_batch": {},
    "spark.test_stream_writing": {},
    "spark.test_topic_stream": {},
    "spark.test_topic_writing": {},
    "spark.test_writing": {},
    "tables.test_diff": {
        "test_of_a_commit_that_is_not_finalized": FAULT,
        "test_no_further_than_the_history": HISTORY,
    },
    "tables.test_diff_tokens": {"test_whether_anything_changed": INSIDE},
    "tables.test_predicates": {"test_a_key_range_reads_few_blocks": INSIDE},
    "tables.test_key_types": {},
}


def parametrize(metafunc: pytest.Metafunc) -> None:
    """Let a test that is named here run over a server too; those that are slow only if asked."""
    name = (metafunc.module.__name__ or "").removeprefix("tests.")
    reasons = QUICK.get(name, SLOW.get(name))
    if reasons is None or "connect" not in metafunc.fixturenames:
        return
    if metafunc.function.__name__ in reasons:
        return
    marks = [] if name in QUICK else [pytest.mark.slow]
    hosts = ["here", pytest.param("elsewhere", marks=marks)]
    metafunc.parametrize("host", hosts, indirect=True)
