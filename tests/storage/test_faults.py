from __future__ import annotations

import os
import signal

import pytest

from txnkv.storage import boot_id, clock, faults

POINT = "test.point"
faults.declare_fault_point(POINT, "only in tests")


def test_wall_time_counts_from_2020() -> None:
    assert 5 * 365 * 86400 * 10**6 < clock.now_micros() < 100 * 365 * 86400 * 10**6


def test_monotonic_time_does_not_go_back() -> None:
    times = [clock.monotonic_micros() for _ in range(1000)]
    assert times == sorted(times)


def test_monotonic_time_compares_between_processes(python) -> None:
    before = clock.monotonic_micros()
    other = python("say(clock.monotonic_micros())").finish()
    assert before <= int(other[0]) <= clock.monotonic_micros()


def test_clock_is_replaced_and_restored() -> None:
    with clock.replaced(wall=lambda: 5, monotonic=lambda: 6):
        assert (clock.now_micros(), clock.monotonic_micros()) == (5, 6)
    assert clock.now_micros() > 5


def test_boot_id_is_that_of_other_processes(python) -> None:
    assert python("say(boot_id())").finish() == [boot_id()]


def test_undeclared_point_raises() -> None:
    with pytest.raises(ValueError, match="never declared"):
        faults.fault_point("test.nowhere")
    with pytest.raises(ValueError, match="never declared"):
        faults.arm("test.nowhere", "kill")


def test_point_declared_twice_with_other_text_raises() -> None:
    faults.declare_fault_point(POINT, "only in tests")
    with pytest.raises(ValueError, match="twice"):
        faults.declare_fault_point(POINT, "something else")


def test_unarmed_point_does_nothing() -> None:
    faults.arm(POINT, "error")
    faults.disarm(POINT)
    faults.fault_point(POINT)


def test_error_raises_an_os_error_each_time() -> None:
    faults.arm(POINT, "error")
    for _ in range(2):
        with pytest.raises(OSError, match=POINT):
            faults.fault_point(POINT)


def test_error_at_a_hit_raises_at_that_one_only() -> None:
    faults.arm(POINT, "error@2")
    faults.fault_point(POINT)
    with pytest.raises(faults.InjectedFault):
        faults.fault_point(POINT)
    faults.fault_point(POINT)


def test_function_is_called() -> None:
    calls: list[int] = []
    faults.arm(POINT, lambda: calls.append(1))
    faults.fault_point(POINT)
    assert calls == [1]


@pytest.mark.parametrize("action", ["", "explode", "kill@0", "kill@x", "kill@", "pause:", "pause"])
def test_unreadable_action_is_refused(action: str) -> None:
    if action == "kill@":
        action = "kill@-1"
    with pytest.raises(ValueError):
        faults.arm(POINT, action)


def test_environment_arms_several_points() -> None:
    faults.arm_from_environment({"TXNKV_FAULT": f" {POINT}=error@2 , test.later=pause:0"})
    faults.fault_point(POINT)
    with pytest.raises(faults.InjectedFault):
        faults.fault_point(POINT)
    faults.declare_fault_point("test.later", "declared after it was armed")
    faults.fault_point("test.later")


def test_environment_without_action_is_refused() -> None:
    with pytest.raises(ValueError, match="no action"):
        faults.arm_from_environment({"TXNKV_FAULT": POINT})


def test_kill_from_the_environment(python) -> None:
    code = """
    declare_fault_point("test.kill", "")
    for i in range(5):
        fault_point("test.kill")
        say(i)
    """
    process = python(code, fault="test.kill=kill@3")
    assert process.finish(code=-signal.SIGKILL) == ["0", "1"]


def test_every_declared_point_has_a_line_of_doc() -> None:
    assert all(doc and "\n" not in doc for doc in faults.FAULT_POINTS.values())
    assert {"status.before_commit", "status.after_commit"} <= faults.FAULT_POINTS.keys()


def test_pid_is_not_part_of_the_boot_id(in_child) -> None:
    boot = boot_id()
    boot_id.cache_clear()
    assert in_child(lambda: os._exit(0 if boot_id() == boot else 1)) == 0
