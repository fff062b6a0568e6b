"""Progress bars, shown only on a terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress


def progress_bar(shown: bool) -> Progress:
    """Returns a `rich` progress bar on standard error that disappears when it ends.

    Standard output stays free for results, because a program may read them.

    Args:
      shown: whether to show the bar if standard error is a terminal.
    """
    from rich.console import Console
    from rich.progress import Progress

    # This does not use rich's `is_terminal`, because FORCE_COLOR overrides it.
    is_shown = shown and sys.stderr.isatty()
    return Progress(
        # Quiet, because before rich 14.2 even a disabled bar prints an empty line.
        console=Console(stderr=True, quiet=not is_shown),
        transient=True,
        disable=not is_shown,
    )
