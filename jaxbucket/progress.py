"""Progress bars: on a terminal, and nowhere else."""

from __future__ import annotations

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

    console = Console(stderr=True)
    return Progress(
        *(*Progress.get_default_columns(), *more),
        console=console,
        transient=True,
        # On none it would leave an empty line among errors.
        disable=not (shown and console.is_terminal),
    )
