"""The curriculum example, as a user starts it."""

import json
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.exhaustive
def test_one_process_and_two_train_alike(tmp_path):
    lines = [json.dumps({"text": f"{n} " + "xyz " * (n % 20)}) for n in range(300)]
    (tmp_path / "data.jsonl").write_text("\n".join(lines) + "\n")
    results = {}
    for count in (1, 2):
        run = subprocess.run(
            [
                *(sys.executable, ROOT / "scripts" / "launch_local.py"),
                *("-n", str(count), "--", sys.executable, "-W", "error"),
                *(ROOT / "examples" / "curriculum.py", "--data", "data.jsonl"),
                *("--steps", "12", "--width", "16", "--layers", "1", "--max-len", "64"),
                *("--max-tokens", "1024", "--num-buckets", "2", "--seed", "1"),
                *("--index", f"index-{count}", "--json", f"{count}.json"),
                *("--plot", f"{count}.png"),
            ],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode == 0, run.stdout + run.stderr
        assert (tmp_path / f"{count}.png").stat().st_size > 10_000
        steps = json.loads((tmp_path / f"{count}.json").read_text())["steps"]
        assert len(steps) == 12
        results[count] = steps
    for one, two in zip(results[1], results[2], strict=True):
        assert two.pop("loss") == pytest.approx(one.pop("loss"), rel=1e-5)
        assert two == pytest.approx(one)
    # From easy to hard documents, and so from short to long shapes.
    assert results[1][0]["difficulty"] < results[1][-1]["difficulty"]
    assert results[1][0]["seq_len"] < results[1][-1]["seq_len"]
