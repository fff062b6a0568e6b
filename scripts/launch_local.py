"""Starts several processes of one program on this machine, as a cluster would.

    python scripts/launch_local.py -n 4 -d 2 -- python examples/train_lm.py

Each process has `-d` virtual CPU devices, and finds the others by the variables
JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID. Every line of output is
prefixed with the index of its process. For each process that failed, a line says how.
No process outlives the launcher. The exit status is 0, or that of the first process
that failed: 128 + N if signal N killed it.
"""

import argparse
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

SECONDS_TO_READ = 2.0
_PR_SET_PDEATHSIG = 1


def main() -> int:
    args = parse_arguments()
    address = f"127.0.0.1:{args.port or free_port()}"
    # A character that cannot be printed must not end the copying of the output.
    sys.stdout.reconfigure(errors="replace")
    signals = [signal.SIGINT, signal.SIGTERM]
    received: list[signal.Signals] = []
    for number in signals:
        signal.signal(number, lambda number, frame: received.append(number))
    processes = [start(args, address, index) for index in range(args.processes)]
    threads = [
        threading.Thread(target=copy, args=(index, process, received), daemon=True)
        for index, process in enumerate(processes)
    ]
    for thread in threads:
        thread.start()
    try:
        return wait(processes, received, args.grace)
    finally:
        for process in processes:
            end(process)
        for thread in threads:
            # Wait with a timeout, because a process that left its session may keep the
            # pipe open.
            thread.join(SECONDS_TO_READ)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Start several processes of one program on this machine. Ctrl-C "
        "and SIGTERM are forwarded to all of them.",
        epilog="Prints a line for each process that failed. The exit status is 0, or "
        "that of the first process that failed: 128 + N if signal N killed it, such as "
        "137 for SIGKILL.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "-n", "--processes", type=positive, default=2, help="number of processes"
    )
    parser.add_argument(
        "-d",
        "--devices",
        type=positive,
        default=1,
        help="number of virtual devices per process",
    )
    parser.add_argument(
        "--port", type=positive, help="port of process 0; by default a free one"
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=90.0,
        help="seconds after a failure until the other processes are killed; should "
        "exceed the time that they need to detect it",
    )
    parser.add_argument("command", nargs="+", help="program and arguments, after --")
    args = parser.parse_args()
    if shutil.which(args.command[0]) is None:
        parser.error(f"`{args.command[0]}` is not an executable program.")
    return args


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(args: argparse.Namespace, address: str, index: int) -> subprocess.Popen[str]:
    flags = os.environ.get("XLA_FLAGS", "")
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_NUM_PROCESSES": str(args.processes),
        "JAX_PROCESS_ID": str(index),
        # The last occurrence of a flag takes effect.
        "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count={args.devices}",
        "PYTHONUNBUFFERED": "1",
    }
    return subprocess.Popen(
        args.command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        # So that only the launcher receives Ctrl-C, and forwards it.
        start_new_session=True,
        preexec_fn=die_with_parent if sys.platform == "linux" else None,
    )


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def copy(
    index: int, process: subprocess.Popen[str], received: list[signal.Signals]
) -> None:
    """Prints the lines of a process and how it failed, with its index as a prefix."""
    for line in output(process):
        try:
            sys.stdout.write(f"[{index}] {line}\n")
            sys.stdout.flush()
        except OSError:
            # The reader of our output is gone. Discard the rest, because the process
            # would hang if nobody read it.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if not received:
                received.append(signal.SIGTERM)


def output(process: subprocess.Popen[str]) -> Iterator[str]:
    """Yields the lines of a process, and a line about its exit if it failed."""
    for line in process.stdout or ():
        yield line.removesuffix("\n")
    if status := process.wait():
        yield describe(status)


def describe(status: int) -> str:
    if status > 0:
        return f"exited with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:  # Real-time signals have no name.
        return f"was killed by signal {-status}"


def wait(
    processes: list[subprocess.Popen[str]], received: list[signal.Signals], grace: float
) -> int:
    """Waits until all processes have ended, or `grace` seconds after a failure.

    Forwards the signals received meanwhile. Returns the exit status.
    """
    failed, since, num_forwarded = 0, 0.0, 0
    while any(process.poll() is None for process in processes):
        for number in received[num_forwarded:]:
            num_forwarded += 1
            for process in processes:
                if process.poll() is None:
                    process.send_signal(number)
        statuses = [process.poll() for process in processes]
        if not failed and any(statuses):
            failed, since = next(filter(None, statuses)), time.monotonic()
        if failed and time.monotonic() - since > grace:
            running = [str(i) for i, status in enumerate(statuses) if status is None]
            print(
                f"launch_local.py: {grace:g} s after a process failed, these processes "
                f"were still running and are killed: {', '.join(running)}. Raise "
                "--grace if they need more time.",
                file=sys.stderr,
            )
            break
        time.sleep(0.05)
    failed = failed or next(filter(None, (process.poll() for process in processes)), 0)
    # Like a shell, which adds the number of a signal to 128.
    return failed if failed >= 0 else 128 - failed


def end(process: subprocess.Popen[str]) -> None:
    """Kills a process and all processes that it has started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


if __name__ == "__main__":
    sys.exit(main())
