"""Who is let in, and what the others are told; in threads, for no device takes part."""

import json
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxbucket.distributed import rendezvous
from jaxbucket.distributed.rendezvous import Member, listed, meet


@pytest.fixture(name="address")
def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def member(index: int, count: int) -> Member:
    return Member(index, count, f"host-{index}, pid {100 + index}")


def together(address, *members, timeout=20.0, pause=0.0) -> list[Exception | None]:
    """What each of them raises, started one after another."""

    def one(own: Member) -> Exception | None:
        try:
            others = meet(address, own, timeout)
        except (ValueError, TimeoutError) as error:
            return error
        expected = range(1, own.num_processes) if own.process_id == 0 else [0]
        assert sorted(x.process_id for x in others.values()) == list(expected)
        close(others)
        return None

    with ThreadPoolExecutor(len(members)) as pool:
        futures = []
        for own in members:
            futures.append(pool.submit(one, own))
            time.sleep(pause)
        return [future.result() for future in futures]


def assert_all(found: list[Exception | None], kind: type, message: str) -> None:
    for error in found:
        assert type(error) is kind and re.search(message, str(error)), found


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 0, 3, 2)])
@pytest.mark.parametrize("pause", [0.0, 0.15])
def test_all_are_let_in_in_whatever_order_they_come(address, order, pause):
    members = [member(index, 4) for index in order]
    assert together(address, *members, pause=pause) == [None] * 4


def test_many_come_at_once(address):
    assert together(address, *(member(index, 40) for index in range(40))) == [None] * 40


def test_a_run_follows_another_at_the_same_address(address):
    for _ in range(5):
        assert together(address, member(1, 2), member(0, 2)) == [None] * 2


def test_one_too_many_is_told_and_the_others_are_let_in(address):
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(together, address, member(0, 3), member(1, 3))
        (error,) = together(address, member(3, 4))
        assert_all(
            [error],
            ValueError,
            r"Process 0 expects 3 processes.*: process 3 \(host-3, pid 103\) is one",
        )
        assert together(address, member(2, 3)) == [None]
        assert run.result() == [None] * 2


def test_two_under_one_index_are_named_to_all(address):
    twin = Member(1, 3, "other, pid 7")
    found = together(address, member(0, 3), member(1, 3), twin, pause=0.3)
    message = r"two processes 1: host-1, pid 101 and other, pid 7\. Give each its own"
    assert_all(found, ValueError, message)


def test_who_expects_another_number_is_named_to_all(address):
    found = together(address, member(0, 3), member(1, 3), member(2, 4), pause=0.3)
    message = "`num_processes` is 3 in process 0, 4 in process 2. Give all of them"
    assert_all(found, ValueError, message)


def test_one_that_comes_just_after_is_told_the_same(address):
    found = together(address, member(0, 3), member(1, 4), member(2, 3), pause=0.5)
    assert_all(found, ValueError, "`num_processes` is 3 in process 0, 4 in process 1")


def test_who_does_not_come_is_named_to_all(address):
    found = together(address, member(0, 4), member(2, 4), timeout=1.0)
    message = rf"processes 1 and 3 did not come to {address} within 1 s"
    assert_all(found, TimeoutError, f"^{message}")


def test_whoever_came_late_is_told_who_did_not(address):
    # Its own time would be over later than that of process 0.
    found = together(address, member(0, 3), member(1, 3), timeout=1.0, pause=0.6)
    assert_all(found, TimeoutError, rf"^process 2 did not come to {address} within 1 s")


def test_where_process_0_does_not_come_it_is_named(address):
    found = together(address, member(1, 2), timeout=0.5)
    message = rf"Process 0 does not answer at {address} within 0.5 s \(.*refused"
    assert_all(found, TimeoutError, message)


def test_a_host_that_is_not_there_is_named():
    found = together("no-such-host.invalid:1", member(1, 2), timeout=0.5)
    message = r"Process 0 does not answer at no-such-host.invalid:1 within 0.5 s"
    assert_all(found, TimeoutError, message)


def test_one_that_goes_may_come_again(address):
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(together, address, member(0, 3))
        with connect(address) as guest:
            guest.sendall(json.dumps(member(2, 3)).encode())
            time.sleep(0.3)
        assert together(address, member(2, 3), member(1, 3)) == [None] * 2
        assert run.result() == [None]


@pytest.mark.parametrize(
    "said",
    [
        *(b"GET / HTTP/1.1\r\n\r\n", b"[1]", b"\xff", b"{}", b'[-1, 2, ""]', b"null"),
        *(b'[Infinity, 2, ""]', b"[" * 4000),
    ],
)
def test_strangers_at_the_door_do_not_matter(address, said):
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(together, address, member(0, 2))
        with connect(address) as stranger, connect(address) as silent:
            stranger.sendall(said)
            stranger.settimeout(5)
            assert stranger.recv(100) == b""
            assert together(address, member(1, 2)) == [None]
            assert run.result() == [None]
            silent.settimeout(5)
            assert b"All others are here already" in silent.recv(1000)


def test_process_0_that_leaves_is_named(address):
    with listener(address) as server, ThreadPoolExecutor(1) as pool:
        run = pool.submit(together, address, member(1, 2))
        door, _ = server.accept()
        with door:
            door.sendall(rendezvous._GREETING)
            door.recv(1000)
        assert_all(run.result(), ValueError, f"Process 0 has left {address} while")


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n" * 2])
def test_another_program_at_the_address_is_no_process_0(address, said, monkeypatch):
    monkeypatch.setattr(rendezvous, "_SECONDS_TO_LEAVE", 0.3)
    over = threading.Event()

    def serve(server: socket.socket) -> None:
        while not over.is_set():
            with server.accept()[0] as guest:
                guest.sendall(said)

    with listener(address) as server, ThreadPoolExecutor(1) as pool:
        pool.submit(serve, server)
        found = together(address, member(1, 2))
        over.set()
        socket.create_connection(server.getsockname()).close()
    message = r"what listens there waits for no process.*process 1 \(host-1, pid 101\)"
    assert_all(found, ValueError, message)


def test_the_run_before_may_leave_first(address):
    with ThreadPoolExecutor(1) as pool:
        with listener(address) as server:
            run = pool.submit(together, address, member(1, 2))
            server.accept()[0].close()
        assert together(address, member(0, 2)) == [None]
        assert run.result() == [None]


def test_a_port_in_use_is_named(address):
    with listener(address):
        found = together(address, member(0, 2))
    message = f"`coordinator_address='{address}'`: port .* cannot be listened to"
    assert_all(found, ValueError, message)


@pytest.mark.parametrize(
    ("processes", "words"),
    [
        ([3], "process 3"),
        ([1, 3], "processes 1 and 3"),
        ([*range(8)], "processes 0, 1, 2, 3, 4, 5, 6 and 7"),
        ([*range(20)], "processes 0, 1, 2, 3, 4, 5, 6, 7 and 12 more"),
    ],
)
def test_processes_are_listed(processes, words):
    assert listed(processes) == words


def close(others: dict[socket.socket, Member]) -> None:
    for other in others:
        other.close()


def listener(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_server((host, int(port)))


def connect(address: str) -> socket.socket:
    """To a door that may not be open yet; past its greeting."""
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + 10
    while True:
        try:
            guest = socket.create_connection((host, int(port)))
            break
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    assert guest.recv(100) == rendezvous._GREETING
    return guest
