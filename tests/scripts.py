"""Scripts of steps with the expected answers: `verb args -> answer`, by lines or "; ".

    begin a                       calls do_begin("a") of a `Script`
    commit a -> 7                 the answer as text; one that is empty is `none`
    commit b -> InvalidTxnStateError: not open: ABORT

A step without an answer must succeed.
"""

from __future__ import annotations

import re
import shlex

import pytest

import txnkv


def scripts(text: str) -> pytest.MarkDecorator:
    """Run a test by each of these scripts; the line before one is `== ` and its name."""
    found = [case.partition("\n") for case in text.strip().removeprefix("== ").split("\n== ")]
    return pytest.mark.parametrize("text", [pytest.param(body, id=id) for id, _, body in found])


class Script:
    """Runs scripts by its methods, do_ and the verb."""

    def __call__(self, text: str) -> None:
        for number, line in enumerate(text.replace("; ", "\n").splitlines(), 1):
            try:
                self._step(line)
            except BaseException as error:
                error.add_note(f"in step {number} of the script: {line}")
                raise

    def _step(self, line: str) -> None:
        call, _, answer = (part.strip() for part in line.partition("->"))
        verb, *args = shlex.split(call)
        run = getattr(self, f"do_{verb}")
        name, _, words = answer.partition(":")
        kind = OSError if name == "OSError" else getattr(txnkv, name, None)
        if kind is not None and issubclass(kind, Exception):
            with pytest.raises(kind) as caught:
                run(*args)
            assert re.search(words.strip(), str(caught.value)), str(caught.value)
        else:
            found = run(*args)
            assert not answer or (str(found) or "none") == answer, f"answered {found}"


def numbers(words: tuple[str, ...] | list[str]) -> list[int]:
    """Read numbers and ranges: 1 3..5."""
    found: list[int] = []
    for word in words:
        low, _, high = word.partition("..")
        found.extend(range(int(low), int(high or low) + 1))
    return found
