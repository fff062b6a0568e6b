"""Workers whose parent is gone: they would wait for it for ever."""

from __future__ import annotations

import os
import threading
from multiprocessing import parent_process


def end_with_parent() -> None:
    """Ends this process, however busy, once the one that started it has ended."""
    threading.Thread(target=_wait, name="jaxbucket parent", daemon=True).start()


def _wait() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
