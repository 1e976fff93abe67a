"""Tests of the client that run twice: over a store that is here, and over a server of it.

A module is named here with the reasons for which tests of it run over the folder alone. What these
reasons mean for users stands in docs/remote.md.
"""

from __future__ import annotations

import pytest

INSIDE = "it looks into parts of the process that has the store open"
AT_ONCE = "a server tells of all that is gone in one error"
LATE = "a call that waits for the next request finds out with that what was done elsewhere"
FAULT = "it injects a fault into a thread, which is the server's"
ERRORS = "it compares errors by identity"
JOBS = "a job is started on the host that has the store"
HELD = "what is given up is held until the next request or heartbeat"
ADDRESS = "a token of a server's client has its address, and so more bytes"
FOLDER = "another test does it in the folder, this one over a server alone"
REPLACED = "the folder is put in another's place, which the server has open"
CLOCK = "another machine's clock may differ by minutes, and the test has seconds"
HISTORY = "the server's own clients keep the history that it drops"

QUICK = {
    "client.test_commit_async": {
        "test_thousands_share_a_few_groups": INSIDE,
        "test_it_is_on_its_way_until_the_disk_has_it": FAULT,
        "test_nothing_written_is_done_at_once": LATE,
        "test_close_waits_for_a_large_one": INSIDE,
        "test_a_disk_that_fails_is_told_to_each": FAULT,
    },
    "client.test_rows": {},
    "client.test_run": {},
    "client.test_with": {},
    "client.test_one_row": {},
    "client.test_stale_handles": {
        "test_a_subscription_of_another_store_is_refused_over_a_server": FOLDER,
    },
}
SLOW = {
    "client.test_callbacks": {},
    "client.test_group_consumer": {},
    "client.test_operations": {},
    "client.test_session_acks": {
        "test_acks_beside_many_rows_after_a_fault": FAULT,
        "test_messages_come_again_until_acks_beside_many_rows_are_written": FAULT,
        "test_a_transaction_has_what_acks_beside_many_rows_want": FAULT,
    },
    "client.test_sessions": {
        "test_a_flush_in_whose_midst_others_end_its_transaction": FAULT,
        "test_close_writes_the_rest_however_many_are_gone": AT_ONCE,
        "test_an_abandoned_background_session_does_not_flush": INSIDE,
        "test_an_error_in_the_background_waits_for_a_call": INSIDE,
        "test_an_error_of_few_rows_in_the_background_is_told_at_the_next_call": INSIDE,
        "test_row_errors_name_the_keys": ERRORS,
    },
    "client.test_small_transactions": {
        "test_what_was_forgotten_is_not_known": FAULT,
        "test_a_dropped_handle_leaves_no_pin": INSIDE,
        "test_it_times_out": LATE,
        "test_who_looked_first_is_told_that_it_timed_out": LATE,
    },
    "client.test_tokens": {
        "test_what_a_token_says": INSIDE,
        "test_text_is_short_and_url_safe": ADDRESS,
        "test_the_table_of_altered_bytes_is_whole": ADDRESS,
        "test_corrupted_token": ADDRESS,
        "test_joins_in_another_process": ADDRESS,
        "test_a_process_that_ends_writes_what_waits_in_those_it_joined": ADDRESS,
        "test_a_joined_handle_that_is_dropped_tells_what_is_lost": INSIDE,
    },
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
    "spark.test_changes_stream": {
        "test_what_is_done_is_not_kept": HELD,
        "test_a_history_that_passed_a_stopped_query": HELD,
        "test_a_store_restored_to_the_past": REPLACED,
    },
    "spark.test_exactly_once": {},
    "spark.test_foreach_batch": {},
    "spark.test_foreach_batch_streams": {
        "test_a_driver_that_is_killed_goes_on_where_it_was": FAULT,
    },
    "spark.test_pipeline": {
        "test_the_whole_killed_over_a_server": FOLDER,
        "test_window_shows_what_is_there": INSIDE,
    },
    "spark.test_stream_queries": {"test_a_checkpoint_that_lost_its_last_batch": CLOCK},
    "spark.test_stream_writing": {"test_a_committer_is_killed": FAULT},
    "spark.test_topic_losses": {
        "test_enforced_retention_is_seen": INSIDE,
        "test_a_store_that_was_restored_to_the_past": REPLACED,
    },
    "spark.test_topic_stream": {},
    "spark.test_topic_writing": {
        "test_the_committer_dies_before_its_answer": FAULT,
        "test_a_write_that_raised_says_that_it_is_committed": FAULT,
    },
    "spark.test_writing": {},
    "tables.test_diff": {
        "test_of_a_commit_that_is_not_finalized": FAULT,
        "test_no_further_than_the_history": HISTORY,
    },
    "tables.test_diff_tokens": {"test_whether_anything_changed": INSIDE},
    "tables.test_predicates": {"test_a_key_range_reads_few_blocks": INSIDE},
    "tables.test_key_types": {},
}
QUICK_OF_SLOW = {"test_all_rows_then_what_changes", "test_a_batch_again_gives_the_same"}
"""One of each kind of stream."""


def parametrize(metafunc: pytest.Metafunc) -> None:
    """Let a test that is named here run over a server too; those that are slow only if asked."""
    name = (metafunc.module.__name__ or "").removeprefix("tests.")
    reasons = QUICK.get(name, SLOW.get(name))
    if reasons is None or "connect" not in metafunc.fixturenames:
        return
    if metafunc.function.__name__ in reasons:
        return
    quick = name in QUICK or metafunc.function.__name__ in QUICK_OF_SLOW
    marks = [] if quick else [pytest.mark.slow]
    hosts = ["here", pytest.param("elsewhere", marks=marks)]
    metafunc.parametrize("host", hosts, indirect=True)
