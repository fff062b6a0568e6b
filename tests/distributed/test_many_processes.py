"""The end-to-end job in several processes, compared with one process."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[2]
RUN = ROOT / "benchmarks" / "end_to_end" / "run.py"
LAUNCH = ROOT / "scripts" / "launch_local.py"
STEPS = 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with data, and with the summary of one process on one device."""
    folder = tmp_path_factory.mktemp("many")
    lines = [json.dumps({"text": f"{n} " + "xyz " * (n % 20)}) for n in range(300)]
    (folder / "data.jsonl").write_text("\n".join(lines) + "\n")
    run = start(folder, 1, 1, "--json", "one.json")
    out, _ = run.communicate(timeout=300)
    assert run.returncode == 0, out
    return folder


def start(
    folder: pathlib.Path, count: int, devices: int, *options: object
) -> subprocess.Popen[str]:
    command = [
        *(sys.executable, LAUNCH, "-n", count, "-d", devices, "--", sys.executable),
        *("-W", "error", RUN, "--data", "data.jsonl", "--steps", STEPS),
        *("--width", 16, "--layers", 1, "--max-len", 64, "--max-tokens", 1024),
        *("--num-buckets", 2, "--batch-size-multiple", 8, "--dropout", 0.1),
        *("--lr", 2e-3, *options),
    ]
    return subprocess.Popen(
        list(map(str, command)),
        cwd=folder,
        # XLA of jax 0.9 logs more than a pipe holds until it is read.
        env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def assert_same(folder: pathlib.Path, name: str, first: int = 0) -> None:
    one, result = (json.loads((folder / x).read_text()) for x in ("one.json", name))
    assert result["plan"] == one["plan"]
    for step in ("train_step", "eval_step"):
        assert result["compile"][step]["ahead"] == len(one["plan"]["buckets"])
        assert result["compile"][step]["later"] == 0
    assert result["train"]["first_step"] == first
    assert result["train"]["batches_digest"] == one["train"]["batches_digest"]
    losses, want = result["train"]["losses"], one["train"]["losses"][first:]
    np.testing.assert_allclose(losses, want, rtol=0, atol=1e-5)
    got, want = (x["held_out"]["bits_per_byte"] for x in (result, one))
    np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.exhaustive
def test_two_processes_train_as_one(folder):
    run = start(folder, 2, 2, "--model-devices", 4, "--json", "two.json")
    out, _ = run.communicate(timeout=300)
    assert run.returncode == 0, out
    # Only one of the processes prints.
    assert out.count("Held out: ") == 1
    assert_same(folder, "two.json")


@pytest.mark.exhaustive
def test_a_stopped_run_resumes_in_another_number_of_processes(folder, tmp_path):
    checkpoints = tmp_path / "runs"
    options = ("--save-every", 5, "--fully-sharded")
    run = start(folder, 2, 1, *options, "--checkpoint", checkpoints)
    deadline = time.monotonic() + 300
    while not (checkpoints / "10").exists():
        assert time.monotonic() < deadline and run.poll() is None
        time.sleep(0.01)
    run.send_signal(signal.SIGTERM)
    out, _ = run.communicate(timeout=150)
    assert run.returncode == 128 + signal.SIGTERM, out
    step = max(int(path.name) for path in checkpoints.glob("[0-9]*"))
    assert f"Stopped by SIGTERM after step {step}" in out
    saving = ("--checkpoint", checkpoints, "--resume", "--json", "alone.json")
    run = start(folder, 1, 1, *options, *saving)
    out, _ = run.communicate(timeout=300)
    assert run.returncode == 0, out
    assert_same(folder, "alone.json", first=step)
