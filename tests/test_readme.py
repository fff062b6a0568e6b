"""What the README prints is what runs."""

import json
import os
import pathlib
import re
import subprocess
import sys
import textwrap

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PROCESSES = (ROOT / "docs" / "processes.md").read_text()
STREAMS = (ROOT / "docs" / "streaming.md").read_text()


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def output_of(code: str, folder: pathlib.Path) -> str:
    """What a script of this code prints, in a process of its own."""
    script = folder / "script.py"
    script.write_text(code)
    run = subprocess.run(
        [sys.executable, "-W", "error", script],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_quick_start_runs_as_printed(tmp_path):
    (code,) = blocks("python")
    printed = output_of(code, tmp_path)
    assert re.search(r"\d\.\d\d nats per token after \d+ steps", printed)


def test_the_loop_that_saves_goes_on_where_it_was(tmp_path):
    (code,), (loop, *_) = blocks("python"), blocks("py")
    code = code[: code.index("for batch in")]
    # Saved within the one epoch of the quick start, in a folder of the test's own.
    loop = loop.replace("runs/a", str(tmp_path / "runs")).replace("100", "10")
    tell = 'print("position" in globals() and position.step, len(dataset), step)'
    script = f"{code}\n{loop}\n{tell}\n"
    told = [output_of(script, tmp_path).splitlines()[-1].split() for _ in range(2)]
    (began, left, end), (resumed, left_then, end_then) = told
    assert began == "False" and left == end == end_then
    assert 0 < int(resumed) < int(end) and int(resumed) % 10 == 0
    assert int(resumed) + int(left_then) == int(end)


def output_of_two(loop: str, tell: str, folder: pathlib.Path) -> str:
    """What two processes print that run a loop, with the quick start in its place."""
    (code,) = blocks("python")
    code = textwrap.indent(code[: code.index("for batch in")], "    ")
    place, *_ = re.findall(r"^ +\.\.\.(?: .*)?\n", loop, re.MULTILINE)
    loop = loop.replace(place, code, 1).replace(place, "")
    script = folder / "script.py"
    script.write_text(f"import jaxbucket as jb\n{loop}\n{tell}\n")
    launch = [
        sys.executable,
        ROOT / "scripts" / "launch_local.py",
        "-n",
        "2",
        "-d",
        "2",
    ]
    run = subprocess.run(
        [*launch, "--", sys.executable, "-W", "error", script],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout
    return run.stdout


def test_the_loop_of_many_processes_runs_in_two(tmp_path):
    _, loop, *_ = blocks("py")
    tell = "print(len(dataset), step + 1, processes.count, mesh.size)"
    printed = output_of_two(loop, tell, tmp_path)
    ends = re.findall(r"^\[.\] (\d+) (\d+) 2 4$", printed, re.MULTILINE)
    assert len(ends) == 2
    assert ends[0] == ends[1] and ends[0][0] == ends[0][1]


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


def test_the_loop_of_the_page_on_streams_goes_on(tmp_path):
    (code,), (begin, loop, *_) = blocks("python"), blocks("py", STREAMS)
    code = code[: code.index("dataset = jb.batch_dataset")]
    begin, _, _ = begin.partition("for batch in")
    # The shapes that are compiled, and not those of a plan made anew.
    kept = [line for line in begin.splitlines() if not line.startswith("plan = ")]
    begin = "import grain\n" + "\n".join(kept)
    loop = loop.replace("100", "10")
    runs = f"checkpoints = jb.Checkpoints({str(tmp_path / 'runs')!r})"
    tell = "checkpoints.close(); print(step, batches.counts.read, int(state.step))"
    script = f"{code}\n{begin}\n{runs}\n{loop}\n{tell}\n"
    told = [output_of(script, tmp_path).splitlines()[-1] for _ in range(2)]
    assert told[0] == told[1] and told[0].split()[1] == "1000"


def test_the_commands_that_plan_do_as_printed(tmp_path):
    text = README.partition("## Plan before you rent")[2].partition("\n## ")[0]
    printed = "".join(blocks("console", text)).replace("\\\n", " ")
    commands = [line.removeprefix("$ ") for line in printed.splitlines()]
    assert len(commands) == 5
    (tmp_path / "docs").mkdir()
    (tmp_path / "examples").mkdir()
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}"}
    for command in commands:
        command = command.removeprefix("cd examples && ")
        assert command.startswith("jaxbucket ")
        run = subprocess.run(
            [sys.executable, "-m", *command.split()],
            cwd=tmp_path / "examples",
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode == 0, run.stderr
    assert (tmp_path / "docs" / "comparison.png").exists()


def test_plans_are_made_and_a_token_file_written_as_printed(tmp_path):
    (code,), (_, _, plan, write, *_) = blocks("python"), blocks("py")
    code = code[: code.index("# A loss returns sums")]
    write = write.replace("corpus", str(tmp_path / "corpus"))
    tell = "print(len(dataset), len(file))"
    printed = output_of(f"{code}\n{plan}\n{write}\n{tell}", tmp_path)
    steps, examples = printed.split()[-2:]
    assert int(steps) > 0 and int(examples) == 1000
    assert "shapes: " in printed and "optimal is" in printed


def test_a_plan_by_time_is_made_as_printed(tmp_path):
    (code,), (*_, by_time, _, _, _, _, _) = blocks("python"), blocks("py")
    code = code[: code.index("dataset = jb.batch_dataset")]
    tell = "print(plan.cost_unit, measured.cost.error >= 0)"
    printed = output_of(f"{code}\n{by_time}\n{tell}", tmp_path)
    assert re.search(r"\d shapes?: .* s to compile and 3 epochs of .* s make", printed)
    assert printed.split()[-2:] == ["s", "True"]


def test_rows_are_packed_as_printed(tmp_path):
    (code,), (*_, packing, _, _, _, _) = blocks("python"), blocks("py")
    code = code[: code.index("# A loss returns sums")]
    tell = "print(any(x.num_examples > len(x.rows) for x in packed))"
    printed = output_of(f"{code}\n{packing}\n{tell}", tmp_path)
    assert "Rows are packed, attention counted over whole rows" in printed
    assert printed.split()[-1] == "True"


def test_a_stream_is_batched_as_printed(tmp_path):
    (code,), (*_, streams, _, _, _) = blocks("python"), blocks("py")
    code = code[: code.index("# A loss returns sums")]
    tell = "print(tokens == 2 * lengths.sum(), batches.counts.read)"
    printed = output_of(f"{code}\n{streams}\n{tell}", tmp_path)
    assert printed.split()[-2:] == ["True", "2000"]


def test_a_learning_rate_follows_the_batch_as_printed(tmp_path):
    (code,), (*_, rates, _, _) = blocks("python"), blocks("py")
    code = code[: code.index("# One executable for each bucket")]
    tell = 'print(int(state.step) == len(groups), int(metrics["skipped"]))'
    printed = output_of(f"{code}\n{rates}\n{tell}", tmp_path)
    assert "'learning_rate': 0.00" in printed
    assert printed.split()[-2:] == ["True", "0"]


def test_continuous_integration_runs_the_test_command():
    train, test = blocks("bash")
    assert train.strip() == "pip install -e . && python examples/train_lm.py"
    assert test in (ROOT / ".ci" / "run").read_text()


def test_every_room_is_in_the_table():
    package = ROOT / "jaxbucket"
    rooms = {path.stem for path in package.glob("*.py")}
    rooms |= {path.parent.name for path in package.glob("*/__init__.py")}
    rooms -= {"__init__", "__main__"}
    table = README.partition("## What is where")[2]
    assert all(f"`{room}`" in table for room in rooms)


def test_orders_and_mixtures_are_made_as_printed(tmp_path):
    (code,), (*_, orders) = blocks("python"), blocks("py")
    code = code[: code.index("# A loss returns sums")]
    tell = "print(len(dataset), 2 * len(schedule), len(micro_batches))"
    printed = output_of(code + orders + tell, tmp_path)
    steps, same, micro = printed.splitlines()[-1].split()
    assert steps == same and micro == "4"


def test_the_lines_that_compile_ahead_run_as_printed(tmp_path):
    (code,), (*_, ahead, _) = blocks("python"), blocks("py")
    code = code[: code.index("# One executable for each bucket")]
    code += "step_fn = jb.make_train_step(loss_fn, tx, mesh)\n"
    ahead = ahead.replace('"executables"', repr(str(tmp_path / "executables")))
    for source in ("compiled", "loaded"):
        *table, numbers = output_of(code + ahead, tmp_path).splitlines()
        programs = json.loads(numbers)
        for program in programs:
            assert any(f"train_step {program['label']} " in line for line in table)
        assert {program["source"] for program in programs} == {source}
