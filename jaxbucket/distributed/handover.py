"""From the door to the watchdog: whoever ends meanwhile is seen by its connection.

While jax connects the processes, there is no store yet to say anything in. But the
system closes the connections of a process that has ended, however it did.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import threading
import time
from collections.abc import Iterator

from jaxbucket.distributed.exit import before_abort, leave
from jaxbucket.distributed.rendezvous import Member

# Words end with the line: one after another may come at once.
_THROUGH = b"through\n"
_SECONDS_TO_LOOK = 0.5
_SECONDS_TO_SPEAK = 2.0
_MAX_BYTES = 4096


@contextlib.contextmanager
def handover(
    index: int, others: dict[socket.socket, Member], status: int
) -> Iterator[None]:
    """Ends this process, with a sentence, if one of the others ends in the context.

    Args:
      index: of this process.
      others: whom it is connected to, from `rendezvous.meet`; process 0 tells all of
        the others. The connections are closed in the end.
      status: what this process exits with.
    """
    over = threading.Event()
    listener = threading.Thread(
        target=_listen,
        args=(index, others, over, status),
        name="jaxbucket handover",
        daemon=True,
    )
    listener.start()
    # jax aborts at once where it misses process 0: not before it is named, in whatever
    # thread, and while this one looks why it failed.
    with before_abort(lambda: time.sleep(_SECONDS_TO_SPEAK)):
        try:
            yield
            for other in others:
                _send(other, _THROUGH)
        except BaseException:
            # It may be what the loss of another one causes: that is seen in a moment.
            time.sleep(_SECONDS_TO_LOOK)
            raise
        finally:
            over.set()
            listener.join()
            for other in others:
                other.close()


def _listen(
    index: int,
    others: dict[socket.socket, Member],
    over: threading.Event,
    status: int,
) -> None:
    with selectors.DefaultSelector() as selector:
        for other in others:
            selector.register(other, selectors.EVENT_READ)
        while not over.is_set():
            for key, _ in selector.select(_SECONDS_TO_LOOK):
                other: socket.socket = key.fileobj  # pyright: ignore
                words = _receive(other)
                if words.startswith(_THROUGH):
                    # From now on its beats are watched.
                    selector.unregister(other)
                    continue
                lost = others[other]
                if words:
                    lost = Member(*json.loads(words))
                for third in set(others) - {other}:
                    _send(third, json.dumps(lost).encode() + b"\n")
                # A connection that ends with words unread may take these along.
                time.sleep(_SECONDS_TO_LOOK)
                leave(
                    status,
                    f"process {index} ends, for process {lost.process_id} "
                    f"({lost.name}) ended while they started. Look for what it prints, "
                    "and start all of them again.",
                )


def _receive(other: socket.socket) -> bytes:
    try:
        return other.recv(_MAX_BYTES)
    except OSError:
        return b""


def _send(other: socket.socket, word: bytes) -> None:
    # Whoever has gone need not be told.
    with contextlib.suppress(OSError):
        other.sendall(word)
