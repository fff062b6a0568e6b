"""The thread that watches, in one process: its store is a dict."""

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
    """Of process 1, where process 0 is well, or of process 0, where 1 is."""

    count = 2

    def __init__(self, index: int = 1):
        self.index = index
        self.beats: list[list[Any]] = []
        self.error: Exception | None = None
        self.resolved_by = ""
        self.ends: list[socket.socket] = []

    def get(self, key: str, timeout: float) -> str:
        time.sleep(0.01)
        if self.error is not None:
            raise self.error
        return json.dumps([time.monotonic_ns(), "host, pid 7", ""])

    def below(self, folder: str) -> dict[str, str]:
        return {"1": self.get("beats/1", 0.0)}

    def set(self, key: str, value: str) -> None:
        assert key == f"beats/{self.index}"
        self.beats.append(json.loads(value))

    def resolve(self) -> None:
        self.resolved_by = threading.current_thread().name

    def connect(self, timeout: float) -> socket.socket:
        own, other = socket.socketpair()
        self.ends += [own, other]
        return own


@pytest.fixture(name="ends")
def ends_fixture(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What would have ended this process."""
    ends: list[tuple[Any, ...]] = []
    monkeypatch.setattr(module, "exit_now", lambda *args: ends.append(args))
    return ends


@pytest.fixture(name="many_files")
def many_files_fixture() -> Iterator[None]:
    """So many open files that the next one is beyond what `select` can take."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= limits[1] < 2 * MANY:
        pytest.skip(f"no more than {limits[1]} files can be open")
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


def test_it_beats_and_sees_the_end_of_process_0_beyond_1024_files(many_files, ends):
    store = FakeStore()
    watchdog = watch(store)
    watchdog.start()
    wait_until(lambda: len(store.beats) > 3)
    assert not ends
    own, other = store.ends
    assert own.fileno() >= 1024
    other.close()
    wait_until(lambda: ends)
    ((status, sentence),) = ends
    assert status == module.EXIT_STATUS
    assert "process 0 (host, pid 7) cannot be reached any more" in sentence
    watchdog.stop()


def test_a_connection_is_renewed(monkeypatch, ends):
    monkeypatch.setattr(module, "_SECONDS_TO_RENEW", 0.3)
    store = FakeStore()
    watchdog = watch(store)
    watchdog.start()
    wait_until(lambda: len(store.ends) >= 6)
    watchdog.stop()
    assert not ends
    assert all(own.fileno() == -1 for own in store.ends[::2])
    for other in store.ends[1::2]:
        other.close()


@pytest.mark.parametrize("index", [0, 1])
def test_an_error_of_its_own_is_said_and_not_taken_for_silence(index, ends, capsys):
    store = FakeStore(index)
    watchdog = watch(store)
    watchdog.start()
    wait_until(lambda: store.beats)
    store.error = KeyError("odd")
    wait_until(lambda: ends)
    watchdog.stop()
    for other in store.ends:
        other.close()
    reason = "raised KeyError in its watchdog: 'odd'"
    assert store.beats[-1][1:] == [
        "host, pid 8",
        f"process {index} (host, pid 8) {reason}",
    ]
    assert ends == [(1, f"process {index} ends because it {reason}")]
    assert "KeyError: 'odd'" in capsys.readouterr().err


@pytest.mark.parametrize("was_enabled", [False, True])
def test_a_faulthandler_that_was_enabled_stays_as_it_was(monkeypatch, was_enabled):
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


def test_the_thread_asks_no_name_server():
    store = FakeStore()
    watchdog = watch(store)
    watchdog.start()
    wait_until(lambda: store.ends)
    watchdog.stop()
    store.ends[1].close()
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

        def ask(*args: Any, **kwargs: Any) -> None:
            pytest.fail("asked a name server")

        monkeypatch.setattr(socket, "getaddrinfo", ask)
        for _ in range(2):
            connection = store.connect(1.0)
            assert connection is not None
            with connection:
                assert connection.getpeername() == server.getsockname()
    assert store.connect(1.0) is None


def test_a_name_that_nobody_knows_is_no_error(monkeypatch):
    def ask(*args: Any, **kwargs: Any) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "unknown")

    state = types.SimpleNamespace(
        client=object(), process_id=1, num_processes=2, coordinator_address="x:1"
    )
    monkeypatch.setattr(store_module.distributed, "global_state", state)
    monkeypatch.setattr(socket, "getaddrinfo", ask)
    store = Store("folder")
    store.resolve()
    assert store.connect(1.0) is None
