"""Shapes planned by time: measured once, saved, and the same in all processes."""

import argparse
import importlib
import json
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

import jaxbucket as jb

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "benchmarks" / "end_to_end"))
from records import StepRecord

ROOT = pathlib.Path(__file__).parents[2]
RUN = ROOT / "benchmarks" / "end_to_end" / "run.py"
SMALL = (
    *("--steps", "6", "--width", "16", "--layers", "1", "--max-len", "96"),
    *("--max-tokens", "512", "--cost", "time"),
)


@pytest.fixture
def jsonl(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "data.jsonl"
    lines = [json.dumps({"text": f"{n} " + "x" * (n * n % 90)}) for n in range(300)]
    path.write_text("\n".join(lines) + "\n")
    return path


def run_job(*args: object, count: int = 1) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", RUN, *SMALL, *args]
    if count > 1:
        launch = ROOT / "scripts" / "launch_local.py"
        command = [sys.executable, launch, "-n", count, "-d", 1, "--", *command]
    return subprocess.run(
        list(map(str, command)),
        env=os.environ | {"XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        check=False,
    )


def summary_of(path: pathlib.Path, run: subprocess.CompletedProcess[str]) -> dict:
    assert run.returncode == 0, run.stderr + run.stdout
    return json.loads(path.read_text())


@pytest.mark.exhaustive
def test_a_plan_by_time_is_compared_with_the_run_and_resumed(jsonl, tmp_path):
    out, folder = tmp_path / "out.json", tmp_path / "run"
    options = ("--data", jsonl, "--json", out, "--checkpoint", folder)
    run = run_job(*options, "--num-buckets", "auto")
    began = summary_of(out, run)
    recorded = " ".join(run.stdout.split())
    assert re.search(
        r"Measured in \d+ s on \d shapes: a step takes .* compiling", recorded
    )
    assert re.search(
        r"\d shapes?, compiling takes .* s and .* epochs? takes? .* in total", recorded
    )
    assert re.search(r"6 steps: .* s predicted, .* s measured \([+-]\d+%\)", recorded)
    # Other tools can read the plan.
    kept = (folder / "plan.json").read_text()
    plan = jb.BucketPlan.from_json(kept)
    assert plan == jb.BucketPlan.from_json(json.dumps(began["plan"]))
    assert plan.cost_unit == "s"
    # Programs compiled to measure are not counted.
    assert began["compile"]["train_step"]["ahead"] == len(plan)
    assert began["compile"]["train_step"]["later"] == 0
    numbers = began["prediction"]
    assert numbers["steps"] == 6
    assert numbers["epoch_predicted_seconds"] == began["epoch"]["epoch_cost"]
    # The time of the run includes measuring.
    assert began["seconds"] > began["planning"]["seconds"] > 0

    resumed = run_job(*options, "--num-buckets", "auto", "--steps", 9, "--resume")
    summary = summary_of(out, resumed)
    assert "The shapes are the same as before the run was resumed." in resumed.stdout
    for name in ("plan", "planning", "schedule"):
        assert summary[name] == began[name]
    assert summary["train"]["first_step"] == 6
    assert (folder / "plan.json").read_text() == kept

    # All processes use the plan of process 0: `check_agreement` refuses other shapes.
    more = ("--num-buckets", 2, "--steps", 10, "--resume-changed")
    summary = summary_of(out, run_job(*options, *more, count=2))
    assert len(summary["compiled"]) == len(summary["plan"]["buckets"]) == 2
    # The new plan is saved, for the next `--resume`.
    saved = jb.BucketPlan.from_json((folder / "plan.json").read_text())
    assert len(saved) == 2


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(RUN.parent)
    return importlib.import_module("shapes")


LENGTHS = np.random.default_rng(0).lognormal(5, 1, 3000).clip(1, 1024).astype(int)
COST = jb.plan.StepTime(0.01, 6e-5, 8e-8)


def measure(some):
    return jb.train.Calibration(
        {b: COST(b.batch_size, b.seq_len) for b in some}, dict.fromkeys(some, 3.0)
    )


def arguments(**options):
    defaults = {
        **{"num_buckets": "auto", "boundaries": "optimal", "checkpoint": None},
        **{"steps": 700, "seconds": None, "resume": False, "resume_changed": False},
        "pack": "never",
    }
    return argparse.Namespace(**(defaults | options))


def by_time(shapes, measure=measure, **options):
    limits = jb.Limits(max_tokens=4096, batch_size_multiple=4, seq_len_multiple=32)
    return shapes.by_time(
        arguments(**options), LENGTHS, limits, jb.Processes(), measure
    )


def epochs_of(planned):
    return float(re.search(r"and ([\d.e+]+) epochs", planned.words)[1])


@pytest.mark.parametrize("steps", [5, 100, 10_000])
def test_a_run_by_steps_has_the_epochs_of_its_own_plan(shapes, steps):
    planned = by_time(shapes, steps=steps)
    per_epoch = jb.report(planned.plan, LENGTHS).steps_per_epoch
    assert epochs_of(planned) == pytest.approx(steps / per_epoch, rel=0.06)


@pytest.mark.parametrize("seconds", [40, 200, 5000])
def test_a_timed_run_uses_the_plan_that_fits_the_most_epochs(shapes, seconds):
    planned = by_time(shapes, seconds=seconds)
    limits = jb.Limits(
        max_tokens=4096, batch_size_multiple=4, seq_len_multiple=32, cost_fn=COST
    )
    curve = jb.plan.plan_curve(LENGTHS, limits, compile_seconds=3.0, num_epochs=1e6)
    epochs = {
        point.num_buckets: (seconds - point.compile_seconds) / point.epoch_seconds
        for point in curve.points
    }
    # Up to the rounding of the number of epochs.
    number = seconds - 3.0 * len(planned.plan)
    number /= jb.report(planned.plan, LENGTHS).epoch_cost
    assert number > max(epochs.values()) * 0.98
    assert epochs_of(planned) == pytest.approx(number, rel=0.06)


def unmeasured(some):
    raise AssertionError("measured again")


def test_a_saved_plan_is_not_measured_again(shapes, tmp_path):
    options = {"checkpoint": str(tmp_path), "resume": True}
    # Killed before its first checkpoint, or never started.
    planned = by_time(shapes, **options)
    assert not planned.was_loaded
    planned.save(str(tmp_path))
    assert list(tmp_path.iterdir()) == [tmp_path / "plan.json"]
    kept = by_time(shapes, unmeasured, **options)
    assert kept.was_loaded and kept.plan == planned.plan
    assert kept.to_json() == planned.to_json()
    with pytest.raises(ValueError, match="changed: --num-buckets auto -> 2"):
        by_time(shapes, unmeasured, num_buckets=2, **options)
    # A new run is planned anew.
    assert not by_time(shapes, checkpoint=str(tmp_path)).was_loaded


def test_a_run_planned_by_tokens_does_not_resume_by_time(shapes, tmp_path):
    (tmp_path / "6").mkdir()
    options = {"checkpoint": str(tmp_path)}
    with pytest.raises(ValueError, match="not planned by time, because it has no plan"):
        by_time(shapes, unmeasured, resume=True, **options)
    assert not by_time(shapes, resume_changed=True, **options).was_loaded


@pytest.mark.parametrize("end", [0, 10, -1])
def test_a_truncated_plan_is_refused(shapes, tmp_path, end):
    options = {"checkpoint": str(tmp_path), "resume": True}
    text = by_time(shapes).to_json()
    (tmp_path / "plan.json").write_text(text[:end])
    with pytest.raises(ValueError, match=r"plan\.json: "):
        by_time(shapes, unmeasured, **options)
    (tmp_path / "plan.json").write_text(by_time(shapes).plan.to_json())
    with pytest.raises(ValueError, match="does not have the options"):
        by_time(shapes, unmeasured, **options)


def test_predictions_are_compared_with_the_time_of_steps(shapes):
    short, long = jb.Bucket(4, 8), jb.Bucket(2, 16)
    plan = jb.BucketPlan(
        (short, long), max_tokens=32, step_costs=(0.1, 0.4), cost_unit="s"
    )
    epoch = jb.report(plan, [8] * 12 + [16] * 4)
    records = [StepRecord(n, short, t, 1.0, 32, 0.1) for n, t in enumerate((0.1, 0.3))]
    result = shapes.prediction(plan, epoch, records)
    assert result["predicted_seconds"] == pytest.approx(0.2)
    assert result["measured_seconds"] == pytest.approx(0.4)
    assert result["epoch_steps"] == 5
    assert result["epoch_predicted_seconds"] == pytest.approx(3 * 0.1 + 2 * 0.4)
    assert result["epoch_measured_seconds"] == pytest.approx(3 * 0.2 + 2 * 0.4)
