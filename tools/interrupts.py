"""Exceptions of signal handlers at chosen instants.

CPython runs signal handlers in the main thread when a function begins, when a loop goes back, and
after a call of something that is not Python. `Interruption` raises at the n-th of these instants
of a call, so that a test can go through all of them, in the order in which they come:

    for n in itertools.count(1):
        interruption = Interruption(n)
        interruption.run(call)
        if interruption.where is None:     # the call has fewer of them: all were tried
            break

Not counted are the callbacks of Python's own weak sets, where any exception is printed and lost.
It is made with tracing, which stands beside the instruction that would follow: where that is in
another `try` or `with` than the call was, no instant is counted.
"""

from __future__ import annotations

import _weakrefset
import dis
import gc
import sys
from collections.abc import Callable
from functools import cache
from types import CodeType, FrameType
from typing import Any, Final

from txnkv.storage import threads

_ASKING: Final = frozenset(
    (
        "RESUME",
        "CALL",
        "CALL_KW",
        "CALL_FUNCTION_EX",
        "JUMP_BACKWARD",
        "POP_JUMP_BACKWARD_IF_TRUE",
        "POP_JUMP_BACKWARD_IF_FALSE",
        "POP_JUMP_BACKWARD_IF_NONE",
        "POP_JUMP_BACKWARD_IF_NOT_NONE",
    )
)
"""Instructions after which handlers run; those of several versions of Python."""


_WEAK_SETS: Final = _weakrefset.__file__


class Interrupted(BaseException):
    """The exception that the handler raises."""


@cache
def _asking(code: CodeType) -> frozenset[tuple[int, int]]:
    """Pairs of instructions, one after the other, between which a handler may run."""
    steps = list(dis.get_instructions(code))
    table = dis._parse_exception_table(code)  # type: ignore[attr-defined]

    def handler(at: int) -> Any:
        return next(((e.target, e.depth) for e in table if e.start <= at < e.end), None)

    handlers = {step.offset: handler(step.offset) for step in steps}
    return frozenset(
        (step.offset, after)
        for step in steps
        if step.opname in _ASKING
        for after, caught in handlers.items()
        if caught == handlers[step.offset]
    )


class Interruption:
    """An exception at the n-th instant of a call.

    Attributes:
        passed: how many instants were there, until it came.
        where: function and line, innermost first; None when it did not come to that.
    """

    def __init__(self, at: int) -> None:
        self._point = at
        self.passed = 0
        self._last: dict[FrameType, int] = {}
        self.where: str | None = None

    def run(self, call: Callable[[], object]) -> None:
        """Call it; `Interrupted` ends here, if it comes out of the call."""
        before = sys.gettrace()
        gc.collect()
        gc.disable()  # it would run callbacks of others, where exceptions are lost
        sys.settrace(self._trace)
        try:
            call()
        except Interrupted:
            pass
        finally:
            sys.settrace(before)
            gc.enable()
            self._last.clear()

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename == _WEAK_SETS:
            return None
        if event == "call":
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            self._at(frame)
        elif event == "opcode":
            last, self._last[frame] = self._last.get(frame), frame.f_lasti
            if last is not None and (last, frame.f_lasti) in _asking(frame.f_code):
                self._at(frame)
        elif event == "return":
            self._last.pop(frame, None)
        return self._trace

    def _at(self, frame: FrameType) -> None:
        if not threads.is_exposed():
            return  # handlers are put off until the call has ended
        self.passed += 1
        if self.passed == self._point:
            self.where = _stack(frame)
            raise Interrupted


def _stack(frame: FrameType | None) -> str:
    places: list[str] = []
    while frame is not None and len(places) < 8:
        places.append(f"{frame.f_code.co_qualname} ({frame.f_code.co_filename}:{frame.f_lineno})")
        frame = frame.f_back
    return " < ".join(places)
