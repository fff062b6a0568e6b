"""Tests of the watchdog thread in one process, with a fake store."""

import faulthandler
import json
import os
import resource
import socket
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from jaxbucket.distributed import store as store_module
from jaxbucket.distributed import watchdog as module
from jaxbucket.distributed.store import Store
from jaxbucket.distributed.watchdog import Watchdog

TIMEOUT = 2.0
MANY = 1100


class FakeStore:
    """The store of process 0 or 1, in which the other process is alive."""

    count = 2

    def __init__(self, index: int = 1):
        self.index = index
        self.beats: list[list[Any]] = []
        self.error: Exception | None = None
        self.resolved_by = ""
        self.sockets: list[socket.socket] = []

    def get(self, key: str, timeout: float) -> str:
        time.sleep(0.01)
        if self.error is not None:
            raise self.error
        return json.dumps([time.monotonic_ns(), "host, pid 7", ""])

    def read_folder(self, folder: str) -> dict[str, str]:
        return {"1": self.get("beats/1", 0.0)}

    def set(self, key: str, value: str) -> None:
        assert key == f"beats/{self.index}"
        self.beats.append(json.loads(value))

    def resolve(self) -> None:
        self.resolved_by = threading.current_thread().name

    def connect(self, timeout: float) -> socket.socket:
        client, server = socket.socketpair()
        self.sockets += [client, server]
        return client


@pytest.fixture(name="exits")
def exits_fixture(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The arguments of the calls that would have ended this process."""
    exits: list[tuple[Any, ...]] = []
    monkeypatch.setattr(module, "exit_now", lambda *args: exits.append(args))
    return exits


@pytest.fixture(name="many_files")
def many_files_fixture() -> Iterator[None]:
    """Opens more files than `select.select` accepts."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= limits[1] < 2 * MANY:
        pytest.skip(f"only {limits[1]} files can be open")
    if 0 <= limits[0] < 2 * MANY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (2 * MANY, limits[1]))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(MANY)]
    yield
    for file in files:
        os.close(file)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def watch(store: FakeStore) -> Watchdog:
    return Watchdog(cast(Store, store), "host, pid 8", TIMEOUT, TIMEOUT)


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_end_of_process_0_is_noticed_with_many_open_files(many_files, exits):
    store = FakeStore()
    watchdog = watch(store)
    watchdog.start()
    wait_until(lambda: len(store.beats) > 3)
    assert not exits
    client, server = store.sockets
    assert client.fileno() >= 1024
    server.close()
    wait_until(lambda: exits)
    ((status, message),) = exits
    assert status == module.EXIT_STATUS
    assert "lost the connection to process 0 (host, pid 7)" in message
    watchdog.stop()


def test_the_connection_is_renewed(monkeypatch, exits):
    monkeypatch.setattr(module, "_SECONDS_TO_RENEW", 0.3)
    store = FakeStore()
    watchdog = watch(store)
    watchdog.start()
    wait_until(lambda: len(store.sockets) >= 6)
    watchdog.stop()
    assert not exits
    assert all(client.fileno() == -1 for client in store.sockets[::2])
    for server in store.sockets[1::2]:
        server.close()


@pytest.mark.parametrize("index", [0, 1])
def test_an_error_of_the_watchdog_itself_is_reported(index, exits, capsys):
    store = FakeStore(index)
    watchdog = watch(store)
    watchdog.start()
    wait_until(lambda: store.beats)
    store.error = KeyError("odd")
    wait_until(lambda: exits)
    watchdog.stop()
    for connection in store.sockets:
        connection.close()
    reason = "raised KeyError in its watchdog: 'odd'"
    assert store.beats[-1][1:] == [
        "host, pid 8",
        f"process {index} (host, pid 8) {reason}",
    ]
    assert exits == [(1, f"Process {index} is exiting: it {reason}")]
    assert "KeyError: 'odd'" in capsys.readouterr().err


@pytest.mark.parametrize("was_enabled", [False, True])
def test_a_faulthandler_that_was_enabled_stays_enabled(monkeypatch, was_enabled):
    calls = []
    monkeypatch.setattr(faulthandler, "is_enabled", lambda: was_enabled)
    monkeypatch.setattr(faulthandler, "enable", lambda: calls.append("enable"))
    monkeypatch.setattr(faulthandler, "disable", lambda: calls.append("disable"))
    store = FakeStore(0)
    watchdog = watch(store)
    watchdog.start()
    wait_until(lambda: store.beats)
    watchdog.stop()
    assert calls == ([] if was_enabled else ["enable", "disable"])


def test_the_thread_does_not_use_a_name_server():
    store = FakeStore()
    watchdog = watch(store)
    watchdog.start()
    wait_until(lambda: store.sockets)
    watchdog.stop()
    store.sockets[1].close()
    assert store.resolved_by == threading.current_thread().name


def test_the_name_of_process_0_is_looked_up_once(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        state = types.SimpleNamespace(
            client=object(),
            process_id=1,
            num_processes=2,
            coordinator_address=f"localhost:{server.getsockname()[1]}",
        )
        monkeypatch.setattr(store_module.distributed, "global_state", state)
        store = Store("folder")
        assert store.connect(1.0) is None
        store.resolve()

        def look_up(*args: Any, **kwargs: Any) -> None:
            pytest.fail("used a name server")

        monkeypatch.setattr(socket, "getaddrinfo", look_up)
        for _ in range(2):
            connection = store.connect(1.0)
            assert connection is not None
            with connection:
                assert connection.getpeername() == server.getsockname()
    assert store.connect(1.0) is None


def test_an_unknown_name_is_not_an_error(monkeypatch):
    def look_up(*args: Any, **kwargs: Any) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "unknown")

    state = types.SimpleNamespace(
        client=object(), process_id=1, num_processes=2, coordinator_address="x:1"
    )
    monkeypatch.setattr(store_module.distributed, "global_state", state)
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    store = Store("folder")
    store.resolve()
    assert store.connect(1.0) is None
