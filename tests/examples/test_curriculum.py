"""The curriculum example, as a user starts it."""

import importlib
import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest

import jaxbucket as jb

ROOT = pathlib.Path(__file__).parents[2]
STEPS_TO_ALL = 20


@pytest.fixture
def run(tmp_path: pathlib.Path):
    """Returns a function that trains in `count` processes and returns the steps."""
    rng = np.random.default_rng(0)
    letters = np.array(list("abcdefgh "))
    texts = ["".join(rng.choice(letters[: 2 + n % 7], 5 + n % 60)) for n in range(300)]
    lines = [json.dumps({"text": text}) for text in texts]
    (tmp_path / "data.jsonl").write_text("\n".join(lines) + "\n")

    def run(count: int, *options: object) -> list[dict]:
        command = [
            *(sys.executable, ROOT / "scripts" / "launch_local.py", "-n", count, "--"),
            *(sys.executable, "-W", "error", ROOT / "examples" / "curriculum.py"),
            *("--data", "data.jsonl", "--width", 16, "--layers", 1, "--max-len", 64),
            *("--max-tokens", 1024, "--num-buckets", 2, "--seed", 1),
            *("--steps-to-all", STEPS_TO_ALL, "--json", "out.json", *options),
        ]
        run = subprocess.run(
            list(map(str, command)),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode == 0, run.stdout + run.stderr
        return json.loads((tmp_path / "out.json").read_text())["steps"]

    return run


def measure(tmp_path: pathlib.Path, documents) -> dict[str, np.ndarray]:
    """Returns the metrics of the training documents, in plain numpy."""
    source = documents.load(str(tmp_path / "data.jsonl")).train
    tokens = [np.asarray(source[i]["tokens"]) for i in range(len(source))]
    counts = np.bincount(np.concatenate(tokens), minlength=256)
    # With the rounding of the example, because examples of equal rarity open together.
    surprisal = np.log(counts.sum()) - np.log(np.maximum(counts, 1))
    return {
        "length": np.array([len(x) for x in tokens]),
        "rarity": np.array([surprisal[x].mean() for x in tokens]),
    }


@pytest.mark.exhaustive
def test_two_processes_train_from_easy_to_hard_and_one_continues(
    run, tmp_path, monkeypatch
):
    """Both metrics must open a document, and no epoch leaves one out."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    documents, recipe = map(importlib.import_module, ("documents", "recipe"))
    metrics = measure(tmp_path, documents)
    size = len(metrics["length"])
    folder = ("--checkpoint", "run", "--index", "index")
    steps = run(2, *folder, "--steps", 12, "--plot", "run.png")
    assert (tmp_path / "run.png").stat().st_size > 10_000
    # Less data per step than in an epoch, so 60 steps are more than 3 epochs.
    steps += run(1, *folder, "--steps", 60)
    assert [step["step"] for step in steps] == list(range(60))
    seen = np.zeros(size, int)
    for number, step in enumerate(steps):
        rows = np.array([row for row in step["rows"] if row >= 0])
        share = np.sqrt(0.05**2 + (1 - 0.05**2) * min(1, number / STEPS_TO_ALL))
        is_open = np.ones(size, bool)
        for values in metrics.values():
            easiest = np.sort(values)[: int(np.ceil(share * size - 1e-9))]
            is_open &= values <= easiest[-1] + 1e-6
        # Documents that are not open yet only complete a batch without enough others.
        left = is_open & (seen == seen.min())
        if not is_open[rows].all():
            assert not left[rows].all() and left.sum() < 2 * step["batch_size"]
        assert metrics["length"][rows].max() <= step["seq_len"]
        np.add.at(seen, rows, 1)
        assert seen.max() - seen.min() <= 1
    assert seen.min() >= 3
    # The same batches as from the metrics of one process, without any index.
    pacing = jb.schedule.RootPacing(start=0.05, duration=STEPS_TO_ALL, unit="steps")
    plan = jb.plan_buckets(
        metrics["length"],
        max_tokens=1024,
        num_buckets=2,
        batch_size_multiple=8,
        seq_len_multiple=32,
        max_seq_len=64,
        overlong="truncate",
    )
    order = jb.Curriculum({x: metrics[x] for x in ("length", "rarity")}, pacing)
    schedule = jb.BatchSchedule(plan, metrics["length"], seed=1, order=order)
    assert len(schedule) * 3 <= 60
    for number, step in enumerate(steps):
        assert step["rows"] == schedule[number].rows.tolist()
        # The learning rate is proportional to the tokens of the batch.
        rate = recipe.warmup_cosine_schedule(2e-3, 12 if number < 12 else 60)(number)
        rows = [row for row in step["rows"] if row >= 0]
        factor = metrics["length"][rows].sum() / recipe.BASE_TOKENS
        assert step["learning_rate"] == pytest.approx(float(rate) * factor, rel=1e-5)
    assert steps[0]["difficulty"] < steps[11]["difficulty"]
