"""Numbers of the house that may fall and not rise; each test prints its number and the places."""

from __future__ import annotations

import ast
import re
import sys
import threading
import tokenize
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from types import FrameType

import txnkv
from tests import internals

TESTS = Path(__file__).resolve().parent
PACKAGE = TESTS.parent / "txnkv"

FUNCTION_LINES = 70
FILE_LINES = 600
AVOIDED = re.compile(r"(What|Who|Whose|Where|Whether|How|Of|As)\b")


@cache
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def modules() -> dict[str, ast.Module]:
    """By dotted name."""
    found = {}
    for path, tree in trees().items():
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = tree
    return found


def imports(tree: ast.Module, *, types_only: bool = False) -> Iterator[tuple[str, int]]:
    """Own modules that a module imports, inside of functions and for types alone too, and lines."""
    guarded: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            guarded |= {each for child in node.body for each in ast.walk(child)}
    for node in ast.walk(tree):
        if types_only and node not in guarded:
            continue
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("txnkv"):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield (inner if inner in modules() else node.module), node.lineno
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name in modules():
                    yield alias.name, node.lineno


def told(what: str, places: list[str], most: int) -> None:
    """Print the number and the places; fail when there are more than today."""
    print(f"{what}: {len(places)}, at most {most}", *places, sep="\n  ")
    assert len(places) <= most, f"{what}: {len(places)}, at most {most}:\n" + "\n".join(places)


def test_functions_fit_on_a_screen() -> None:
    places = [
        f"{name}:{node.lineno} {node.name}: {length} lines"
        for name, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or 0) - node.lineno + 1) > FUNCTION_LINES
    ]
    told(f"functions of more than {FUNCTION_LINES} lines", places, 0)


def test_files_fit_in_the_head() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py")}
    places = [f"{path.relative_to(PACKAGE)}: {n}" for path, n in lengths.items() if n > FILE_LINES]
    told(f"files of more than {FILE_LINES} lines", places, 0)


def test_files_of_tests_fit_in_the_head() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in TESTS.rglob("*.py")}
    places = [f"{path.relative_to(TESTS)}: {n}" for path, n in lengths.items() if n > FILE_LINES]
    told(f"test files of more than {FILE_LINES} lines", places, 0)


CODE_LINES = {
    "remote": 2_398, "server": 1_495,
    "topics": 12_374, "tables": 9_750, "storage": 4_562, "cli": 5_084, "coordinator": 3_238,
    "transaction": 3_526, "core": 3_451, "spark": 2_291, "client": 4_260, "aio": 607,
}  # fmt: skip
"""Lines with code of each room, at most. A feature raises its room's number and says why here.

core, topics: the last message of each key; batches with gaps. coordinator: slow sweeps.
server: free memory that goes back to the system.
aio: a twin of Table.dataset. cli: commands for rows, a small language of conditions, top, ui.
coordinator: numbers told to who watches. client: tables as datasets of Arrow, handles in notebooks,
the short way of a get. core, cli, spark, topics: JSON, structs, maps, times,
durations and UUIDs. core: light blocks. coordinator, storage: the epoch of what gets remember.
cli: values in JSON as they are written. topics: the rest of a transaction, in order of commits.
client, topics, transaction: what was dropped, and what is no time, or of another store,
refused; handles that drop no namesake (tables, too). coordinator: no end. core, tables, topics:
what no reader takes, refused in Arrow data. tables: rows one after the other by unique indexes.
client, core, tables, topics: arguments of a wrong type, and times that Python has not, named.
client, core, spark, tables, topics, transaction: zones that are looked up, dumps that say what they
lack, history that is raised. topics: what came back is no part of a cumulative ack.
tables: what numpy and polars have.
server: columns by their numbers. spark: keys as tables have them.
client: numbers of producers that are given once.
coordinator, storage, tables, topics: a status.db that lacks what was durable. client, topics,
transaction: arguments that are no numbers, named.
cli, client, topics: a server, the attempts of its clients, messages for other hosts.
storage: the usual way of a writer through its queue is written out in one function.
core, transaction: single calls go straight to the rows in C. coordinator, storage: a commit beside
which there is no other, by one statement of SQLite.
coordinator, transaction: the course of a small transaction is written out, with fewer steps.
cli, client, topics: tables and topics that change, are renamed, reverted, truncated.
coordinator: the error of a schema that changed.
cli, topics: Kafka's clients: producers that number their messages, sends with offsets, deletion.
topics: a fetch in the calling thread. core: the first rows of a range of keys.
topics, transaction: transactions of Kafka's clients that go on over servers.
client, topics: plans of reads, from spark, for stores on other hosts. cli, transaction: addresses.
transaction: the begin with an id that a client on another host was given before; two threads that
forget the last transaction that is gone.
aio, cli, client, storage, tables: indexes; the feature of a store that has them.
client, coordinator, core, storage, transaction: brief calls, in the main thread.
coordinator, storage: commits where no thread is to be had, or in the background; syncs and calls
beside those that fail.
cli, client, topics: dumps, which are plain files, and stores made of them.
core, tables: what a transaction holds, in C, and its conflicts with memory.
client, storage: backups in other file systems.
cli, tables, transaction: rows whose time is over.
aio, tables: rows by an index for transactions and snapshots, which the client's room had for tables
alone; a serializable reader by an index that is dropped.
cli, client, coordinator, storage, topics, transaction: partitions that are added to topics,
transactions that have a name, groups of Kafka's clients, a store that no process of an earlier
format has open.
coordinator, core, storage: room of LMDB files that goes back to the disk, with a reader of their
lists of free pages, which LMDB shows to nobody.
cli, client, topics: messages for later. client, storage, topics: key_shared subscriptions.
core: batches cut, gathered and joined, which five rooms did each for itself.
cli: topics of Kafka's clients that are made by being asked for, signals that come in any thread.
storage: memory of forked children.
remote: patience with a server that is busy; streams of changes; snapshots that were closed;
answers that are read to their end.
topics, transaction: acks whose commit failed.
cli: a page that draws ends of transactions, repairs, and keeps its samples.
cli, client, core, topics: topics that keep the last message of each key; segments as options.
transaction: which stores are open. cli: JSON of texts that need no escapes, in fewer passes.
coordinator, tables: a history without an end.
aio, server, tables, transaction: scans of a few rows as dicts, by key or index, without a plan.
coordinator: long work ends when the store is closed.
cli: output into pipes; the end of servers and queries by signals; typed messages by columns;
queries that name nothing there.
coordinator, transaction: a clock that commits of the log do not write.
cli, client: topics that are truncated behind an offset.
cli, client, core, remote, spark, storage, topics, transaction: values whose schema changed.
cli, storage, topics: subscriptions in the order of commits, and of what is not decided.
aio, cli, tables: histories of tables.
core, transaction: single rows of all operations without a session, and in one call of C.
remote, server: small transactions in shorter messages, rights that are remembered.
core: messages between hosts in C; rows as lines of JSON in C, which cli wrote with Arrow's kernels.
tables, topics: evolve sets defaults, and is an option of topics.
aio, cli, client, tables: members of groups, which share the partitions of a topic.
topics: several batches of a producer in one commit; waits that a commit here ends.
topics: large batches of producers that number their messages go straight into logs.
client, coordinator: transactions that begin under a name, with their participants, by one sync.
core, storage: writes of the status database with the functions of SQLite.
aio, client, remote, storage: who lost to others goes before them.
coordinator: looks that read nothing.
tables: single rows of several kinds by turns; the first columns of a key as bytes, in C.
topics: reads of partitions of which all is in memory. client: positions that go with their topic.
server: users of long connections whose entry was changed. cli: what is no decimal number.
remote, transaction: the first message of a transaction, and acks, without a session.
server: topics of dead letters, by who may send there. client: partitions that are added to groups
that began at the latest, members that are dropped. aio, client: outcomes of others in `run`.
remote, server, topics: producers that go on when their server was started again, or are fenced.
client, remote, server, topics: consumers that go on there where they were, also within
a transaction, or were before a poll; subscriptions that go on if they are there.
client: backups that a store knows, and others that are no base; parts that are dropped beside a
check. client, storage, topics: files that are gone with their store are no damage.
coordinator, tables: indexes that go with rows that are given up, named.
tables: changes of columns that are no mappings. client, storage: a backup beside one whose list
is damaged.
aio: ends beside waits. client, coordinator, tables: parts that others drop under long work.
cli: values out of range; CSV of times that Arrow's texts have not.
client, storage, topics: files that are told as damaged, another's, or opened again.
cli, remote, server: commands at an address; rights whatever names a table; users' files of
another shape. aio: transactions that are joined. topics: what compact has retention take.
core: keys that a block and a list have in common, in one call. transaction: tokens of what is
written. tables: rows and columns of scans that are wanted alone. cli, client, remote: certificates,
keys and tables of groups that are none, named; servers that are not trusted. remote: what was
dropped while the server was away. storage, tables: a floor that rises in a turn to write.
coordinator, spark, topics, transaction: jobs that were told as failed; what row errors of a
task come to; options with bounds, offsets that are there. server: what waits beside what is gone.
"""


def test_lines_of_code() -> None:
    """Lines without docstrings, comments and blank ones, by room."""
    rooms: Counter[str] = Counter()
    for path in sorted(PACKAGE.rglob("*.py")):
        rooms[path.relative_to(PACKAGE).parts[0]] += lines_of_code(path)
    print(f"lines of code: {rooms.total():,}", *rooms.most_common(), sep="\n  ")
    places = [
        f"{room}: {rooms[room]:,} lines, at most {most:,}"
        for room, most in CODE_LINES.items()
        if rooms[room] > most
    ]
    told("rooms that grew", places, 0)


def lines_of_code(path: Path) -> int:
    said = set()
    for node in ast.walk(trees()[path]):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                said |= set(range(first.lineno, (first.end_lineno or 0) + 1))
    code: set[int] = set()
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type not in NO_CODE:
                code |= set(range(token.start[0], token.end[0] + 1))
    return len(code - said)


NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENCODING, tokenize.ENDMARKER,
}  # fmt: skip


def test_docstrings_name_their_thing() -> None:
    places = []
    for name, tree in modules().items():
        for node in ast.walk(tree):
            body = getattr(node, "body", None)
            for child in body if isinstance(body, list) else ():
                if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                    text = child.value.value
                    if isinstance(text, str) and AVOIDED.match(text.strip()):
                        places.append(f"{name}:{child.lineno} {text.strip().splitlines()[0]}")
    told("docstrings that begin with What, Who, ...", places, 0)


def test_no_circles_of_imports() -> None:
    """Strongly connected components of the modules, imports for types alone counted."""
    graph = {
        name: {to for to, _ in imports(tree) if to in modules()} - {name}
        for name, tree in modules().items()
    }
    places = [f"{len(one)} modules: {', '.join(sorted(one))}" for one in circles(graph)]
    told("circles of imports", places, 0)


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Return the components of more than one module (Tarjan, 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[set[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for to in graph[name]:
            if to not in index:
                visit(to)
            if to in stack:
                low[name] = min(low[name], low[to])
        if low[name] == index[name]:
            one = set()
            while name not in one:
                one.add(stack.pop())
            if len(one) > 1:
                found.append(one)

    for name in graph:
        if name not in index:
            visit(name)
    return found


def test_front_doors() -> None:
    """Imports from a room that its `__init__` does not export, or by a way past the outer door."""
    rooms = {name for name in modules() if (PACKAGE.parent / name.replace(".", "/")).is_dir()}
    rooms -= {"txnkv"}
    exported = {room: exports(modules()[room]) for room in rooms}
    places = []
    for name, tree in modules().items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom) or not node.module:
                continue
            inside = name if name in rooms else name.rpartition(".")[0]
            parts = node.module.split(".")
            passed = {".".join(parts[: n + 1]) for n in range(len(parts))} & rooms
            passed = {room for room in passed if not f"{inside}.".startswith(f"{room}.")}
            if not passed:
                continue
            names = {alias.name for alias in node.names}
            if node.module != min(passed) or not names <= exported[node.module]:
                places.append(f"{name}:{node.lineno} {node.module}: {', '.join(sorted(names))}")
    told("imports past a front door", places, 0)


def exports(tree: ast.Module) -> set[str]:
    """Return what a front door lets out: its `__all__`, or else all that it imports."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    return {
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def test_type_only_imports() -> None:
    places = [
        f"{name}:{line} {to}"
        for name, tree in modules().items()
        for to, line in imports(tree, types_only=True)
    ]
    told("imports of own modules for types alone", places, 4)


def test_few_modules() -> None:
    # 15 of them are `remote`, `server`, and what they need of client and cli; 14 are `kafka`, with
    # its binding in core; one is `testing`, one `otel`; four are of indexes: what one is, its
    # entries of many rows, its building, and the way into a store, which client.py had no more
    # room for; one is `ui`; one is of key_shared subscriptions; two are of key compaction: of a
    # topic, and of a piece of a log; one puts backups into other file systems; two are of groups:
    # their members, and how these share a topic; `group` has a module of its own, beside `topics`;
    # one has the histories of tables. 23 fewer than before, since what tells one thing was joined:
    # keys and their orders, values and rows as text, what a log gives up, messages and their
    # batches, row sets, both ways to commit, SQLite and its WAL, calls and their bytes, Spark's
    # reading and writing, messages in and out, and the like.
    told("modules", list(modules()), 262)
    top = [name for name in modules() if name.count(".") == 1]
    told("names at the top of txnkv", top, 19)  # with remote, server, kafka, testing, otel


def test_a_name_means_one_thing() -> None:
    files = [n for n in modules() if not (PACKAGE.parent / n.replace(".", "/")).is_dir()]
    basenames = Counter(name.rsplit(".", 1)[-1] for name in files)
    places = [f"{name}: {count} modules" for name, count in basenames.items() if count > 1]
    told("basenames of several modules", places, 0)
    classes = defaultdict(list)
    for name, tree in modules().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes[node.name].append(name)
    places = [f"{name}: {', '.join(where)}" for name, where in classes.items() if len(where) > 1]
    told("public classes of one name", places, 0)


def test_python_calls_of_one_row(client: txnkv.Client, table: txnkv.Table) -> None:
    """In a thread of its own, where no handler of a signal can come between."""

    def write(number: int) -> None:
        with client.transaction() as txn:
            txn.upsert(table, (number, "text"))

    for number in range(50):
        write(number)
    internals.flush(client)
    for number in range(50):
        table.get(number)
    get, written = (calls(partial(do, 7)) for do in (table.get, write))
    told("Python calls of a get of a row on disk", get, 2)
    told("Python calls of a transaction of one row", written, 70)


def calls(do: Callable[[], object]) -> list[str]:
    """Return the Python functions that a call enters, the least of a few tries."""
    tries: list[list[str]] = []

    def count() -> None:
        for _ in range(5):
            found: list[str] = []
            tries.append(found)

            def note(frame: FrameType, event: str, _: object, to: list[str] = found) -> None:
                if event == "call":
                    to.append(f"{frame.f_code.co_filename}:{frame.f_code.co_qualname}")

            sys.setprofile(note)
            try:
                do()
            finally:
                sys.setprofile(None)

    thread = threading.Thread(target=count)
    thread.start()
    thread.join()
    return min(tries, key=len)
