"""What the README prints is what runs."""

import json
import os
import pathlib
import re
import subprocess
import sys
import textwrap
from typing import NamedTuple

import pytest

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PROCESSES = (ROOT / "docs" / "processes.md").read_text()
STREAMS = (ROOT / "docs" / "streaming.md").read_text()


def section(heading: str, text: str = README) -> str:
    _, found, rest = text.partition(f"\n## {heading}\n")
    assert found, heading
    return rest.partition("\n## ")[0]


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


(QUICK_START,) = blocks("python")
# Parts of the quick start, to be followed by the lines of another section.
UP_TO_SCHEDULE = QUICK_START[: QUICK_START.index("# A loss returns sums")]
UP_TO_STATE = QUICK_START[: QUICK_START.index("# One executable for each bucket")]
UP_TO_LOOP = QUICK_START[: QUICK_START.index("for batch in")]


def scripts(folder: pathlib.Path) -> dict[str, str]:
    """What a process runs, each script in names of its own, by the test it is for."""
    (loop,) = blocks("py", section("Stop, and go on"))
    # Saved within the one epoch of the quick start, in a folder of the test's own.
    loop = loop.replace("runs/a", str(folder / "runs")).replace("100", "10")
    loop += 'print("position" in globals() and position.step, len(batches), step)\n'

    begin, stream_loop, *_ = blocks("py", STREAMS)
    begin, _, _ = begin.partition("for batch in")
    # The shapes that are compiled, and not those of a plan made anew.
    kept = [line for line in begin.splitlines() if not line.startswith("plan = ")]
    runs = f"checkpoints = jb.Checkpoints({str(folder / 'stream-runs')!r})"
    tell = "checkpoints.close(); print(step, batches.counts.read, int(state.step))"
    stream_loop = "\n".join(
        ["import grain", *kept, runs, stream_loop.replace("100", "10"), tell]
    )

    (plan,) = blocks("py", section("Plan before you rent"))
    (write,) = blocks("py", section("Quick start"))
    write = write.replace("corpus", str(folder / "corpus"))

    (ahead,) = blocks("py", section("Compile ahead"))
    ahead = ahead.replace('"executables"', repr(str(folder / "executables")))
    (step_fn,) = re.findall(r"^step_fn = .*\n", QUICK_START, re.MULTILINE)

    def of(heading: str) -> str:
        (code,) = blocks("py", section(heading))
        return code

    return {
        "quick start": QUICK_START,
        "saved": UP_TO_LOOP + loop,
        "resumed": UP_TO_LOOP + loop,
        "stream saved": UP_TO_LOOP + stream_loop,
        "stream resumed": UP_TO_LOOP + stream_loop,
        "plans": f"{UP_TO_SCHEDULE}{plan}{write}print(len(batches), len(file))",
        "by time": f"{UP_TO_LOOP}{of('Plan by time')}"
        "print(plan.cost_unit, measured.cost.error >= 0)",
        "packed": f"{UP_TO_SCHEDULE}{of('Pack, where it pays')}"
        "print(any(x.num_examples > len(x.rows) for x in packed))",
        "streams": f"{UP_TO_SCHEDULE}{of('Streams')}"
        "print(tokens == 2 * lengths.sum(), batches.counts.read)",
        "rates": f"{UP_TO_STATE}{of('A learning rate that follows the batch')}"
        'print(int(state.step) == len(groups), int(metrics["skipped"]))',
        "orders": f"{UP_TO_SCHEDULE}{of('Orders, micro-batches, mixtures')}"
        "print(len(dataset), 2 * len(schedule), len(micro_batches))",
        "compiled": UP_TO_STATE + step_fn + ahead,
        "loaded": UP_TO_STATE + step_fn + ahead,
    }


# One process for all of them: to start and to compile takes longest.
RUN_ALL = """
import contextlib, io, json, pathlib, sys, traceback
scripts, printed = map(pathlib.Path, sys.argv[1:])
results = {}
for name, code in json.loads(scripts.read_text()).items():
    error = ""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            exec(compile(code, name, "exec"), {"__name__": "__main__"})
        except Exception:
            error = traceback.format_exc()
    results[name] = out.getvalue(), error
printed.write_text(json.dumps(results))
"""


class Printed(NamedTuple):
    """What each script has printed, and the error that it ended with, if any."""

    results: dict[str, tuple[str, str]]

    def __getitem__(self, name: str) -> str:
        printed, error = self.results[name]
        assert not error, error
        return printed


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> Printed:
    folder = tmp_path_factory.mktemp("readme")
    (folder / "scripts.json").write_text(json.dumps(scripts(folder)))
    (folder / "run.py").write_text(RUN_ALL)
    files = (folder / "scripts.json", folder / "results.json")
    run = subprocess.run(
        [sys.executable, "-W", "error", folder / "run.py", *files],
        env=os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"},
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return Printed(json.loads(files[1].read_text()))


def test_quick_start_runs_as_printed(printed):
    assert re.search(r"\d\.\d\d nats per token after \d+ steps", printed["quick start"])


def test_the_loop_that_saves_goes_on_where_it_was(printed):
    last = [printed[name].splitlines()[-1].split() for name in ("saved", "resumed")]
    (began, left, end), (resumed, left_then, end_then) = last
    assert began == "False" and left == end == end_then
    assert 0 < int(resumed) < int(end) and int(resumed) % 10 == 0
    assert int(resumed) + int(left_then) == int(end)


def test_the_loop_of_the_page_on_streams_goes_on(printed):
    names = ("stream saved", "stream resumed")
    saved, resumed = (printed[name].splitlines()[-1] for name in names)
    assert saved == resumed and saved.split()[1] == "1000"


def test_plans_are_made_and_a_token_file_written_as_printed(printed):
    steps, examples = printed["plans"].split()[-2:]
    assert int(steps) > 0 and int(examples) == 1000
    assert "shapes: " in printed["plans"] and "optimal is" in printed["plans"]


def test_a_plan_by_time_is_made_as_printed(printed):
    reason = r"\d shapes?: .* s to compile and 3 epochs of .* s make"
    assert re.search(reason, printed["by time"])
    assert printed["by time"].split()[-2:] == ["s", "True"]


def test_rows_are_packed_as_printed(printed):
    reason = "Rows are packed, with attention counted over whole rows"
    assert reason in printed["packed"]
    assert printed["packed"].split()[-1] == "True"


def test_a_stream_is_batched_as_printed(printed):
    assert printed["streams"].split()[-2:] == ["True", "2000"]


def test_a_learning_rate_follows_the_batch_as_printed(printed):
    assert "'learning_rate': 0.00" in printed["rates"]
    assert printed["rates"].split()[-2:] == ["True", "0"]


def test_orders_and_mixtures_are_made_as_printed(printed):
    steps, same, micro = printed["orders"].splitlines()[-1].split()
    assert steps == same and micro == "4"


def test_the_lines_that_compile_ahead_run_as_printed(printed):
    for source in ("compiled", "loaded"):
        *table, numbers = printed[source].splitlines()
        programs = json.loads(numbers)
        for program in programs:
            assert any(f"train_step {program['label']} " in line for line in table)
        assert {program["source"] for program in programs} == {source}


def output_of_two(loop: str, tell: str, folder: pathlib.Path) -> str:
    """What two processes print that run a loop, with the quick start in its place."""
    code = textwrap.indent(UP_TO_LOOP, "    ")
    place, *_ = re.findall(r"^ +\.\.\.(?: .*)?\n", loop, re.MULTILINE)
    loop = loop.replace(place, code, 1).replace(place, "")
    script = folder / "script.py"
    script.write_text(f"import jaxbucket as jb\n{loop}\n{tell}\n")
    launch = [sys.executable, ROOT / "scripts" / "launch_local.py", "-n", "2"]
    run = subprocess.run(
        [*launch, "-d", "2", "--", sys.executable, "-W", "error", script],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout
    return run.stdout


@pytest.mark.exhaustive
def test_the_loop_of_many_processes_runs_in_two(tmp_path):
    (loop,) = blocks("py", section("On many hosts"))
    tell = "print(len(batches), step + 1, processes.count, mesh.size)"
    printed = output_of_two(loop, tell, tmp_path)
    ends = re.findall(r"^\[.\] (\d+) (\d+) 2 4$", printed, re.MULTILINE)
    assert len(ends) == 2
    assert ends[0] == ends[1] and ends[0][0] == ends[0][1]


@pytest.mark.exhaustive
def test_the_loop_of_the_page_on_processes_saves_where_it_ends(tmp_path):
    loop, *_ = blocks("py", PROCESSES)
    loop = loop.replace("/shared/run", str(tmp_path / "run"))
    for _ in range(2):
        # Begun again, it has nothing left to do.
        printed = output_of_two(loop, "print(step, int(state.step))", tmp_path)
        ((step, updates), (other, _)) = re.findall(
            r"^\[.\] (\d+) (\d+)$", printed, re.MULTILINE
        )
        assert step == updates == other
        assert max(int(x.name) for x in (tmp_path / "run").glob("[0-9]*")) == int(step)


@pytest.mark.exhaustive
def test_the_loop_of_the_page_on_streams_ends_in_two(tmp_path):
    _, _, loop, alone, _ = blocks("py", STREAMS)
    begin = """
with jb.Processes() as processes:
    ...
    import grain
    my_part = source[: 300] if processes.index else source[300:]
    my_part = grain.MapDataset.source(my_part).to_iter_dataset()
"""
    tell = "print(step, batches.ended, batches.counts.read)"
    printed = output_of_two(begin + textwrap.indent(loop, "    "), tell, tmp_path)
    ends = re.findall(r"^\[(.)\] (\d+) True (\d+)$", printed, re.MULTILINE)
    assert {index: read for index, _, read in ends} == {"0": "700", "1": "300"}
    assert len({step for _, step, _ in ends}) == 1
    # And where they do not meet, later.
    dataset, _, _ = loop.partition("processes.check_agreement")
    begin += textwrap.indent(
        dataset.replace("processes=processes", "num_steps=float('inf')"), "    "
    )
    printed = output_of_two(
        begin + textwrap.indent(alone, "    "), "print(step)", tmp_path
    )
    ((_, step), (_, other)) = re.findall(r"^\[(.)\] (\d+)$", printed, re.MULTILINE)
    assert int(ends[0][1]) < int(step) == int(other)


# Each as `jaxbucket` of a shell, but in one process.
COMMANDS = """
import json, sys
from jaxbucket.cli import main
for command in json.loads(sys.argv[1]):
    try:
        main(command[1:])
    except SystemExit as end:
        if end.code:
            raise
"""


def test_the_commands_that_plan_do_as_printed(tmp_path):
    text = "".join(blocks("console", section("Plan before you rent")))
    lines = text.replace("\\\n", " ").splitlines()
    commands = [line.removeprefix("$ ").split() for line in lines]
    assert commands[0][:3] == ["cd", "examples", "&&"]
    commands[0] = commands[0][3:]
    assert [command[0] for command in commands] == ["jaxbucket"] * 5
    (tmp_path / "docs").mkdir()
    (tmp_path / "examples").mkdir()
    run = subprocess.run(
        [sys.executable, "-c", COMMANDS, json.dumps(commands)],
        cwd=tmp_path / "examples",
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "docs" / "comparison.png").exists()


def test_continuous_integration_runs_the_test_command():
    train, test = blocks("bash")
    assert train.strip() == "pip install -e . && python examples/train_lm.py"
    assert test in (ROOT / ".ci" / "run").read_text()


def test_every_room_is_in_the_table():
    package = ROOT / "jaxbucket"
    rooms = {path.stem for path in package.glob("*.py")}
    rooms |= {path.parent.name for path in package.glob("*/__init__.py")}
    rooms -= {"__init__", "__main__"}
    table = section("What is where")
    assert all(f"`{room}`" in table for room in rooms)
