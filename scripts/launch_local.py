"""Starts several processes of one program on this machine, as a cluster would.

    python scripts/launch_local.py -n 4 -d 2 -- python examples/train_lm.py

Each of them has so many virtual CPU devices, finds the others by the variables
JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, and has its number before
every line it prints. None outlives this one. The exit status is that of the first that
failed, or 0.
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
from typing import IO

SECONDS_TO_READ = 2.0
_PR_SET_PDEATHSIG = 1


def main() -> int:
    args = parse_arguments()
    address = f"127.0.0.1:{args.port or free_port()}"
    # What it cannot print must not keep it from reading.
    sys.stdout.reconfigure(errors="replace")
    signals = [signal.SIGINT, signal.SIGTERM]
    asked: list[signal.Signals] = []
    for number in signals:
        signal.signal(number, lambda number, frame: asked.append(number))
    processes = [start(args, address, index) for index in range(args.processes)]
    threads = [
        threading.Thread(target=copy, args=(index, process.stdout, asked), daemon=True)
        for index, process in enumerate(processes)
    ]
    for thread in threads:
        thread.start()
    try:
        return wait(processes, asked, args.grace)
    finally:
        for process in processes:
            end(process)
        for thread in threads:
            # Longer only if something that has left its session still has the pipe.
            thread.join(SECONDS_TO_READ)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Start several processes of one program on this machine.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("-n", "--processes", type=positive, default=2, help="so many")
    parser.add_argument(
        "-d", "--devices", type=positive, default=1, help="virtual devices of each"
    )
    parser.add_argument("--port", type=positive, help="by default one that is free")
    parser.add_argument(
        "--grace",
        type=float,
        default=90.0,
        help="seconds that the others have after one has failed; longer than they "
        "need to notice",
    )
    parser.add_argument("command", nargs="+", help="the program, after --")
    args = parser.parse_args()
    if shutil.which(args.command[0]) is None:
        parser.error(f"{args.command[0]} is no program")
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
    others = os.environ.get("XLA_FLAGS", "")
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_NUM_PROCESSES": str(args.processes),
        "JAX_PROCESS_ID": str(index),
        # The last one counts.
        "XLA_FLAGS": f"{others} --xla_force_host_platform_device_count={args.devices}",
        "PYTHONUNBUFFERED": "1",
    }
    return subprocess.Popen(
        args.command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        # Ctrl-C comes to this one, which hands it on.
        start_new_session=True,
        preexec_fn=die_with_parent if sys.platform == "linux" else None,
    )


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def copy(index: int, lines: IO[str] | None, asked: list[signal.Signals]) -> None:
    for line in lines or ():
        try:
            sys.stdout.write(f"[{index}] {line}")
            sys.stdout.flush()
        except OSError:
            # Nobody reads any more. The rest is taken, or its writer would hang.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if not asked:
                asked.append(signal.SIGTERM)


def wait(
    processes: list[subprocess.Popen[str]], asked: list[signal.Signals], grace: float
) -> int:
    """Until all have ended, or one has failed and the others had time to."""
    failed, since, told = 0, 0.0, 0
    while any(process.poll() is None for process in processes):
        for number in asked[told:]:
            told += 1
            for process in processes:
                if process.poll() is None:
                    process.send_signal(number)
        statuses = [process.poll() for process in processes]
        if not failed and any(statuses):
            failed, since = next(filter(None, statuses)), time.monotonic()
        if failed and time.monotonic() - since > grace:
            left = [str(i) for i, status in enumerate(statuses) if status is None]
            print(
                f"launch_local.py: {grace:g} s after one failed, {', '.join(left)} "
                "still ran: ended by force. Give more --grace.",
                file=sys.stderr,
            )
            break
        time.sleep(0.05)
    failed = failed or next(filter(None, (process.poll() for process in processes)), 0)
    # As a shell says of a signal.
    return failed if failed >= 0 else 128 - failed


def end(process: subprocess.Popen[str]) -> None:
    """The process, and all that it has started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


if __name__ == "__main__":
    sys.exit(main())
