"""Workers: they end with their parent, and start none while they import its script."""

from __future__ import annotations

import os
import sys
import threading
from multiprocessing import current_process, parent_process

# The exit status of a worker that was to start workers while it imported the script.
UNGUARDED = 97


def end_with_parent() -> None:
    """Ends this process, however busy, once the one that started it has ended."""
    threading.Thread(target=_wait, name="jaxbucket parent", daemon=True).start()


def _wait() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def end_if_importing() -> None:
    """Ends a worker that still imports the script that started it.

    There is no guard in the script, then: every worker would start workers. Its parent
    sees by the exit status what to say, once.
    """
    # Where `multiprocessing` itself looks for it.
    if getattr(current_process(), "_inheriting", False):
        sys.exit(UNGUARDED)


def unguarded(call: str) -> str:
    """Returns what a script without a guard is told."""
    return (
        "Workers import the script that starts them, and this one has no guard: each "
        "would start workers of its own. Put what it runs behind one:\n\n"
        f'if __name__ == "__main__":\n    {call}\n'
    )
