"""A run that was stopped in any way resumes as if it had never been stopped."""

import importlib
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

# Quick tests of a whole run that resumes are in tests/examples/test_examples.py.
pytestmark = pytest.mark.exhaustive

RUN = pathlib.Path(__file__).parents[2] / "benchmarks" / "end_to_end" / "run.py"
STEPS = 160
NUM_DOCUMENTS = 300
# Each kill takes half a minute:
# JAXBUCKET_KILLS=10 python -m pytest -m exhaustive -k kill
KILLS = int(os.environ.get("JAXBUCKET_KILLS", "2"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with data, and with the summary of a run that was never stopped."""
    folder = tmp_path_factory.mktemp("resume")
    lines = [
        json.dumps({"text": f"{n} " + "xyz " * (n % 20)}) for n in range(NUM_DOCUMENTS)
    ]
    (folder / "data.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "less.jsonl").write_text("\n".join(lines[:200]) + "\n")
    # The same training documents, with different held-out ones.
    held_out = held_out_texts(folder / "data.jsonl")
    changed = [
        line.replace("xyz", "zyx") if json.loads(line)["text"] in held_out else line
        for line in lines
    ]
    (folder / "held.jsonl").write_text("\n".join(changed) + "\n")
    run = start(folder, "--json", "whole.json")
    _, error = run.communicate(timeout=600)
    assert run.returncode == 0, error
    return folder


def held_out_texts(path: pathlib.Path) -> set[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(RUN.parent)
        documents = importlib.import_module("example").documents
    splits = documents.load(str(path))
    return {bytes(example["tokens"]).decode() for example in splits.held_out}


def command(*args: object, data="data.jsonl") -> list[str]:
    """Returns options of a small run. All runs compile the same programs."""
    words = [
        *("--data", data, "--steps", STEPS, "--width", 16, "--layers", 1),
        *("--max-len", 64, "--max-tokens", 512, "--num-buckets", 2),
        *("--dropout", 0.1, "--save-every", 10, "--executables", "executables", *args),
    ]
    return list(map(str, words))


def run_script(
    folder: pathlib.Path, script: pathlib.Path, *words: str
) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-W", "error", script, *words],
        cwd=folder,
        # XLA of jax 0.9 logs more than a pipe holds until it is read.
        env=os.environ | {"XLA_FLAGS": "", "TF_CPP_MIN_LOG_LEVEL": "3"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def start(
    folder: pathlib.Path, *args: object, data="data.jsonl", script=RUN
) -> subprocess.Popen:
    return run_script(folder, script, *command(*args, data=data))


def latest(checkpoints: pathlib.Path) -> int:
    """Returns the newest saved step, or -1."""
    names = [p.name for p in checkpoints.glob("*") if p.name.isdecimal()]
    return max(map(int, names), default=-1)


def stop_after(
    run: subprocess.Popen, checkpoints: pathlib.Path, step: int, number: int
) -> None:
    """Sends a signal at a random moment after a step was saved."""
    deadline = time.monotonic() + 600
    while latest(checkpoints) < step and run.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    time.sleep(random.uniform(0, 0.15))
    run.send_signal(number)


def train_to_the_end(
    folder: pathlib.Path, checkpoints: pathlib.Path, *args: object, data="data.jsonl"
) -> tuple[dict, str]:
    """Returns the summary of a run, and what it prints."""
    args = ("--checkpoint", checkpoints, *args, "--json", "end.json")
    run = start(folder, *args, data=data)
    out, error = run.communicate(timeout=600)
    assert run.returncode == 0, error
    summary = json.loads((folder / "end.json").read_text())
    assert summary["train"]["steps"] == STEPS
    return summary, out


def check_same_end(folder: pathlib.Path, resumed: dict) -> None:
    whole = json.loads((folder / "whole.json").read_text())
    assert resumed["params_digest"] == whole["params_digest"]
    bits = [x["held_out"]["bits_per_byte"] for x in (resumed, whole)]
    assert bits[0] == bits[1]
    assert resumed["train"]["batches_digest"] == whole["train"]["batches_digest"]


def test_a_run_killed_at_random_moments_ends_with_the_same_parameters(folder):
    checkpoints = folder / "killed"
    stops = [STEPS * kill // (KILLS + 1) for kill in range(KILLS)]
    for step in stops:
        run = start(folder, "--checkpoint", checkpoints, "--resume")
        stop_after(run, checkpoints, step, signal.SIGKILL)
        out, _ = run.communicate(timeout=600)
        assert run.returncode == -signal.SIGKILL
        # There is nothing to resume at first.
        assert ("starting at step 0" in " ".join(out.split())) == (step == 0)
    resumed, out = train_to_the_end(folder, checkpoints, "--resume")
    assert re.search(r"Resuming at step \d+", out)
    check_same_end(folder, resumed)


def test_a_run_compiles_each_shape_once_and_sees_every_document(folder):
    whole = json.loads((folder / "whole.json").read_text())
    shapes = len(whole["plan"]["buckets"])
    for step in ("train_step", "eval_step"):
        assert whole["compile"][step]["ahead"] == shapes == 2
        assert whole["compile"][step]["later"] == 0
    documents = whole["epoch"]["examples"] + whole["held_out"]["documents"]
    assert documents == NUM_DOCUMENTS
    assert 0 < whole["held_out"]["bits_per_byte"] < 16


def command_to_resume(out: str) -> str:
    (printed,) = [line for line in out.splitlines() if line.startswith("python ")]
    return printed


@pytest.fixture(scope="module")
def stopped(folder: pathlib.Path) -> pathlib.Path:
    """The checkpoints of a run that a signal made save and end."""
    checkpoints = folder / "stopped"
    run = start(folder, "--checkpoint", checkpoints)
    stop_after(run, checkpoints, 30, signal.SIGTERM)
    out, error = run.communicate(timeout=600)
    assert run.returncode == 128 + signal.SIGTERM, error
    assert f"Stopped by SIGTERM after step {latest(checkpoints)}" in out
    assert command_to_resume(out).endswith(f"--checkpoint {checkpoints} --resume")
    return checkpoints


def test_a_stopped_run_resumes_with_the_same_result(folder, stopped):
    checkpoints = shutil.copytree(stopped, folder / "resumed")
    resumed, _ = train_to_the_end(folder, checkpoints, "--resume")
    check_same_end(folder, resumed)


def stop_at_batch(folder: pathlib.Path, at: int, *args: object, data: str) -> str:
    """Returns how a run resumes that receives a signal when it loads a batch."""
    script = folder / "early.py"
    script.write_text(
        f"""
import signal, sys
sys.path.insert(0, {str(RUN.parent)!r})
import run
prefetch = run.jb.sharding.prefetch_to_mesh
def prefetch_with_signal(*args):
    for number, batch in enumerate(prefetch(*args)):
        if number == {at}:
            signal.raise_signal(signal.SIGINT)
        yield batch
run.jb.sharding.prefetch_to_mesh = prefetch_with_signal
run.main()
"""
    )
    run = start(folder, *args, script=script, data=data)
    out, error = run.communicate(timeout=600)
    assert run.returncode == 128 + signal.SIGINT, error
    return command_to_resume(out).split()[-1]


def test_the_printed_command_resumes_a_run_with_different_data(folder, stopped):
    digests = set()
    # Once the changes are saved, later changes are refused again.
    for at, how in ((0, "--resume-changed"), (5, "--resume")):
        checkpoints = shutil.copytree(stopped, folder / f"changed {at}")
        changed = ("--checkpoint", checkpoints, "--seed", 3, "--resume-changed")
        assert stop_at_batch(folder, at, *changed, data="less.jsonl") == how
        options = ("--seed", 3, how)
        end, _ = train_to_the_end(folder, checkpoints, *options, data="less.jsonl")
        digests.add(end["train"]["batches_digest"])
    # Both runs have the same batches, so no batch is repeated after a stop.
    (digest,) = digests
    whole = json.loads((folder / "whole.json").read_text())["train"]
    assert digest != whole["batches_digest"]


def test_a_signal_during_evaluation_loses_no_checkpoint(folder):
    # The last part of every save is slow, as for a large state.
    code = (
        f"import sys, time; sys.path.insert(0, {str(RUN.parent)!r})\n"
        "from jaxbucket import Checkpoints\n"
        "import run\n"
        "def slow(self, seal=Checkpoints._seal):\n"
        "    time.sleep(2)\n"
        "    seal(self)\n"
        "def evaluate(self, state, log):\n"
        "    print('EVALUATING', flush=True)\n"
        "    time.sleep(60)\n"
        "Checkpoints._seal, run.HeldOut.evaluate = slow, evaluate\n"
        "run.main()\n"
    )
    script = folder / "slow.py"
    script.write_text(code)
    checkpoints = folder / "evaluating"
    options = ("--checkpoint", checkpoints, "--save-every", 1000, "--steps", 20)
    run = start(folder, *options, script=script)
    for line in run.stdout:
        if "EVALUATING" in line:
            break
    run.send_signal(signal.SIGTERM)
    run.communicate(timeout=600)
    assert latest(checkpoints) == 20


REFUSED = {
    "seed": (["--resume", "--seed", 3], {}, "schedule seed 0 -> 3"),
    "plan": (["--resume", "--max-tokens", 640], {}, "plan max tokens 512 -> 640"),
    "data": (["--resume"], {"data": "less.jsonl"}, r"data examples \d+ -> \d+"),
    "held-out data": (["--resume"], {"data": "held.jsonl"}, "held-out documents have"),
    "model": (["--resume", "--width", 32], {}, "is of a different model or optimizer"),
    "no --resume": ([], {}, r"has a run at step .*\. Continue it with `--resume`"),
    "steps": (["--resume", "--steps", 9], {}, "`--steps 9` is before step"),
    "policy": (["--resume", "--policy", "dynamic"], {}, "cannot be resumed"),
    "packing": (["--resume", "--pack", "always"], {}, "packing|--pack never -> always"),
}
DAMAGED = (
    r"The checkpoint .* is damaged: .*\. Delete this directory to resume from step"
)
# Runs several commands in one process, and prints how each of them ends.
SEVERAL = f"""
import json, sys
sys.path.insert(0, {str(RUN.parent)!r})
import run
for words in json.loads(sys.argv[1]):
    sys.argv = ["run.py", *words]
    try:
        run.main()
    except SystemExit as end:
        print("ENDED", json.dumps(end.code), flush=True)
"""


@pytest.fixture(scope="module")
def ends(folder, stopped) -> dict[str, str]:
    """How runs that resume from the checkpoints end, by name."""
    before = {path: path.stat().st_mtime_ns for path in stopped.rglob("*")}
    commands = [
        command(*args, "--checkpoint", stopped, **options)
        for args, options, _ in REFUSED.values()
    ]
    for spoil in ("delete", "truncate"):
        shutil.copytree(stopped, folder / spoil)
        newest = folder / spoil / str(latest(stopped))
        path = max(newest.rglob("*"), key=lambda path: path.stat().st_size)
        if spoil == "delete":
            path.unlink()
        else:
            os.truncate(path, path.stat().st_size // 2)
        commands.append(command("--checkpoint", folder / spoil, "--resume"))
    script = folder / "several.py"
    script.write_text(SEVERAL)
    run = run_script(folder, script, json.dumps(commands))
    out, error = run.communicate(timeout=300)
    assert run.returncode == 0, error
    endings = re.findall(r"^ENDED (.*)$", out, re.MULTILINE)
    names = [*REFUSED, "delete", "truncate"]
    assert {path: path.stat().st_mtime_ns for path in stopped.rglob("*")} == before
    return dict(zip(names, map(json.loads, endings), strict=True))


@pytest.mark.parametrize("case", [*REFUSED, "delete", "truncate"])
def test_a_run_that_cannot_be_resumed_is_refused_in_one_sentence(ends, case):
    message = REFUSED[case][2] if case in REFUSED else DAMAGED
    assert re.fullmatch(rf"run\.py: .*({message}).*", ends[case])
