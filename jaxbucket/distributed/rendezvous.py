"""How the processes of a run find one another, before jax connects them.

jax's coordination service takes whoever comes: a process of another run ends the one it
joins by mistake, and one too many hangs. So process 0 keeps the door first, at the
address where the service will be. Each process says who it is; once all are here, all
are let in, and the service starts. They stay connected until they watch one another by
other means.
"""

from __future__ import annotations

import contextlib
import errno
import json
import selectors
import socket
import time
from typing import NamedTuple

# Process 0 speaks first: whoever listens there and does not is somebody else.
_GREETING = b"jaxbucket: who are you?\n"
_SECONDS_TO_GREET = 5.0
# The one before may still be on its way out, where a cluster starts a run again.
_SECONDS_TO_LEAVE = 10.0
# Those that come a little later are told the same.
_SECONDS_TO_TELL = 2.0
_SECONDS_TO_ANSWER = 10.0
_SECONDS_BETWEEN_TRIES = 0.1
_MAX_BYTES = 4096
_MAX_NAMES = 8


class Member(NamedTuple):
    """A process of a run.

    Attributes:
      process_id: which it is.
      num_processes: how many it expects.
      name: its host and its pid.
    """

    process_id: int
    num_processes: int
    name: str


def meet(address: str, own: Member, timeout: float) -> dict[socket.socket, Member]:
    """Returns once all processes of the run are here. All of them have to call it.

    Args:
      address: host:port of process 0.
      own: this process.
      timeout: seconds until all must be here.

    Returns:
      Whom this process is connected to: process 0 to all, they to process 0.

    Raises:
      ValueError: in every process, if two have the same index or they do not agree on
        how many they are; in one process, if it is one too many, another program
        listens there, or in process 0, if the port is in use.
      TimeoutError: if some do not come; it names them.
    """
    deadline = time.monotonic() + timeout
    if own.process_id > 0:
        return _knock(address, own, deadline, timeout)
    with _Door(address, own) as door:
        return door.wait(deadline, timeout)


class _Refused(ValueError):
    """Why one process is not let in, though the others may be."""


class _Door:
    """Where process 0 waits for the others."""

    def __init__(self, address: str, own: Member):
        self._address = address
        self._own = own
        self._here: dict[int, Member] = {0: own}
        # Whoever has said nothing yet is None.
        self._guests: dict[socket.socket, Member | None] = {}
        self._listener = _listen(address)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)

    def __enter__(self) -> _Door:
        return self

    def __exit__(self, *error: object) -> None:
        for guest in list(self._guests):
            self._part(guest)
        self._selector.close()
        self._listener.close()

    def wait(self, deadline: float, timeout: float) -> dict[socket.socket, Member]:
        """Lets all others in, once they are here."""
        try:
            while missing := set(range(self._own.num_processes)) - set(self._here):
                if time.monotonic() >= deadline:
                    raise TimeoutError(
                        f"{listed(sorted(missing))} did not come to {self._address} "
                        f"within {timeout:g} s. Look for what they print, and whether "
                        "they reach this address."
                    )
                self._receive(deadline)
        except (ValueError, TimeoutError) as error:
            self._turn_away(error)
            raise
        members = {}
        for guest, member in list(self._guests.items()):
            if member is None:
                _refuse(guest, _Refused("All others are here already."))
            else:
                _say(guest, self._own.name)
                members[guest] = member
                del self._guests[guest]
        return members

    def _receive(self, deadline: float) -> None:
        """Waits for somebody to come, to speak or to go."""
        for key, _ in self._selector.select(max(0, deadline - time.monotonic())):
            if key.fileobj is self._listener:
                self._open()
            else:
                self._hear(key.fileobj)  # pyright: ignore

    def _open(self) -> None:
        try:
            guest, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise ValueError(
                    f"Process 0 cannot take in more than {len(self._guests)} others: "
                    f"{error.strerror}. Raise the limit, as by `ulimit -n`."
                ) from None
            return
        guest.settimeout(_SECONDS_TO_GREET)
        self._guests[guest] = None
        self._selector.register(guest, selectors.EVENT_READ)
        with contextlib.suppress(OSError):
            guest.sendall(_GREETING)

    def _hear(self, guest: socket.socket) -> None:
        member = _read_member(guest)
        if member is None or self._guests[guest] is not None:
            # It has gone, or is somebody else's.
            return self._part(guest)
        try:
            self._admit(member)
        except _Refused as why:
            _refuse(guest, why)
            return self._part(guest)
        self._guests[guest] = member

    def _admit(self, member: Member) -> None:
        index, count, name = member
        expected = self._own.num_processes
        if index >= expected:
            raise _Refused(
                f"Process 0 expects {expected} processes, by `num_processes`: process "
                f"{index} ({name}) is one too many."
            )
        if index in self._here:
            raise ValueError(
                f"There are two processes {index}: {self._here[index].name} and "
                f"{name}. Give each its own `process_id`."
            )
        if count != expected:
            raise ValueError(
                "The processes do not agree on how many they are: `num_processes` is "
                f"{expected} in process 0, {count} in process {index}. Give all of "
                "them the same."
            )
        self._here[index] = member

    def _part(self, guest: socket.socket) -> None:
        member = self._guests.pop(guest)
        if member is not None:
            del self._here[member.process_id]
        self._selector.unregister(guest)
        guest.close()

    def _turn_away(self, why: Exception) -> None:
        deadline = time.monotonic() + _SECONDS_TO_TELL
        told: set[socket.socket] = set()
        while time.monotonic() < deadline:
            for guest in set(self._guests) - told:
                _refuse(guest, why)
                told.add(guest)
            # Nobody who comes now is let in, whatever there is to say of it.
            with contextlib.suppress(ValueError):
                self._receive(deadline)


def _listen(address: str) -> socket.socket:
    port = int(address.rpartition(":")[2])
    both = socket.has_dualstack_ipv6()
    try:
        return socket.create_server(
            ("", port),
            family=socket.AF_INET6 if both else socket.AF_INET,
            backlog=1024,
            dualstack_ipv6=both,
        )
    except OSError as error:
        raise ValueError(
            f"`coordinator_address={address!r}`: port {port} cannot be listened to "
            f"({error.strerror}). Choose another, the same in all processes."
        ) from None


def _read_member(guest: socket.socket) -> Member | None:
    """Who it says it is; None where it has gone or does not say so."""
    try:
        index, count, name = json.loads(guest.recv(_MAX_BYTES))
        if index > 0 and count > 0:
            return Member(int(index), int(count), str(name))
    # Whatever a stranger may send.
    except (OSError, ValueError, TypeError, OverflowError, RecursionError):
        pass
    return None


def _refuse(guest: socket.socket, why: Exception) -> None:
    _say(guest, [isinstance(why, TimeoutError), str(why)])


def _say(guest: socket.socket, answer: object) -> None:
    # Whoever has gone need not be told.
    with contextlib.suppress(OSError):
        guest.sendall(json.dumps(answer).encode() + b"\n")


def _knock(
    address: str, own: Member, deadline: float, timeout: float
) -> dict[socket.socket, Member]:
    stranger_since = None
    while True:
        try:
            door = _connect(address)
        except OSError as error:
            stranger_since = None
            if time.monotonic() >= deadline:
                raise TimeoutError(
                    f"Process 0 does not answer at {address} within {timeout:g} s "
                    f"({error}). Start it, and see that this process reaches it there."
                ) from None
        else:
            with contextlib.ExitStack() as stack:
                stack.callback(door.close)
                if _greets(door):
                    name = _ask(door, address, own, timeout)
                    stack.pop_all()
                    return {door: Member(0, own.num_processes, name)}
            stranger_since = stranger_since or time.monotonic()
        if stranger_since and time.monotonic() - stranger_since > _SECONDS_TO_LEAVE:
            raise ValueError(
                f"`coordinator_address={address!r}`: what listens there waits for no "
                "process. Another program uses this port, or the run has begun, and "
                f"process {own.process_id} ({own.name}) is one too many. Choose "
                "another port, the same in all processes."
            )
        time.sleep(_SECONDS_BETWEEN_TRIES)


def _connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    door = socket.create_connection((host.strip("[]"), int(port)), _SECONDS_TO_GREET)
    if door.getsockname() == door.getpeername():
        # With itself: where nobody listens, a port of this machine may be its own.
        door.close()
        raise ConnectionRefusedError("nobody listens")
    return door


def _greets(door: socket.socket) -> bool:
    heard = b""
    with contextlib.suppress(TimeoutError, ConnectionError):
        while len(heard) < len(_GREETING):
            part = door.recv(len(_GREETING) - len(heard))
            if not part:
                break
            heard += part
    return heard == _GREETING


def _ask(door: socket.socket, address: str, own: Member, timeout: float) -> str:
    """Returns the name of process 0, if this process is let in."""
    try:
        door.sendall(json.dumps(own).encode())
        # Process 0, which began before, says so when its own time is over.
        door.settimeout(timeout + _SECONDS_TO_ANSWER)
        answer = b""
        # Not a byte more: what follows is for others to read.
        while not answer.endswith(b"\n") and (byte := door.recv(1)):
            answer += byte
    except OSError:
        answer = b""
    if not answer.endswith(b"\n"):
        raise ValueError(
            f"Process 0 has left {address} while it waited for the others. Look for "
            "what it prints, and start all of them again."
        )
    word = json.loads(answer)
    if isinstance(word, str):
        return word
    is_late, why = word
    raise (TimeoutError if is_late else ValueError)(why)


def listed(processes: list[int]) -> str:
    """ "process 3", or "processes 1, 3 and 5 more"."""
    names = list(map(str, processes))
    if len(names) == 1:
        return f"process {names[0]}"
    if len(names) > _MAX_NAMES:
        names[_MAX_NAMES:] = [f"{len(names) - _MAX_NAMES} more"]
    return f"processes {', '.join(names[:-1])} and {names[-1]}"
