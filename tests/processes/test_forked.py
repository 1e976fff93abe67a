"""Children forked from the zygote are as those that `python -c` starts, and children of ours."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tools.forked import Popen

KINDS = [Popen, subprocess.Popen]


def run(kind: type[subprocess.Popen[str]], code: str, *args: str, **options: object) -> str:
    """Run a program; return its exit status, its output and the last line of its errors."""
    child = kind(
        [sys.executable, "-c", code, *args],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )  # fmt: skip
    out, errors = child.communicate("in\n", timeout=60)
    return f"{child.returncode}|{out}|{(errors.splitlines() or [''])[-1]}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("code", "answer"),
    [
        ("print(input(), __name__)", "0|in __main__\n|"),
        ("import sys; print(*sys.argv)", "0|-c a b\n|"),
        ("import os; print(os.getcwd(), os.environ['A'], 'PATH' in os.environ)", "0|/ b False\n|"),
        ("import os; os.write(1, b'raw'); os._exit(3)", "3|raw|"),
        ("1 / 0", "1||ZeroDivisionError: division by zero"),
        ("raise SystemExit", "0||"),
        ("raise SystemExit(7)", "7||"),
        ("raise SystemExit('no')", "1||no"),
        ("raise KeyboardInterrupt", "-2||KeyboardInterrupt"),
        ("import os; os.kill(os.getpid(), 9)", "-9||"),
        (
            "import atexit, threading; atexit.register(print, 'last')\n"
            "threading.Timer(0.01, print, ['thread']).start()",
            "0|thread\nlast\n|",
        ),
        (
            "class Dropped:\n def __del__(self): print('dropped')\nkept = Dropped()",
            "0|dropped\n|",
        ),
        (
            "import signal; print([signal.getsignal(each) is not signal.SIG_DFL"
            " for each in (2, 13, 15, 17)], signal.pthread_sigmask(0, []))",
            "0|[True, True, False, False] set()\n|",
        ),
    ],
)
def test_a_program(kind: type[subprocess.Popen[str]], code: str, answer: str) -> None:
    assert run(kind, code, "a", "b", cwd="/", env={"A": "b"}) == answer


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_is_armed(kind: type[subprocess.Popen[str]]) -> None:
    code = "from txnkv.storage.faults import *\ndeclare_fault_point('a', '')\nfault_point('a')"
    end = run(kind, code, env={**os.environ, "TXNKV_FAULT": "a=kill@1"})
    assert end == "-9||"
    assert run(kind, code) == "0||"


def test_each_is_another_process_with_nothing_of_its_elders() -> None:
    code = (
        "import os, random, numpy\n"
        "print(os.getppid(), os.getpid(), random.random(), numpy.random.random())\n"
        "if os.path.isdir('/proc/self'):\n"
        "    print(len(os.listdir('/proc/self/fd')), len(os.listdir('/proc/self/task')))\n"
    )
    said = [run(Popen, code).split() for _ in range(2)]
    if sys.platform == "linux":
        assert {each[0] for each in said} == {f"0|{os.getpid()}"}
        assert {tuple(each[4:]) for each in said} == {
            ("4", "1", "|")
        }  # the fourth lists the folder
    assert not set(said[0][1:4]) & set(said[1][1:4])


def test_stopped_and_going_on_and_killed(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w+") as out:
        code = "print(input(), flush=True); input()"
        child = Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=out, text=True)
        child.send_signal(signal.SIGSTOP)
        assert os.WIFSTOPPED(os.waitpid(child.pid, os.WUNTRACED)[1])
        assert child.stdin is not None
        child.stdin.write("word\n")
        child.stdin.flush()
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(0.01)
        child.send_signal(signal.SIGCONT)
        while not (tmp_path / "out").read_text():
            assert child.poll() is None
        child.kill()
        assert child.wait(60) == -signal.SIGKILL
        child.stdin.close()
    assert (tmp_path / "out").read_text() == "word\n"


def test_a_fork_of_this_process_has_a_zygote_of_its_own() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(run(Popen, "import os; print(os.getppid())") != f"0|{os.getpid()}\n|")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
