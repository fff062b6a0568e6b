"""Notes that say where an error was raised, and leave the error as it is."""

from __future__ import annotations

import contextlib
from types import TracebackType


class Noting(contextlib.AbstractContextManager[None, None]):
    """Adds a note to the errors of a `with` block.

    Example:
      >>> try:
      ...     with Noting("This is `source[3]`."):
      ...         raise KeyError("tokens")
      ... except KeyError as error:
      ...     print(error.__notes__)
      ['This is `source[3]`.']

    Args:
      where: a sentence that names what the block reads or does.
    """

    def __init__(self, where: str):
        self._where = where

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, StopIteration):
            raise RuntimeError(f"StopIteration was raised. {self._where}") from error
        if error is not None:
            error.add_note(self._where)
