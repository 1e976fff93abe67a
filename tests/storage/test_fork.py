"""Fork: a child neither uses nor closes what it inherits, and nothing that was committed is lost.

The story: a child that opened SQLite while it inherited the parent's connection lost commits that
were acknowledged, and a child that closed an inherited LMDB environment erased the parent's
reader slot, so that pages were reused under a running read. Both were seen.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import nullcontext

import pytest

from txnkv.core import Holding, IdSet
from txnkv.storage import CachedProperty, Environment, Store
from txnkv.storage.fork import GATE

InChild = Callable[[Callable[[], object]], int]


def put(environment: Environment, key: bytes, value: bytes = b"1") -> None:
    environment.write(lambda txn: txn.put(key, value, db=environment.db(b"blocks")))


def get(environment: Environment, key: bytes) -> bytes | None:
    with environment.read() as txn:
        value = txn.get(key, db=environment.db(b"blocks"))
        return None if value is None else bytes(value)


def insert(store: Store, *ids: int) -> None:
    for id_ in ids:
        with store.status.write() as cursor:
            cursor.execute("INSERT INTO t VALUES (?, 0)", (id_,))


def ids(store: Store) -> list[int]:
    with store.status.read() as cursor:
        return [row[0] for row in cursor.execute("SELECT id FROM t ORDER BY id")]


@pytest.fixture
def environment(store: Store) -> Environment:
    opened = store.environments.get("tablets/1")
    put(opened, b"before")
    insert(store, 1)
    assert ids(store) == [1]
    return opened


def test_parent_and_child_both_commit_and_nothing_is_lost(
    store: Store, environment: Environment
) -> None:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(reading, 1)
        for i in range(100, 150):
            insert(store, i)
            put(environment, b"child %d" % i)
        os._exit(0)
    os.write(writing, b"x")
    for i in range(200, 250):
        insert(store, i)
        put(environment, b"parent %d" % i)
    assert os.waitpid(pid, 0)[1] == 0
    assert ids(store) == [1, *range(100, 150), *range(200, 250)]
    assert all(get(environment, b"child %d" % i) for i in range(100, 150))
    assert all(get(environment, b"parent %d" % i) for i in range(200, 250))
    with store.status.read() as cursor:
        assert cursor.execute("PRAGMA integrity_check").get == "ok"
    os.close(reading)
    os.close(writing)


def test_child_that_does_nothing_harms_nothing(
    store: Store, environment: Environment, in_child: InChild
) -> None:
    with_exit = in_child(lambda: None)
    assert with_exit == 0
    insert(store, 2)
    assert ids(store) == [1, 2]


def test_child_that_ends_with_destructors_harms_nothing(store: Store, python) -> None:
    # A child that ends in the ordinary way runs destructors on all that it inherited.
    code = """
    store = Store.open(sys.argv[1])
    env = store.environments.get("tablets/1")
    env.write(lambda txn: txn.put(b"a", b"1", db=env.db(b"blocks")))
    with store.status.write() as cursor: cursor.execute("INSERT INTO t VALUES (5, 5)")
    if os.fork() == 0:
        sys.exit()
    assert os.wait()[1] == 0
    with store.status.write() as cursor: cursor.execute("INSERT INTO t VALUES (6, 6)")
    env.write(lambda txn: txn.put(b"b", b"1", db=env.db(b"blocks")))
    store.close()
    """
    python(code, store.directory.path).finish()
    assert ids(store) == [5, 6]


def test_readers_of_the_parent_keep_their_slots(
    store: Store, environment: Environment, in_child: InChild
) -> None:
    assert in_child(lambda: get(environment, b"before")) == 0
    with environment.read() as txn:
        assert environment._lmdb is not None
        assert str(os.getpid()) in environment._lmdb.env.readers()
        assert bytes(txn.get(b"before", db=environment.db(b"blocks"))) == b"1"


def test_everything_is_closed_before_the_fork(
    store: Store, environment: Environment, in_child: InChild
) -> None:
    def names() -> list[str]:
        folder = "/proc/self/fd"
        links = [os.path.join(folder, name) for name in os.listdir(folder)]
        return [os.readlink(link) for link in links if os.path.lexists(link)]

    def check() -> None:
        inherited = names()
        for name in ("status.db", "status.lock", "data.mdb", "lock.mdb"):
            assert not any(name in path for path in inherited), name

    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("needs /proc")
    assert any("data.mdb" in path for path in names())
    assert in_child(check) == 0


def test_parent_keeps_its_slot_and_the_child_takes_another(store: Store, in_child: InChild) -> None:
    own, start = store.runtime.owner

    def check() -> None:
        assert store.runtime.slot_alive(own, start)  # the parent's, seen from outside
        assert store.runtime.slot != own
        assert store.runtime.slot_owner(store.runtime.slot) == os.getpid()
        assert store.runtime.slot_owner(own) == os.getppid()

    assert in_child(check) == 0
    assert store.runtime.slot == own
    assert in_child(check) == 0  # the child's end did not drop the parent's lock


def test_child_has_no_pins_and_may_end_inherited_ones(store: Store, in_child: InChild) -> None:
    pin = store.runtime.hold_snapshot(7)

    def check() -> None:
        assert store.runtime.least_pin() == 7  # the parent's
        pin.end()
        assert store.runtime.least_pin() == 7
        own = store.runtime.hold_snapshot(3)
        assert store.runtime.least_pin() == own.snapshot == 3

    assert in_child(check) == 0
    assert store.runtime.least_pin() == 7  # the child's went with it
    pin.end()
    assert store.runtime.least_pin() is None


@pytest.mark.parametrize("inside", [False, True])
def test_what_a_child_drops_the_parent_goes_on_to_hold(
    inside: bool, store: Store, in_child: InChild
) -> None:
    runtime = store.runtime
    runtime.require_slot()
    held = [Holding(runtime.snapshots, IdSet())]
    held[0].pin(7)
    other = runtime.hold_snapshot(9)

    with GATE.use() if inside else nullcontext():  # inside of it the child may not use the store
        assert in_child(held.clear) == 0
    assert (len(held), runtime.least_pin()) == (1, 7)
    held.clear()
    assert runtime.least_pin() == 9
    other.end()


def test_what_other_threads_held_goes_in_a_child_before_it_knows(
    store: Store, in_child: InChild
) -> None:
    """Python drops what is local to threads that a child has not, and tells of the fork then."""
    local, there, end = threading.local(), threading.Event(), threading.Event()

    def hold() -> None:
        local.held = store.runtime.hold_snapshot(7)
        there.set()
        end.wait()
        del local.held

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    there.wait()
    assert in_child(lambda: None) == 0
    assert store.runtime.least_pin() == 7
    end.set()
    thread.join()
    assert store.runtime.least_pin() is None


def test_child_tells_and_hears_of_changes(store: Store, in_child: InChild) -> None:
    known = store.runtime.change_number()

    def check() -> None:
        assert store.runtime.change_number() == known
        insert(store, 9)
        assert store.runtime.change_number() != known

    assert in_child(check) == 0
    assert store.runtime.change_number() not in (None, known)


def test_grandchild(store: Store, environment: Environment, in_child: InChild) -> None:
    def child() -> None:
        insert(store, 2)
        assert in_child(lambda: (insert(store, 3), put(environment, b"grandchild"))) == 0
        insert(store, 4)

    assert in_child(child) == 0
    assert ids(store) == [1, 2, 3, 4]
    assert get(environment, b"grandchild") == b"1"


def test_store_can_be_opened_and_closed_in_the_child(
    store: Store, environment: Environment, in_child: InChild
) -> None:
    def check() -> None:
        with Store.open(store.directory.path) as again:
            assert again is store
            insert(again, 2)
        store.close()
        assert store.closed

    assert in_child(check) == 0
    assert not store.closed
    assert ids(store) == [1, 2]


def test_a_property_that_another_thread_computes(in_child: InChild) -> None:
    """It had a lock, of all objects, before Python 3.12: the child waited for ever."""
    inside, go_on = threading.Event(), threading.Event()

    class Slow:
        @CachedProperty
        def value(self) -> int:
            if threading.current_thread() is not threading.main_thread():
                inside.set()
                go_on.wait(60)
            return 1

    thread = threading.Thread(target=lambda: Slow().value)
    thread.start()
    assert inside.wait(60)
    try:
        assert in_child(lambda: Slow().value) == 0
    finally:
        go_on.set()
        thread.join()


# -- moments that are not quiet --------------------------------------------------------


def refused(use: Callable[[], object]) -> None:
    with pytest.raises(RuntimeError, match="forked"):
        use()


def test_child_of_a_fork_inside_an_operation_is_refused(
    store: Store, environment: Environment, in_child: InChild
) -> None:
    def check() -> None:
        refused(lambda: ids(store))
        refused(lambda: insert(store, 5))
        refused(lambda: get(environment, b"before"))
        refused(lambda: Store.open(store.directory.path))
        # And so is its child.
        assert in_child(lambda: refused(lambda: ids(store))) == 0

    with environment.read() as txn:
        assert in_child(check) == 0
        assert bytes(txn.get(b"before", db=environment.db(b"blocks"))) == b"1"
    with store.status.write() as cursor:
        cursor.execute("INSERT INTO t VALUES (2, 0)")
        assert in_child(check) == 0
    assert ids(store) == [1, 2]


def test_refused_child_neither_commits_nor_closes_what_it_was_inside_of(
    store: Store, python
) -> None:
    code = """
    store = Store.open(sys.argv[1])
    env = store.environments.get("tablets/1")
    env.write(lambda txn: txn.put(b"a", b"1", db=env.db(b"blocks")))
    parent = os.getpid()
    def fork():
        pid = os.fork()
        if pid: assert os.waitpid(pid, 0)[1] == 0
    def body(txn):
        txn.put(b"b", b"1", db=env.db(b"blocks"))
        with store.status.read() as other:
            other.execute("SELECT 1 FROM t").fetchall()
            fork()
    def in_lmdb():
        env.write(body)
    def in_sqlite():
        with store.status.write() as cursor:
            cursor.execute("INSERT INTO t VALUES (7, 7)")
            fork()
    for work in (in_lmdb, in_sqlite):
        try:
            work()
        except RuntimeError as error:
            if os.getpid() == parent: raise
            say("refused", "forked" in str(error))
            sys.exit()
    with env.read() as txn: say(bytes(txn.get(b"b", db=env.db(b"blocks"))).decode())
    with store.status.write() as cursor: cursor.execute("INSERT INTO t VALUES (8, 8)")
    """
    said = python(code, store.directory.path).finish()
    assert said == ["refused True", "refused True", "1"]
    assert ids(store) == [7, 8]


def test_fork_waits_for_operations_of_other_threads(store: Store, python) -> None:
    code = """
    import threading, warnings
    warnings.simplefilter("ignore")
    store = Store.open(sys.argv[1])
    inside, release = threading.Event(), threading.Event()
    def work():
        with store.status.write() as cursor:
            inside.set()
            release.wait(60)
            cursor.execute("INSERT INTO t VALUES (1, 1)")
    thread = threading.Thread(target=work)
    thread.start()
    inside.wait(60)
    def let_go():
        while GATE._joining.acquire(blocking=False): GATE._joining.release()
        release.set()
    threading.Thread(target=let_go).start()
    pid = os.fork()
    if pid == 0:
        with store.status.read() as cursor:
            say(cursor.execute("SELECT id FROM t").fetchall())
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    thread.join()
    """
    assert python(code, store.directory.path).finish() == ["[(1,)]"]


def test_fork_does_not_wait_for_ever(store: Store, python) -> None:
    code = """
    import threading, warnings
    from txnkv.storage import fork
    warnings.simplefilter("ignore")
    fork.QUIET_SECONDS = 0.05
    store = Store.open(sys.argv[1])
    inside, release = threading.Event(), threading.Event()
    def work():
        with store.status.write() as cursor:
            inside.set()
            release.wait(60)
            cursor.execute("INSERT INTO t VALUES (1, 1)")
    thread = threading.Thread(target=work)
    thread.start()
    inside.wait(60)
    pid = os.fork()
    if pid == 0:
        try: store.status.read().__enter__()
        except RuntimeError as error: say("refused", "spawn" in str(error))
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    release.set()
    thread.join()
    with store.status.read() as cursor: say(cursor.execute("SELECT id FROM t").fetchall())
    """
    assert python(code, store.directory.path).finish() == ["refused True", "[(1,)]"]


def test_subprocess_needs_no_quiet_moment(store: Store, environment: Environment, python) -> None:
    with environment.read() as txn:
        assert python("say('hello')").finish() == ["hello"]
        assert bytes(txn.get(b"before", db=environment.db(b"blocks"))) == b"1"
    assert not GATE.refused


def test_threads_work_through_many_forks(store: Store, python) -> None:
    code = """
    import threading, warnings
    warnings.simplefilter("ignore")
    store = Store.open(sys.argv[1])
    env = store.environments.get("tablets/1")
    stop, counts = threading.Event(), [0, 0]
    def commit():
        while not stop.is_set():
            with store.status.write() as cursor:
                cursor.execute("INSERT INTO t VALUES (?, 0)", (counts[0],))
            counts[0] += 1
    def put():
        while not stop.is_set():
            env.write(lambda txn: txn.put(b"%d" % counts[1], b"", db=env.db(b"blocks")))
            counts[1] += 1
    threads = [threading.Thread(target=commit), threading.Thread(target=put)]
    for thread in threads: thread.start()
    for i in range(15):
        pid = os.fork()
        if pid == 0:
            with store.status.write() as cursor:
                cursor.execute("INSERT INTO t VALUES (?, 1)", (10**6 + i,))
            env.write(lambda txn: txn.put(b"child %d" % i, b"", db=env.db(b"children")))
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
    stop.set()
    for thread in threads: thread.join()
    with store.status.read() as cursor:
        say(cursor.execute("SELECT count(*) FROM t WHERE value = 0").get == counts[0])
        say(cursor.execute("SELECT count(*) FROM t WHERE value = 1").get)
    with env.read() as txn:
        say(txn.stat(env.db(b"blocks"))["entries"] == counts[1])
        say(txn.stat(env.db(b"children"))["entries"])
    """
    assert python(code, store.directory.path).finish() == ["True", "15", "True", "15"]


def test_member_that_cannot_close_makes_the_child_refuse(store: Store, python) -> None:
    code = """
    store = Store.open(sys.argv[1])
    store.status._readers.close = None
    pid = os.fork()
    if pid == 0:
        try: store.runtime.require_slot()
        except RuntimeError as error: say("refused", "could not close" in str(error))
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    """
    assert python(code, store.directory.path).finish() == ["refused True"]
