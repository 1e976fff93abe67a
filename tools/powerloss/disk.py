"""The states that a disk may be in when the power goes: the model, computed from the log of a run.

Files and folders are followed by inode, so that renames carry content along. Of each edit of a
file and each change of a folder is known when it began, when its call returned, and from when on
it is *durable*, that is: which sync that began after its return was the first to end.

    edit      |----|                       sync  |-----|
              begin end                    begin       end = the edit is durable

Content. An fsync or fdatasync of a file makes its edits durable, and its length. A write through
a descriptor with O_DSYNC or O_SYNC is durable when it returns. Of what is not durable anything
may be there: the page cache writes pages in any order, each as it was after any of the writes to
it, and the disk writes sectors of a page in any order. What never happens: a sector half written,
or a write to a page without the earlier writes to the same sector. LMDB's meta page (under 200
bytes within one sector) counts on that, as does everybody else. A truncation is there as a whole
or not at all, and what was written after it only if it is: the new blocks hang on the metadata.

Names. Two models, for file systems differ:

`strict`   A new, changed or removed name is durable when its folder was synced, and not before;
           the other names may be as after any of the changes to them, each for itself. That is
           what POSIX lets a file system do, and what f2fs, btrfs and ext4 without a journal do.
           A rename is atomic; from one folder to another, the sync of the latter counts.
`ordered`  ext4 with its defaults, and XFS: changes of names go through one journal in order, and
           a sync commits all of it if it finds anything to commit for its file (a new file, a
           new length; for fsync any write). What is there is a prefix of the changes.

A store that is right under `strict` is right under both, for each state of `ordered` is one of
`strict`, but for more things being durable. `ordered` tells how much a fault matters.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Final, Literal

from tools.powerloss.log import (
    DATA_ONLY,
    DURABLE,
    NEVER,
    TRUNCATES,
    Kind,
    Log,
    Operation,
)

Model = Literal["strict", "ordered"]
MODELS: Final[tuple[Model, ...]] = ("strict", "ordered")


@dataclass
class Edit:
    """One change of a file's content.

    Attributes:
        durable: position from which on it is certainly on the disk.
        shrinks: a truncation to `offset`; else `data` is written at `offset`.
        least: the file is at least so long afterwards; of an allocation, which has no data.
    """

    begin: int
    end: int
    durable: int
    offset: int
    data: bytes = b""
    shrinks: bool = False
    least: int = 0

    def length_after(self, length: int) -> int:
        """The length of the file afterwards, when it was `length` before."""
        if self.shrinks:
            return self.offset
        return max(length, self.least, self.offset + len(self.data) if self.data else 0)


@dataclass(eq=False)
class File:
    """An inode with content."""

    edits: list[Edit] = field(default_factory=list)
    syncs: list[tuple[int, int]] = field(default_factory=list)
    length: int = 0
    mapped: bool = False


@dataclass(eq=False)
class Folder:
    """An inode with names; `now` is as of the operation that was read last."""

    now: dict[str, Node] = field(default_factory=dict)
    syncs: list[tuple[int, int]] = field(default_factory=list)


Node = File | Folder


@dataclass(eq=False)
class Change:
    """One change of names: of one name, or of two at once by a rename, the new one last."""

    begin: int
    end: int
    names: list[tuple[Folder, str, Node | None]]
    strict: int = NEVER
    ordered: int = NEVER

    def durable(self, model: Model) -> int:
        """Position from which on it is certainly on the disk."""
        return self.strict if model == "strict" else self.ordered


class Disk:
    """All files and folders of a run, with what became durable when.

    Attributes:
        root: the recorded folder itself, which is taken to be there.
        changes: of names, in order.
    """

    def __init__(self, log: Log, root: str) -> None:
        """Follows a log.

        Args:
            log: of a run that began with an empty folder.
            root: the folder's real path.

        Raises:
            ValueError: the log tells of a file that was there before.
        """
        self.root = Folder()
        self.changes: list[Change] = []
        self._path = root.rstrip("/")
        self._nodes: dict[int, Node] = {}
        self._journal = _Journal()
        self._moves = [op for op in log.operations if op.kind in (Kind.RENAME, Kind.LINK)]
        for op in sorted(log.operations, key=_moment):
            self._follow(op)
        self._find_durable()

    # -- following the log -------------------------------------------------------------

    def _follow(self, op: Operation) -> None:
        match op.kind:
            case Kind.OPEN | Kind.MKDIR | Kind.LINK | Kind.RENAME | Kind.REMOVE:
                if op.end != NEVER:
                    self._rename(op)
            case Kind.WRITE | Kind.TRUNCATE | Kind.ALLOCATE:
                self._edit(op)
            case Kind.SYNC:
                self._sync(op)
            case Kind.MMAP:
                self._file(op).mapped = True
            case Kind.MARK | Kind.END:
                pass

    def _rename(self, op: Operation) -> None:
        folder, name = self._place(op.path)
        if op.kind is Kind.REMOVE:
            self._change(op, [(folder, name, None)])
        elif op.kind is Kind.MKDIR:
            self._change(op, [(folder, name, self._new(op.inode, Folder()))])
        elif op.kind is Kind.OPEN:
            found = folder.now.get(name)
            if found is None and not self._is_moving(op):
                self._change(op, [(folder, name, self._new(op.inode, File()))])
            elif op.flags & TRUNCATES:
                self._truncate(op, 0)
        else:
            node = folder.now[name]
            goal = (*self._place(op.other), node)
            gone: list[tuple[Folder, str, Node | None]] = [(folder, name, None)]
            self._change(op, [*(gone if op.kind is Kind.RENAME else []), goal])

    def _is_moving(self, op: Operation) -> bool:
        """The file that was opened has its name by a rename that has not told of its end yet."""
        return any(
            move.inode == op.inode and move.other == op.path and move.begin < op.end < move.end
            for move in self._moves
        )

    def _change(self, op: Operation, names: list[tuple[Folder, str, Node | None]]) -> None:
        self.changes.append(Change(op.begin, op.end, names))
        for folder, name, node in names:
            self._journal.touch(folder, op.end)
            if node is None:
                folder.now.pop(name, None)
            else:
                folder.now[name] = node
                self._journal.touch(node, op.end)

    def _edit(self, op: Operation) -> None:
        if op.kind is Kind.TRUNCATE:
            self._truncate(op, op.offset)
            return
        file = self._file(op)
        if op.kind is Kind.ALLOCATE:
            edit = Edit(op.begin, op.end, NEVER, 0, least=op.offset)
        else:
            edit = Edit(op.begin, op.end, NEVER, op.offset, op.data)
        self._append(file, edit)
        if op.flags & DURABLE:
            edit.durable = op.end
            self._journal.sync(file, op.begin, op.end, data_only=True)

    def _truncate(self, op: Operation, length: int) -> None:
        file = self._file(op)
        if length < file.length:
            self._append(file, Edit(op.begin, op.end, NEVER, length, shrinks=True))
        elif length > file.length:
            self._append(file, Edit(op.begin, op.end, NEVER, 0, least=length))

    def _append(self, file: File, edit: Edit) -> None:
        file.edits.append(edit)
        after = edit.length_after(file.length)
        self._journal.touch(file, edit.end, data_only=after == file.length)
        file.length = after

    def _sync(self, op: Operation) -> None:
        node = self._node(op)
        if op.end != NEVER:
            node.syncs.append((op.begin, op.end))
            self._journal.sync(node, op.begin, op.end, data_only=bool(op.flags & DATA_ONLY))

    def _find_durable(self) -> None:
        for node in {id(node): node for node in self._all()}.values():
            if isinstance(node, File):
                first = _FirstSync(node.syncs)
                for edit in node.edits:
                    edit.durable = min(edit.durable, first.after(edit.end))
        firsts: dict[int, _FirstSync] = {}
        commits = _FirstSync(self._journal.commits)
        for change in self.changes:
            change.ordered = commits.after(change.end)
            folder = change.names[-1][0]
            if id(folder) not in firsts:
                firsts[id(folder)] = _FirstSync(folder.syncs)
            change.strict = firsts[id(folder)].after(change.end)

    # -- finding -----------------------------------------------------------------------

    def _all(self) -> list[Node]:
        return [self.root, *(node for change in self.changes for *_, node in change.names if node)]

    def _new(self, inode: int, node: Node) -> Node:
        self._nodes[inode] = node
        return node

    def _node(self, op: Operation) -> Node:
        if op.path.rstrip("/") == self._path:
            return self.root
        node = self._nodes.get(op.inode)
        if node is None:
            raise ValueError(f"{op.path or op.inode} was there before the record began")
        return node

    def _file(self, op: Operation) -> File:
        node = self._node(op)
        if not isinstance(node, File):
            raise ValueError(f"{op.kind.name} on the folder {op.path}")
        return node

    def _place(self, path: str) -> tuple[Folder, str]:
        if not path.startswith(self._path + "/"):
            raise ValueError(f"{path} lies outside of {self._path}")
        *parents, name = [part for part in path[len(self._path) :].split("/") if part]
        folder: Node = self.root
        for part in parents:
            assert isinstance(folder, Folder)
            folder = folder.now[part]
        assert isinstance(folder, Folder)
        return folder, name


def _moment(op: Operation) -> int:
    # A file has its inode when the call that made it has returned; a write is on its way at once.
    # So is a folder: another process may work in it before its maker's call is noted as returned.
    names = (Kind.OPEN, Kind.LINK, Kind.RENAME, Kind.REMOVE)
    return op.end if op.kind in names else op.begin


class _FirstSync:
    """The earliest end among those of several syncs that began after some moment."""

    def __init__(self, syncs: list[tuple[int, int]]) -> None:
        ordered = sorted(syncs)
        self._begins = [begin for begin, _ in ordered]
        self._ends = [end for _, end in ordered]
        for i in range(len(ordered) - 2, -1, -1):
            self._ends[i] = min(self._ends[i], self._ends[i + 1])

    def after(self, moment: int) -> int:
        at = bisect_right(self._begins, moment)
        return self._ends[at] if at < len(self._ends) else NEVER


class _Journal:
    """The syncs that commit the journal of a file system such as ext4.

    Attributes:
        commits: begin and end of each.
    """

    def __init__(self) -> None:
        self.commits: list[tuple[int, int]] = []
        self._touched: dict[int, list[tuple[int, bool]]] = {}

    def touch(self, node: Node, moment: int, *, data_only: bool = False) -> None:
        """The inode changes; `data_only`: in nothing that fdatasync has to keep."""
        self._touched.setdefault(id(node), []).append((moment, data_only))

    def sync(self, node: Node, begin: int, end: int, *, data_only: bool) -> None:
        """A sync commits all that was returned from before it, if its inode has to be kept."""
        kept: list[tuple[int, bool]] = []
        commits = False
        for moment, only in self._touched.get(id(node), []):
            # What an earlier commit took along needs none, if that was seen to end.
            if any(first > moment and last < begin for first, last in self.commits[-64:]):
                continue
            kept.append((moment, only))
            commits |= moment < begin and not (only and data_only)
        self._touched[id(node)] = kept
        if commits:
            self.commits.append((begin, end))
