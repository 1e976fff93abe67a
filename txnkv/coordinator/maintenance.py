"""The background work of a store, done by whichever process holds the lease.

    lead      the lease, aborting what nobody keeps alive, forgetting what ended long ago,
              checkpoints: status.db alone. A thread in each process that has the store open to
              write, whether it writes or not; in all others it gives up what was removed
    resume    bringing to their end what was aborted there and what dead processes left
    sweep     the work of the layers above: flush, end markers, removal of what was dropped. What
              takes long is a sweep of its own, on a thread of its own
    publish   this process's numbers, for who watches the store: see `watch`

The leader's round begins the others on threads of their own, which are there only while they
work: a flush of a minute, or a log that does not answer, holds up neither the lease nor expiry.
None of them waits for a lock that a stopped process may hold (`not_waiting`). All stop with close,
and a forked child begins without them until it opens or writes.
"""

from __future__ import annotations

import json
import logging
import math
import os
import secrets
import threading
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, Final

from txnkv.coordinator import liveness, status_table
from txnkv.coordinator.ids import MAX_JUMP, Timestamp, aging_micros, dead_ranges, drop_ranges
from txnkv.coordinator.liveness import Lease, LeaseLostError
from txnkv.coordinator.orchestration import Orchestrator
from txnkv.coordinator.status_table import TxnRow, TxnState
from txnkv.errors import ClosedError, StoreNotFoundError, TxnkvError
from txnkv.metrics import Metrics
from txnkv.storage import (
    BusyError,
    Store,
    clock,
    make_private_file,
    new_event,
    new_lock,
    not_waiting,
    shielded,
)

_log = logging.getLogger("txnkv")

TAKE_OVER_AFTER: Final = 5 * 1_000_000
_CHECKPOINT_EVERY: Final = 10 * 1_000_000
LOOK_EVERY: Final = 5 * 1_000_000
"""Microseconds, at least, until what others removed is looked for again."""
_LOOK_ANYWAY: Final = 60 * 1_000_000
_TRY_AGAIN: Final = 10 * 1_000_000
"""Microseconds until a transaction that cannot be brought to its end is tried again."""
_TOLD_AGAIN: Final = 60 * 1_000_000
"""Microseconds until an error that stays is told again."""

_ENDED_KEPT: Final = 24 * 3600.0
"""Seconds for which ended transactions are remembered where the history is unlimited."""

Sweep = Callable[[Lease], None]


class _Led(Enum):
    """The outcome of a leader's round."""

    BY_ANOTHER = "another process leads"
    IDLE = "there is nothing to do"
    BUSY = "there may be something to do"


class _Beside:
    """Work on a thread of its own, which is there only while it works."""

    def __init__(self, name: str, work: Callable[[], object]) -> None:
        self._name = name
        self._work = work
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Do it, unless it is being done."""
        if self._thread is not None and self._thread.is_alive():
            return
        thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        with suppress(RuntimeError):  # no thread is to be had: the next round tries again
            thread.start()
            self._thread = thread  # not before: who closes joins it

    def join(self) -> None:
        """Wait for its end."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=30)

    def forget_thread(self) -> None:
        """In a forked child: it is the parent's."""
        self._thread = None

    def _run(self) -> None:
        try:
            self._work()
        except (ClosedError, LeaseLostError, StoreNotFoundError):
            pass  # the leader's thread finds the same
        except Exception:
            _log.exception("background work failed, it will be tried again")


class _Published:
    """The file in which a process tells its numbers while somebody watches the store.

    A watcher touches `watched` now and then. Whoever finds that it was touched since its last round
    writes `metrics-PID-NAME`, of a name that was drawn: processes of several containers may have
    one PID. When nobody watches, that is a look at the times of a file each round.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._name = secrets.token_hex(8)
        self._seen: int | None = None
        self._told = False

    @property
    def _file(self) -> Path:
        return self._folder / f"{_NUMBERS}{os.getpid()}-{self._name}"

    def round(self, metrics: Metrics) -> None:
        """Tell the numbers, if somebody watches."""
        with suppress(OSError):  # a full disk, or no folder any more: others say so
            touched = (self._folder / _WATCHED).stat().st_mtime_ns
            if touched == self._seen:
                return
            self._seen, self._told = touched, True
            part = self._folder / f"{_PART}{os.getpid()}-{self._name}"
            make_private_file(part)
            part.write_text(json.dumps(metrics.snapshot()))
            part.replace(self._file)

    def withdraw(self) -> None:
        """Take the file away."""
        if self._told:
            with suppress(OSError):
                self._file.unlink(missing_ok=True)


_WATCHED: Final = "watched"
_NUMBERS: Final = "metrics-"
_PART: Final = "part-"
_FRESH: Final = 10 * 1_000_000_000
"""Nanoseconds for which a process that says nothing is taken for one that lives."""


def watch(folder: Path) -> dict[tuple[int, str], dict[str, Any]]:
    """Ask all processes that write to a store for their numbers, and return the last ones.

    Args:
        folder: `runtime` of the store.

    Returns:
        `Metrics` by process id and name; those of a process come a second after the first call.
    """
    found = {}
    with suppress(OSError):  # of a store that cannot be written to
        make_private_file(folder / _WATCHED)
        (folder / _WATCHED).touch()
        now = (folder / _WATCHED).stat().st_mtime_ns
        for file in (*folder.glob(f"{_NUMBERS}*"), *folder.glob(f"{_PART}*")):
            with suppress(OSError, ValueError):  # of which parts have no number
                if now - file.stat().st_mtime_ns > _FRESH:
                    file.unlink()
                else:
                    pid, _, name = file.name.removeprefix(_NUMBERS).partition("-")
                    found[int(pid), name] = json.loads(file.read_text())
    return found


class Maintenance:
    """Background work of one store in this process.

    Attributes:
        metrics: told to who watches the store.

    Args:
        store: the store.
        orchestrator: drives transactions.
        history: seconds for which the status rows of ended transactions are kept.
        poll: seconds between two rounds.
    """

    def __init__(
        self, store: Store, orchestrator: Orchestrator, history: float, poll: float = 1.0
    ) -> None:
        self.lease = Lease(store)
        self.metrics: Metrics | None = None
        self._store = store
        self._orchestrator = orchestrator
        self._history = history
        self._poll = poll
        self._sweeps: list[Sweep] = []
        self._slow: list[Sweep] = []
        self._looks: list[Callable[[], object]] = [store.environments.close_gone]
        self._published = _Published(store.directory.runtime_path)
        self._looked: int | None = None
        self._looked_at = 0
        self._stop = new_event()
        self._start_lock = new_lock()
        self._thread: threading.Thread | None = None
        self._damage = orchestrator.damage
        self._again: dict[int, int] = {}
        self._begun: set[int] = set()
        self._beside = [
            _Beside("txnkv-resume", self._resume),
            _Beside("txnkv-sweep", self._sweep),
        ]
        self._checkpointed = self._checked = 0
        self._swept: int | None = None
        self._quiet: int | None = None
        self._quiet_since = 0
        self._refused = False

    def add_sweep(self, sweep: Sweep, *, beside: str | None = None) -> None:
        """Add work of a layer above; called in each round of the leader.

        Args:
            sweep: the work.
            beside: of what takes long, the name of its own thread: the others do not wait for it.
        """
        if beside is None:
            self._sweeps.append(sweep)
            return
        self._slow.append(sweep)
        self._beside.append(_Beside(beside, partial(self._sweep_slowly, sweep)))

    def add_look(self, look: Callable[[], object]) -> None:
        """Add what every process does now and then when something changed: giving up what others
        removed. Short, and without a write.
        """
        self._looks.append(look)

    def start(self) -> None:
        """Start the thread, unless it runs."""
        if self._thread is not None:
            return
        with self._start_lock:
            if self._stop.is_set() or self._thread is not None:
                return
            thread = threading.Thread(target=self._run, name="txnkv-maintenance", daemon=True)
            with suppress(RuntimeError):  # no thread is to be had: the next commit tries again
                thread.start()
                self._thread = thread

    def set_pace(self, seconds: float) -> None:
        """Look at least this often."""
        self._poll = min(self._poll, max(seconds, 0.02))

    def require_running(self) -> None:
        """End long work when the store is closed.

        Raises:
            ClosedError: it is.
        """
        if self._stop.is_set():
            raise ClosedError("the store was closed meanwhile: what was done until then is done")

    def close(self) -> None:
        self._stop.set()
        thread = self._thread
        if thread is not None and thread.is_alive() and thread is not threading.current_thread():
            thread.join(timeout=30)
        for beside in self._beside:
            beside.join()
        self._published.withdraw()
        self.lease.release()

    def forget_thread(self) -> None:
        """In a forked child: the thread and the lease belong to the parent."""
        self._thread = None
        for beside in self._beside:
            beside.forget_thread()
        self._stop = new_event()
        self._published = _Published(self._store.directory.runtime_path)
        self.lease = Lease(self._store)

    @shielded
    def round(self, *, resume_all: bool = False) -> bool:
        """One round of the leader's work, all of it in this thread.

        Args:
            resume_all: take over every transaction in a middle state at once, also those
                that a live process may still be driving.

        Returns:
            False when another process leads.

        Raises:
            StoreNotFoundError: the store was removed or replaced; nothing is written any more.
        """
        led = self._lead(resume_all)
        try:
            if led is _Led.BUSY:
                self._resume(resume_all)
                self._sweep()
                for slow in self._slow:
                    self._sweep_slowly(slow)
        except LeaseLostError:
            return False
        return led is not _Led.BY_ANOTHER

    def _lead(self, whatever: bool = False) -> _Led:
        """Do a leader's work in status.db; `whatever`: all of it, also for a store that is idle."""
        self._store.require_there()
        self._store.extents.record_rest()
        if self._nothing_to_do() and not whatever and self.lease.beat():
            return _Led.IDLE
        number = self._store.runtime.change_number()
        with not_waiting():
            if not self.lease.acquire():
                return _Led.BY_ANOTHER
            try:
                self._each("expired transactions", self._expire)
                self._each("ended transactions", self._forget)
            except LeaseLostError:
                return _Led.BY_ANOTHER
            now = clock.monotonic_micros()
            with self._store.status.read() as cur:
                live = bool(status_table.live(cur))
            self._quiet = None if live or self._swept != number else number
            self._quiet_since = now
            if now - self._checkpointed > _CHECKPOINT_EVERY:
                self._checkpointed = now
                self._store.status.checkpoint(cut=False)
        return _Led.BUSY

    def look(self) -> None:
        """Give up what others removed; once in a while, if anything changed."""
        number, now = self._store.runtime.change_number(), clock.monotonic_micros()
        if (number is not None and number == self._looked) or now - self._looked_at < LOOK_EVERY:
            return
        with not_waiting():
            for look in self._looks:
                self._each(look.__qualname__, look)
        self._looked, self._looked_at = number, now

    def _sweep(self) -> None:
        number = self._store.runtime.change_number()
        with not_waiting():
            for sweep in self._sweeps:
                if self._stop.is_set():
                    return
                self._each(sweep.__qualname__, partial(sweep, self.lease))
            now = clock.monotonic_micros()
            if now - self._checked > _CHECKPOINT_EVERY:
                self._checked = now
                # A reader that was killed would keep LMDB from using pages again, for ever.
                self._store.environments.reader_check()
                self._store.environments.give_room_back()
        self._swept = number

    @not_waiting()
    def _sweep_slowly(self, sweep: Sweep) -> None:
        self._each(sweep.__qualname__, partial(sweep, self.lease))

    def _each(self, sweep: str, do: Callable[[], object]) -> None:
        """One sweep; the others go on when it fails."""
        with self._damage.guard("background work", sweep):
            try:
                do()
            except TxnkvError:
                self._store.require_there()  # what fails for the store is gone is no damage
                raise

    def _expire(self) -> None:
        self._begun.update(liveness.abort_expired(self._store, self._orchestrator, self.lease))

    def _nothing_to_do(self) -> bool:
        """An idle store costs no I/O: nothing changed since a round that found no transaction
        that has not ended.
        """
        number = self._store.runtime.change_number()
        if number is None or number != self._quiet or self._store.status.wal_is_long():
            return False
        return clock.monotonic_micros() - self._quiet_since < _LOOK_ANYWAY

    def _run(self) -> None:
        stop, told, again = self._stop, "", 0
        while not stop.wait(self._poll):
            try:
                self.look()
                if self.metrics is not None:
                    self._published.round(self.metrics)
                if not self._store.directory.read_only and self._lead() is _Led.BUSY:
                    for beside in self._beside:
                        beside.begin()
                told = ""
            except ClosedError:
                return
            except StoreNotFoundError as error:
                _log.error("background work ends: %s", error)
                stop.set()
            except TxnkvError as error:
                now = clock.monotonic_micros()
                if str(error) != told or now >= again:
                    _log.warning("background work failed, it will be tried again: %s", error)
                    told, again = str(error), now + _TOLD_AGAIN
            except Exception:
                _log.exception("background work failed, it will be tried again")

    @not_waiting()
    def _resume(self, resume_all: bool = False) -> None:
        begun = set(self._begun)
        with self._store.status.read() as cur:
            rows = [row for row in status_table.live(cur) if row.state is not TxnState.OPEN]
        left = {row.txn_id for row in rows}
        self._begun -= begun - left
        for txn_id in self._again.keys() - left:
            self._damage.clear(f"transaction {txn_id}")
            del self._again[txn_id]
        for row in rows:
            if self._stop.is_set():
                return
            if not (resume_all or row.txn_id in self._begun or self._abandoned(row)):
                continue
            name, now = f"transaction {row.txn_id}", clock.monotonic_micros()
            if not resume_all and now < self._again.get(row.txn_id, 0):
                continue
            with self._damage.guard(name, "resuming it") as resuming:
                with self._store.status.write() as cur:
                    self.lease.confirm(cur)
                ended = self._orchestrator.finish(row.txn_id)
                _log.info("resumed transaction %d: %s", row.txn_id, ended.describe_state())
            if resuming.error is not None and not isinstance(resuming.error, BusyError):
                self._again[row.txn_id] = now + _TRY_AGAIN

    def _abandoned(self, row: TxnRow) -> bool:
        runtime = self._store.runtime
        if not runtime.slot_alive(row.owner_slot, row.owner_start):
            return True
        if row.isolation == "serializable" and row.state is TxnState.COMMIT_IN_PROGRESS:
            # What it has read its own process alone knows: any other would have to abort it.
            return (row.owner_slot, row.owner_start) == runtime.owner
        return clock.now_micros() - row.last_update_ts.micros > TAKE_OVER_AFTER

    def _forget(self) -> None:
        """Collect the rows of transactions that ended before the history began."""
        kept = _ENDED_KEPT if self._history == math.inf else self._history
        with self._store.status.read() as cur:
            now = aging_micros(cur)
        self._tell_clock(clock.now_micros() - now)
        pin = self._store.runtime.least_pin()
        before = Timestamp.from_micros(max(now - int(kept * 1e6), 0))
        if pin is not None:
            before = min(before, Timestamp(pin))
        with self._store.status.read() as cur:
            found = cur.execute(
                "SELECT 1 FROM transactions WHERE state IN (2, 4) AND last_update_ts < ? LIMIT 1",
                (before,),
            ).fetchone()
            dead = dead_ranges(cur, self._store)
        if found is None and not dead:
            return
        with self._store.status.write() as cur:
            self.lease.confirm(cur)
            cur.execute(
                "DELETE FROM transactions WHERE state IN (2, 4) AND last_update_ts < ?", (before,)
            )
            drop_ranges(cur, dead)

    def _tell_clock(self, ahead: int) -> None:
        """Say once that the clock is refused."""
        before, self._refused = self._refused, ahead > MAX_JUMP
        if self._refused and not before:
            _log.warning(
                "this machine's clock is %.0f days ahead of the store's last timestamp: nothing is "
                "removed for its age until it is set right. If it is right, and the store was not "
                "used for so long, run `txnkv repair STORE --clock` once",
                ahead / 86_400e6,
            )
