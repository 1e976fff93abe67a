"""Draws one of the states in which a power loss may leave the files, and writes it out.

A state belongs to a cut (how many records of the log happened), a seed and a model of names. The
seed first draws a temper for the contents and one for the names, so that extremes are as frequent
as mixtures:

    least      nothing that was not synced
    most       everything that was begun, as after a kill
    whole      of each file everything or nothing: writes of different files out of order
    pages      of each page any of its last versions, by a drawn share
    sectors    the same, but some pages are torn into sectors, each with a version of its own

Files that are void after a power loss (memory shared by processes, which nobody syncs) are mostly
left out; in one state of three those that were there hold garbage.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Final, Literal

from tools.powerloss.disk import Change, Disk, Edit, File, Folder, Model, Node

PAGE: Final = 4096
SECTOR: Final = 512

Temper = Literal["least", "most", "whole", "pages", "sectors"]
TEMPERS: Final[tuple[Temper, ...]] = ("least", "most", "whole", "pages", "sectors")

Volatile = Callable[[str], bool]


def nothing(_: str) -> bool:
    """No file is volatile."""
    return False


class States:
    """The states of one disk. Cuts that ascend are cheapest: what is durable is kept between.

    Attributes:
        volatile: of a path relative to the root: True when it is void, with all below it.
    """

    def __init__(self, disk: Disk, volatile: Volatile = nothing) -> None:
        self.disk = disk
        self.volatile = volatile
        self._bases: dict[int, _Base] = {}

    def write(
        self, folder: Path, cut: int, seed: int, model: Model, temper: Temper | None = None
    ) -> None:
        """Writes one state into a folder, which is made.

        Args:
            folder: takes the place of the recorded one.
            cut: this many records of the log happened.
            seed: draws the state.
            model: of names.
            temper: for contents and names, instead of drawn ones.

        Raises:
            ValueError: a file that is kept was written through a mapping, which is not recorded.
        """
        random = Random(f"{cut} {seed} {model}")
        seeds = random.random(), random.random()
        drawn = random.choice(TEMPERS), random.choice(TEMPERS)
        tempers = drawn if temper is None else (temper, temper)
        contents = _Contents(_Chance(Random(seeds[0]), tempers[0]), cut, self._base)
        chance = _Chance(Random(seeds[1]), tempers[1])
        names = _names(self.disk, cut, model, chance)
        litter = random if temper is None and random.random() < 1 / 3 else None
        self._write(folder, "", self.disk.root, names, contents, litter)

    def _write(
        self,
        path: Path,
        name: str,
        node: Folder,
        names: _Names,
        contents: _Contents,
        litter: Random | None,
    ) -> None:
        path.mkdir(mode=0o700)
        for entry, child in sorted(names.get(id(node), {}).items()):
            below = f"{name}/{entry}" if name else entry
            void = self.volatile(below)
            if void and litter is None:
                continue
            if isinstance(child, Folder):
                self._write(path / entry, below, child, names, contents, litter)
                continue
            if child.mapped and not void:
                raise ValueError(f"{below} was mapped to be written, which is not recorded")
            with open(path / entry, "xb", opener=_private) as file:
                file.write(_garbage(litter) if void and litter else contents.of(child))

    def _base(self, file: File, cut: int) -> _Base:
        base = self._bases.get(id(file))
        if base is None or base.cut > cut:
            base = self._bases[id(file)] = _Base(file)
        base.advance(cut)
        return base


def _garbage(random: Random) -> bytes:
    return random.choice((bytes, random.randbytes))(random.choice((0, 100, 4096, 100_000)))


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


class _Chance:
    """Picks how much of what is not durable arrived."""

    def __init__(self, random: Random, temper: Temper) -> None:
        self._random = random
        self._temper = temper
        self._whole: dict[int, bool] = {}
        self._share = random.choice((0.1, 0.5, 0.9))
        self.tears = temper == "sectors"

    def pick(self, least: int, most: int, owner: object = None) -> int:
        """A number of edits, in order, from `least` to `most`; `owner` is whose they are."""
        if least == most or self._temper == "least":
            return least
        if self._temper == "most":
            return most
        if self._temper == "whole":
            if id(owner) not in self._whole:
                self._whole[id(owner)] = self._random.random() < 0.5
            return most if self._whole[id(owner)] else least
        if self._random.random() < 0.2:
            return self._random.randint(least, most)
        return most if self._random.random() < self._share else least

    def tear(self) -> bool:
        """Draw whether a page is torn."""
        return self.tears and self._random.random() < 0.5


# -- names -----------------------------------------------------------------------------

_Names = dict[int, dict[str, Node]]


def _names(disk: Disk, cut: int, model: Model, chance: _Chance) -> _Names:
    happened = [change for change in disk.changes if change.begin < cut]
    groups = [happened] if model == "ordered" else _connected(happened)
    names: _Names = {}
    for group in groups:
        owner = group[0].names[0][0] if group else None
        durable = [i for i, change in enumerate(group, 1) if change.durable(model) < cut]
        arrived = chance.pick(durable[-1] if durable else 0, len(group), owner)
        for change in group[:arrived]:
            for folder, name, node in change.names:
                here = names.setdefault(id(folder), {})
                if node is None:
                    here.pop(name, None)
                else:
                    here[name] = node
    return names


def _connected(changes: list[Change]) -> list[list[Change]]:
    """Changes of one name stay in order; a rename ties two names together."""
    group_of: dict[tuple[int, str], list[Change]] = {}
    for change in changes:
        names = [(id(folder), name) for folder, name, _ in change.names]
        tied = {id(group_of[name]): group_of[name] for name in names if name in group_of}
        together = sorted((each for group in tied.values() for each in group), key=_end)
        group = next(iter(tied.values())) if len(tied) == 1 else together
        group.append(change)
        for member in group if len(tied) > 1 else [change]:
            for folder, name, _ in member.names:
                group_of[id(folder), name] = group
    return list({id(group): group for group in group_of.values()}.values())


def _end(change: Change) -> int:
    return change.end


# -- contents --------------------------------------------------------------------------


class _Base:
    """The content of a file by those first edits that are all durable at a cut."""

    def __init__(self, file: File) -> None:
        self.edits = file.edits
        self.content = bytearray()
        self.count = 0
        self.cut = 0

    def advance(self, cut: int) -> None:
        """Goes on to a later cut."""
        self.cut = cut
        while self.count < len(self.edits) and self.edits[self.count].durable < cut:
            _apply(self.content, self.edits[self.count])
            self.count += 1

    def pending(self) -> list[Edit]:
        """The later edits that were begun before the cut."""
        pending = []
        for edit in self.edits[self.count :]:
            if edit.begin >= self.cut:
                break
            pending.append(edit)
        return pending


def _apply(content: bytearray, edit: Edit) -> None:
    if edit.shrinks:
        del content[edit.offset :]
        return
    length = edit.length_after(len(content))
    if length > len(content):
        content.extend(bytes(length - len(content)))
    content[edit.offset : edit.offset + len(edit.data)] = edit.data


class _Contents:
    """The contents of all files in one state."""

    def __init__(self, chance: _Chance, cut: int, base: Callable[[File, int], _Base]) -> None:
        self._chance = chance
        self._cut = cut
        self._base = base
        self._done: dict[int, bytes | bytearray] = {}
        self._cuts: set[int] = set()

    def of(self, file: File) -> bytes | bytearray:
        """The bytes of a file, the same at each of its names."""
        if id(file) not in self._done:
            self._done[id(file)] = self._make(file)
        return self._done[id(file)]

    def _make(self, file: File) -> bytes | bytearray:
        base = self._base(file, self._cut)
        pending, least = self._truncated(base.pending(), file)
        if not pending:
            return base.content
        lengths = [len(base.content)]
        for edit in pending:
            lengths.append(edit.length_after(lengths[-1]))
        length = lengths[self._chance.pick(least, len(pending), file)]
        content = bytearray(max(lengths))
        content[: len(base.content)] = base.content
        for page, edits in _by_page(pending, len(base.content)).items():
            self._write_page(content, page * PAGE, edits, file)
        del content[length:]
        return content

    def _truncated(self, pending: list[Edit], file: File) -> tuple[list[Edit], int]:
        """The edits up to the first truncation that did not arrive, and how many certainly did."""
        least = max((i for i, edit in enumerate(pending, 1) if self._arrived(edit)), default=0)
        cuts = [i for i, edit in enumerate(pending) if edit.shrinks and i >= least]
        arrived = self._chance.pick(0, len(cuts), file)
        self._cuts = {id(pending[i]) for i in cuts[:arrived]}
        if arrived < len(cuts):
            pending = pending[: cuts[arrived]]
        return pending, cuts[arrived - 1] + 1 if arrived else least

    def _arrived(self, edit: Edit) -> bool:
        """Tell whether an edit is there, and so all before it on the same page."""
        return edit.durable < self._cut or id(edit) in self._cuts

    def _write_page(self, content: bytearray, at: int, edits: list[Edit], file: File) -> None:
        if self._chance.tear():
            for sector in range(at, at + PAGE, SECTOR):
                touching = [edit for edit in edits if _touches(edit, sector, sector + SECTOR)]
                self._write_range(content, sector, sector + SECTOR, touching, file)
        else:
            self._write_range(content, at, at + PAGE, edits, file)

    def _write_range(
        self, content: bytearray, low: int, high: int, edits: list[Edit], file: File
    ) -> None:
        least = max((i for i, edit in enumerate(edits, 1) if self._arrived(edit)), default=0)
        high = min(high, len(content))
        for edit in edits[: self._chance.pick(least, len(edits), file)]:
            if edit.shrinks:
                start = max(edit.offset, low)
                content[start:high] = bytes(max(high - start, 0))
            else:
                start = max(edit.offset, low)
                stop = min(edit.offset + len(edit.data), high)
                if start < stop:
                    content[start:stop] = edit.data[start - edit.offset : stop - edit.offset]


def _touches(edit: Edit, low: int, high: int) -> bool:
    return edit.offset < high and (edit.shrinks or edit.offset + len(edit.data) > low)


def _by_page(edits: list[Edit], length: int) -> dict[int, list[Edit]]:
    """The edits of each page, in order; of allocations none, they have no content."""
    pages: dict[int, list[Edit]] = {}
    for edit in edits:
        end = length if edit.shrinks else edit.offset + len(edit.data)
        for page in range(edit.offset // PAGE, -(-end // PAGE)):
            pages.setdefault(page, []).append(edit)
        length = max(length, end)
    return pages
