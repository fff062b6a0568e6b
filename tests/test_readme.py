"""What the README prints is what runs."""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def test_quick_start_runs_as_printed(tmp_path):
    (code,) = blocks("python")
    script = tmp_path / "quick_start.py"
    script.write_text(code)
    run = subprocess.run(
        [sys.executable, "-W", "error", script],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert re.search(r"\d\.\d\d nats per token after \d+ steps", run.stdout)


def test_continuous_integration_runs_the_test_command():
    train, test = blocks("bash")
    assert train.strip() == "pip install -e . && python examples/train_lm.py"
    assert test in (ROOT / ".ci" / "run").read_text()


def test_every_room_is_in_the_table():
    rooms = {path.stem for path in (ROOT / "jaxbucket").glob("*.py")} - {"__init__"}
    table = README.partition("## What is where")[2]
    assert all(f"`{room}`" in table for room in rooms)
