"""Makes worker processes exit with their parent, or if the main script has no guard."""

from __future__ import annotations

import os
import sys
import threading
from multiprocessing import current_process, parent_process

# Exit code of a worker that would start workers while it imports the main script.
MISSING_GUARD = 97


def exit_with_parent() -> None:
    """Makes this process exit when its parent process exits, even if it is busy."""
    threading.Thread(
        target=_exit_after_parent, name="jaxbucket parent watcher", daemon=True
    ).start()


def _exit_after_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def exit_if_importing() -> None:
    """Exits if this is a worker that is still importing the main script.

    The script then has no `if __name__ == "__main__":` guard, and every worker would
    start workers. The parent recognizes the exit code and reports the error once.
    """
    # `multiprocessing` checks the same attribute.
    if getattr(current_process(), "_inheriting", False):
        sys.exit(MISSING_GUARD)


def missing_guard_message(call: str) -> str:
    """Returns the error message for a script without a guard around `call`."""
    return (
        "Worker processes import the main script, which has no "
        '`if __name__ == "__main__":` guard, so each of them would start workers. Put '
        "the code that the script runs under a guard:\n\n"
        f'if __name__ == "__main__":\n    {call}\n'
    )
