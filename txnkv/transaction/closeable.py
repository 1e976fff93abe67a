"""Handles: things of this process, that a `with` block closes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Any, ClassVar, NoReturn, Self


class Handle:
    """Something that belongs to this process: it cannot be pickled."""

    _elsewhere: ClassVar[str] = "open it there by its name"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} belongs to its process and cannot be pickled or copied: "
            f"{self._elsewhere}"
        )


class Closing(Handle, ABC):
    """Something with `close()`, usable in `with`."""

    @abstractmethod
    def close(self) -> None:
        """Give it up. Twice is fine."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
