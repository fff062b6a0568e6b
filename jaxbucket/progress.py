"""Progress bars: on a terminal, and nowhere else."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn


def progress_bar(shown: bool = True, *more: ProgressColumn) -> Progress:
    """Returns a bar of `rich` on standard error, which is gone when it is over.

    Not where results are printed, for these may well be read by a program.

    Args:
      shown: show it, if standard error is a terminal.
      more: columns beside the usual ones.
    """
    from rich.console import Console
    from rich.progress import Progress

    return Progress(
        *(*Progress.get_default_columns(), *more),
        console=Console(stderr=True),
        transient=True,
        # On none it would leave an empty line among errors. Not `is_terminal`, which
        # believes FORCE_COLOR.
        disable=not (shown and sys.stderr.isatty()),
    )
