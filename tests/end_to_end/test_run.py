"""The end-to-end job as a user starts it, and its comparison of all ways."""

import importlib
import json
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

RUN = pathlib.Path(__file__).parents[2] / "benchmarks" / "end_to_end" / "run.py"
SMALL = (
    *("--steps", "6", "--width", "16", "--layers", "1", "--max-len", "64"),
    *("--max-tokens", "512", "--num-buckets", "2"),
)


def run_job(*args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", RUN, *SMALL, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


# A run on one device is in test_resume.py.
@pytest.mark.exhaustive
def test_packed_rows_are_trained_on_and_resumed(jsonl, tmp_path):
    """On simulated devices, without a recompilation."""
    out, folder = tmp_path / "summary.json", tmp_path / "run"
    options = (
        *("--data", jsonl, "--field", "body", "--pack", "always", "--cost", "time"),
        *("--checkpoint", folder, "--json", out, "--devices", 4),
        *("--mode", "shard_map", "--dropout", 0.1),
    )
    run = run_job(*options)
    assert run.returncode == 0, run.stderr
    assert "Rows are packed" in " ".join(run.stdout.split())
    summary = json.loads(out.read_text())
    epoch = summary["epoch"]
    assert epoch["packed_examples"] + summary["held_out"]["documents"] == 200
    assert epoch["examples"] < epoch["packed_examples"]
    assert len(summary["devices"]) == 4
    for step in ("train_step", "eval_step"):
        shapes = summary["compile"][step]["ahead"]
        assert shapes > 0 and summary["compile"][step]["later"] == 0
        assert f"{step} compiled {shapes} times" in " ".join(run.stdout.split())
    assert summary["train"]["steps"] == 6
    assert 0 < summary["held_out"]["bits_per_byte"] < 16
    # The run resumes with the same rows, although they were planned with step times.
    run = run_job(*options, "--steps", 9, "--resume")
    assert run.returncode == 0, run.stderr
    assert "Resuming at step 6." in run.stdout
    again = json.loads(out.read_text())
    assert again["plan"] == summary["plan"] and again["schedule"] == summary["schedule"]


@pytest.mark.exhaustive
def test_all_ways_are_compared(jsonl, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    cache.mkdir()
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(cache))
    out, picture = tmp_path / "compare.json", tmp_path / "compare.png"
    run = run_job(
        *("--data", jsonl, "--field", "body", "--compare", "--seconds", 1),
        *("--seeds", 1, "--json", out, "--plot", picture, "--devices", 1),
    )
    assert run.returncode == 0, run.stderr
    runs = json.loads(out.read_text())
    ways = ["bucketed", "packed", "auto", "pad-to-max", "dynamic", "grain-pack"]
    assert list(runs) == ways
    for way, summaries in runs.items():
        assert [summary["arguments"]["seed"] for summary in summaries] == [0]
        assert re.search(rf"^ *{way} +\d+ ", run.stdout, re.MULTILINE)
        for summary in summaries:
            compiled = summary["compile"]["train_step"]
            if way == "dynamic":
                shapes = len(summary["buckets"])
                assert (compiled["ahead"], compiled["later"]) == (0, shapes)
            else:
                shapes = len(summary["plan"]["buckets"])
                assert (compiled["ahead"], compiled["later"]) == (shapes, 0)
            reason = summary["planning"]["words"]
            is_packed = summary["epoch"]["packed_examples"] > 0
            assert is_packed == reason.startswith("Rows are packed")
            assert is_packed or way != "packed"
            # Every way is evaluated on all held-out documents.
            first = runs["bucketed"][0]["held_out"]["documents"]
            assert summary["held_out"]["documents"] == first > 0
            assert summary["seconds"] >= 1
            assert 0 < summary["held_out"]["bits_per_byte"] < 16
            seconds = [point["seconds"] for point in summary["curve"]]
            assert seconds == sorted(seconds)
            assert seconds[-1] == summary["seconds"]
    assert picture.stat().st_size > 10_000
    # No run has loaded a program that another one compiled.
    assert not list(cache.iterdir())


def summary_of_a_run(speed: float, bits: float | None) -> dict:
    """Returns the numbers of a run of 10 s that are compared."""
    bucket = {"bucket": [4, 64], "steps": 10, "seconds_per_token": 1e-6}
    return {
        "seconds": 10.0,
        "planning": {"seconds": 1.0},
        "compile": {"train_step": {"ahead": 2, "later": 0, "seconds": 4.0}},
        "train": {"padded_tokens": 20 * speed, "real_tokens": 10 * speed},
        "buckets": [bucket, bucket],
        "held_out": {"bits_per_byte": bits},
        "curve": [
            {"seconds": s, "bits_per_byte": bits and bits + 10 - s} for s in (5, 10)
        ],
    }


@pytest.fixture
def comparison(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(RUN.parent)
    return importlib.import_module("comparison")


def test_the_table_has_means_and_spreads_over_seeds(comparison):
    runs = {
        "bucketed": [summary_of_a_run(1000, 2.0), summary_of_a_run(1200, 2.1)],
        "packed": [summary_of_a_run(500, 3.0), summary_of_a_run(600, None)],
    }
    rows = comparison.rows(runs)
    assert rows == {
        "bucketed": [
            *("2", "2", "4.0", "2.00", "1,100 ± 100", "2,200 (1.0x)", "2.050 ± 0.050"),
        ],
        "packed": ["2", "2", "4.0", "2.00", "550 ± 50", "1,100 (2.0x)", "diverged"],
    }
    for line, (way, cells) in zip(
        comparison.markdown(runs).splitlines()[2:], rows.items(), strict=True
    ):
        assert line == f"| {way} | {' | '.join(cells)} |"
    # An interrupted comparison has fewer seeds for some of the ways.
    runs["packed"].pop()
    assert comparison.rows(runs)["packed"][4:] == ["500", "1,000 (2.2x)", "3.000"]


@pytest.mark.exhaustive
def test_a_way_that_fails_ends_the_comparison_with_one_sentence(tmp_path):
    path = tmp_path / "nowhere.txt"
    run = run_job("--data", path, "--compare", "--seconds", 3)
    assert run.returncode == 1
    message = f"run.py: `--data {path}` does not exist. Check the path.\n"
    assert run.stderr == message


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="finds the child in /proc")
def test_a_terminated_comparison_leaves_no_run_behind(jsonl):
    options = ("--data", jsonl, "--field", "body", "--compare", "--seconds", 60)
    with subprocess.Popen(
        [sys.executable, RUN, *SMALL, *map(str, options)], stdout=subprocess.PIPE
    ) as run:
        children = pathlib.Path(f"/proc/{run.pid}/task/{run.pid}/children")
        deadline = time.monotonic() + 60
        while not children.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        (child,) = children.read_text().split()
        run.send_signal(signal.SIGTERM)
        run.communicate(timeout=60)
    assert run.returncode == 128 + signal.SIGINT
    deadline = time.monotonic() + 10
    state = pathlib.Path(f"/proc/{child}/stat")
    # Until its parent has waited for it, it is a zombie.
    while state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ("--steps 0", "--steps"),
        ("--compare", "--seconds"),
        ("--compare --seconds 9 --num-buckets auto", "--num-buckets"),
        ("--compare --seconds 9 --checkpoint x", "checkpoints"),
        ("--seeds 3", "--compare"),
        # Every run is started by this command without `--compare`.
        ("--comp", "--comp"),
        ("--plot x.doc", ".png"),
        ("--resume", "--checkpoint"),
        ("--max-len 100", "32"),
        ("--dropout 1", "--dropout"),
        ("--data x --json x", "--json and --data"),
        ("--data docs --checkpoint docs/run", "--data"),
        ("--pack auto --policy dynamic", "--policy"),
        ("--pack always --num-buckets auto", "--num-buckets"),
        ("--json nowhere/x.json", "nowhere/x.json"),
        ("--num-buckets auto --boundaries quantile", "Remove --boundaries quantile"),
        ("--num-buckets auto --cost tokens", "Remove --cost tokens, or pass"),
        ("--num-buckets few", "invalid number_or_auto value: 'few'"),
        ("--num-buckets 0", "0 is not positive"),
        ("--boundaries best", "invalid choice: 'best'"),
    ],
)
def test_options_out_of_range_are_refused(monkeypatch, capsys, options, name):
    monkeypatch.syspath_prepend(RUN.parent)
    parse = importlib.import_module("options").parse_arguments
    monkeypatch.setattr(sys, "argv", ["run.py", *options.split()])
    with pytest.raises(SystemExit, match="2"):
        parse()
    assert name in capsys.readouterr().err
