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
    "remote": 2_823, "server": 1_649,
    "topics": 13_152, "tables": 11_325, "storage": 5_402, "cli": 5_771, "coordinator": 3_492,
    "transaction": 4_150, "core": 3_672, "spark": 2_576, "client": 4_661, "aio": 985,
}  # fmt: skip
"""Lines with code of each room, at most. A commit that raises one says why in its message."""


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
    told("modules", list(modules()), 265)
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

    def read_and_write() -> None:
        with client.transaction() as txn:
            for number in range(50):
                txn.upsert(table, (number, (txn.get(table, number) or {"v": ""})["v"]))

    told("Python calls of fifty rows that are read and written", calls(read_and_write), 200)
    key = table.schema.primary_key[0]
    other = next(name for name in table.schema.columns if name != key)
    found, chosen = (
        calls(lambda where=where: list(table.scan(where=where)))
        for where in ([(key, "=", 7)], [(key, "=", 7), (other, "=", "text")])
    )
    told("Python calls of a scan by key", found, 41)
    told("Python calls of a scan by key and another column", chosen, 52)


def test_python_calls_of_messages(client: txnkv.Client, table: txnkv.Table) -> None:
    """Of one of a hundred that a transaction takes, counts and passes on."""
    topics = [client.create_topic(name, partitions=1) for name in ("in", "out")]
    client.run(lambda txn: [txn.send(topics[0], b"value", key=b"key") for _ in range(2000)])
    source = topics[0].subscribe("s")

    def pass_on() -> None:
        with client.transaction() as txn:
            messages = source.receive_many(100, timeout=0)
            for message in messages:
                txn.upsert(table, (message.offset, "text"))
                txn.send(topics[1], message.value)
            txn.ack(source, messages)

    pass_on()
    made = calls(pass_on)
    told("Python calls of a hundred messages that are passed on", made, 730)

    def one_by_one() -> None:
        with client.transaction() as txn:
            for _ in range(100):
                message = source.receive(timeout=0)
                assert message is not None
                txn.ack(source, message)

    one_by_one()
    told("Python calls of a hundred messages, one by one", calls(one_by_one), 540)


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
