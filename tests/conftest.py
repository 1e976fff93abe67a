"""Fixtures for every test: stores that are checked at the end, time that can be moved,
other processes in step with the test.
"""

from __future__ import annotations

import base64
import gc
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

import txnkv
from tests import handlers, hosts, internals
from txnkv.coordinator.maintenance import Maintenance
from txnkv.storage.clocks import clock
from txnkv.storage.faults import disarm
from txnkv.transaction import instance

sys.path.insert(0, str(Path(__file__).parent.parent))

from tools.forked import Popen

# Spark's workers are of the Python that runs the tests, not of the first one in PATH.
os.environ["PYSPARK_PYTHON"] = sys.executable
os.environ["SPARK_CONF_DIR"] = str(Path(__file__).parent / "spark" / "conf")

# A busy machine fails no test; `pytest --hypothesis-profile thorough` tries more.
settings.register_profile(
    "any speed", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("thorough", settings.get_profile("any speed"), max_examples=1_000)
settings.load_profile("any speed")

SCHEMA = txnkv.Schema({"id": "int64", "v": "string?"}, primary_key=["id"])

_PRELUDE = """
import base64, os, pickle, sys
import txnkv
from txnkv.tables.write import write_buffer
from txnkv.topics import outbox
_path, _options, _values = pickle.loads(base64.b64decode(sys.argv[1]))
globals().update(_values)
def say(value=None):
    print(base64.b64encode(pickle.dumps(value)).decode(), flush=True)
def wait():
    return sys.stdin.readline().strip()
if "TXNKV_TEST_STAGE_ALL" in os.environ:
    write_buffer.MAX_ROWS = write_buffer.FEW_ROWS = outbox.MAX_BYTES = -1
client = txnkv.connect(_path, **_options)
"""


class Process:
    """A Python process with a client of the store, that says values and is told words."""

    def __init__(
        self, path: Path, code: str, options: dict[str, Any], fault: str, values: dict[str, Any]
    ) -> None:
        start = base64.b64encode(pickle.dumps((str(path), options, values))).decode()
        self.popen = Popen(
            [sys.executable, "-c", _PRELUDE + textwrap.dedent(code), start],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "TXNKV_FAULT": fault},
        )

    def hear(self) -> Any:
        """Return what the process says next."""
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        if not line:
            _, err = self.popen.communicate(timeout=60)
            pytest.fail(f"the process ended with {self.popen.returncode}: {err}")
        return pickle.loads(base64.b64decode(line))

    def tell(self, word: str = "go") -> None:
        """Let its wait() return."""
        assert self.popen.stdin is not None
        self.popen.stdin.write(word + "\n")
        self.popen.stdin.flush()

    def kill(self) -> None:
        """Kill the process as by kill -9; return when it is gone."""
        self.popen.send_signal(signal.SIGKILL)
        self.popen.communicate(timeout=60)

    def finish(self, code: int = 0, timeout: float = 120) -> Any:
        """Wait for its end; what it said last, if anything."""
        out, err = self.popen.communicate(timeout=timeout)
        assert self.popen.returncode == code, err
        lines = out.splitlines()
        return pickle.loads(base64.b64decode(lines[-1])) if lines else None

    def end(self) -> None:
        """Whatever it does, it is over."""
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.communicate()


class Time:
    """The clock of this process, a number of seconds ahead of the real one.

    Attributes:
        ahead: of the wall clock, which may be put back.
        passed: of the monotonic clock, which never goes back: a machine may have just started.
    """

    def __init__(self) -> None:
        self.ahead = self.passed = 0.0

    def forward(self, seconds: float) -> None:
        """Let time pass without waiting."""
        assert seconds >= 0, "only `ahead` may be put back"
        self.ahead += seconds
        self.passed += seconds


def until(what: Callable[[], Any], seconds: float = 300.0) -> Any:
    """Wait for something to become true, and return it."""
    give_up = time.monotonic() + seconds
    while True:
        found = what()
        if found:
            return found
        if time.monotonic() > give_up:
            pytest.fail(f"{what} was still {found!r} after {seconds} s")
        time.sleep(0.005)


def is_stopped(pid: int) -> bool:
    """Tell whether a process is stopped by a signal, or dead."""
    command = ["ps", "-o", "stat=", "-p", str(pid)]
    told = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return told.strip()[:1] in ("", "T", "Z")


# What starts a Spark; the other tests of tests/spark call its parts in Python.
_SPARK = (
    "benchmarks/test_streaming", "cli/test_demo", "cli/test_docs", "spark/test_altered",
    "spark/test_changes_stream", "spark/test_driver", "spark/test_exactly_once",
    "spark/test_foreach_batch_streams", "spark/test_indexed", "spark/test_late_attempts",
    "spark/test_manual", "spark/test_operations", "spark/test_other_hosts", "spark/test_planning",
    "spark/test_reading", "spark/test_round_trip", "spark/test_set_up",
    "spark/test_stream_queries", "spark/test_stream_writing", "spark/test_submit",
    "spark/test_topic_spark", "spark/test_topic_writing", "spark/test_typed_topics",
    "spark/test_writing",
)  # fmt: skip


def pytest_configure() -> None:
    """Take SIGINT as in a terminal: what a shell starts in the background ignores it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run what starts a Spark in one process: two at once are slow, and take much memory. So what
    looks at the same recording of a store, which is made once then.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            name = nodeid.removeprefix("tests/")
            if name.startswith(_SPARK):
                return "spark"
            return "powerloss" if name.startswith("powerloss/") else nodeid

    return Scheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse a test that would start a Spark in a process of its own."""
    for item in items:
        name = item.nodeid.removeprefix("tests/")
        if "spark" in getattr(item, "fixturenames", ()) and not name.startswith(_SPARK):
            raise pytest.UsageError(f"{name} takes a Spark: name its file in {__file__}")


@pytest.fixture
def calm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Require of public calls that no signal handler comes between where they use the store."""
    found = handlers.watch(monkeypatch)
    yield
    assert not found, f"where a signal handler may come between: {sorted(set(found))}"


def pytest_collection_finish() -> None:
    """Keep thousands of collected tests out of each later search for garbage: 0.2 s of it."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """After each file, do the same with what will outlive it."""
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package as a zip file, as its wheel is one."""
    path = tmp_path_factory.mktemp("packed") / "txnkv.zip"
    root = Path(txnkv.__file__).parents[1]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for package in ("txnkv", "pyspark_txnkv"):
            for found in (root / package).rglob("*"):
                if found.suffix in (".py", ".so"):
                    file.write(found, found.relative_to(root))
    return path


@pytest.fixture(name="until")
def _until() -> Callable[..., Any]:
    """Waits for a function to answer something true, and returns it."""
    return until


@pytest.fixture
def store_path(tmp_path: Path) -> Path:
    return tmp_path / "store"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    hosts.parametrize(metafunc)


@pytest.fixture
def host(request: pytest.FixtureRequest) -> str:
    """The word here, or elsewhere: then the test's clients are those of a server."""
    return getattr(request, "param", "here")


@pytest.fixture
def connect(store_path: Path, host: str) -> Iterator[Callable[..., txnkv.Client]]:
    """Opens clients of the test's store, with connect's options. At the end of the test the
    store is opened again, if need be, and everything in it is checked.
    """
    made: list[txnkv.Client] = []
    servers: list[Any] = []

    def open_client(**options: Any) -> txnkv.Client:
        opened = txnkv.connect(store_path, **options)
        made.append(opened)
        if host == "elsewhere":
            if not servers:
                from txnkv.server import Server

                servers.append(Server(str(store_path), "grpc://127.0.0.1:0"))
            passed = {"read_only", "keepalive_time"}
            options = {name: value for name, value in options.items() if name in passed}
            made.append(txnkv.connect(f"grpc://127.0.0.1:{servers[0].port}", **options))
            internals.BEHIND[made[-1]] = opened
        return made[-1]

    yield open_client
    disarm()
    if servers:
        for client in made:
            client.close()
        servers[0].close()
    if not made:
        return
    with txnkv.connect(store_path) as last:
        report = last.check()
    for client in made:
        client.close()
    assert report.problems == []


@pytest.fixture
def client(connect: Callable[..., txnkv.Client]) -> txnkv.Client:
    return connect()


@pytest.fixture
def table(client: txnkv.Client) -> txnkv.Table:
    """One tablet: id int64, v string?."""
    return client.create_table("t", SCHEMA)


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> Callable[[txnkv.Client], None]:
    """No background rounds in this process; a call with a client runs one as the leader."""
    monkeypatch.setattr(Maintenance, "start", lambda self: None)
    for opened in list(instance._instances.values()):
        maintenance = opened.coordinator.maintenance
        thread, maintenance._thread = maintenance._thread, None
        if thread is not None:
            maintenance._stop.set()
            thread.join()
            for beside in maintenance._beside:
                beside.join()
            maintenance._stop.clear()

    def run(client: txnkv.Client) -> None:
        assert internals.maintenance(client).round(resume_all=True)

    return run


@pytest.fixture
def now() -> Iterator[Time]:
    """Lets time pass for this process, by its forward(seconds)."""
    moved = Time()
    wall, monotonic = clock.now_micros, clock.monotonic_micros
    with clock.replaced(
        wall=lambda: wall() + int(moved.ahead * 1e6),
        monotonic=lambda: monotonic() + int(moved.passed * 1e6),
    ):
        yield moved


@pytest.fixture
def process(store_path: Path) -> Iterator[Callable[..., Process]]:
    """Starts processes that run some code with `client`, the given values, say(value) and
    wait(). They are gone at the end of the test.
    """
    started: list[Process] = []

    def start(
        code: str, fault: str = "", options: dict[str, Any] | None = None, **values: Any
    ) -> Process:
        started.append(Process(store_path, code, options or {}, fault, values))
        return started[-1]

    yield start
    for one in started:
        one.end()


@pytest.fixture
def elsewhere(process: Callable[..., Process]) -> Callable[..., Any]:
    """Runs code with some values in another process; answers what it said last."""

    def run(code: str, **values: Any) -> Any:
        return process(code, **values).finish()

    return run


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every write is staged at once, as one too large for the small path; in children too."""
    monkeypatch.setattr("txnkv.tables.write.write_buffer.MAX_ROWS", -1)
    monkeypatch.setattr("txnkv.tables.write.write_buffer.FEW_ROWS", -1)
    monkeypatch.setattr("txnkv.topics.outbox.MAX_BYTES", -1)
    monkeypatch.setenv("TXNKV_TEST_STAGE_ALL", "1")  # of children


@pytest.fixture(params=["small", "large"])
def size(request: pytest.FixtureRequest) -> str:
    """The test runs twice: with writes as small as they are, and with each of them staged."""
    if request.param == "large":
        request.getfixturevalue("large")
    return str(request.param)
