"""Tests of README.md and docs/. Their Python blocks are run by conftest.py."""

import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import textwrap

import pytest

ROOT = pathlib.Path(__file__).parents[1]
GITHUB = "https://github.com/jaxbucket/jaxbucket"
RAW = "https://raw.githubusercontent.com/jaxbucket/jaxbucket/main"
README = (ROOT / "README.md").read_text()
PAGES = {path.stem: path.read_text() for path in (ROOT / "docs").glob("*.md")}


def blocks(language: str, text: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def load(path: str):
    spec = importlib.util.spec_from_file_location("loaded", ROOT / path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 200
    words, _, _ = README.partition("## Quick start")
    assert len(words.split()) < 250


def test_continuous_integration_runs_the_readmes_test_command():
    train, test = blocks("bash", README)
    assert train.strip() == 'pip install -e ".[train]" && python examples/train_lm.py'
    assert test in (ROOT / ".ci" / "run").read_text()


def test_links_lead_to_files():
    for text in PAGES.values():
        for target in re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", text):
            assert (ROOT / "docs" / target).exists(), target


def test_links_of_the_readme_work_outside_of_the_repository():
    pictures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", README)
    links = re.findall(r"(?<!!)\[[^]]*\]\(([^)]+)\)", README)
    assert pictures and links
    for begin, targets in [(f"{RAW}/", pictures), (f"{GITHUB}/blob/main/", links)]:
        for target in targets:
            assert target.startswith(begin), target
            assert (ROOT / target.removeprefix(begin)).exists(), target


def test_the_readme_links_to_every_page():
    for page in PAGES:
        assert f"]({GITHUB}/blob/main/docs/{page}.md)" in README, page


def test_the_reference_is_up_to_date():
    written = load("scripts/write_reference.py").reference()
    assert PAGES["reference"] == written, "Run `python scripts/write_reference.py`."


def test_files_and_folders_that_pages_name_exist():
    for text in [README, *PAGES.values()]:
        for path in re.findall(r"\b(?:benchmarks|scripts|tests)/[\w/]+\.py", text):
            assert (ROOT / path).exists(), path
        for name in re.findall(r"`examples/(\w+\.py)`", text):
            assert (ROOT / "examples" / name).exists(), name


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


def run_commands(page: str, folder: pathlib.Path) -> list[str]:
    """Runs the `jaxbucket` commands of a page; returns their names."""
    text = "".join(blocks("console", PAGES[page])).replace("\\\n", " ")
    lines = [line.removeprefix("$ ") for line in text.splitlines()]
    lines = [line.removeprefix("cd examples && ") for line in lines]
    commands = [x.split() for x in lines if x.startswith("jaxbucket ")]
    (folder / "docs").mkdir()
    (folder / "examples").mkdir(exist_ok=True)
    run = subprocess.run(
        [sys.executable, "-c", COMMANDS, json.dumps(commands)],
        cwd=folder / "examples",
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return [command[1] for command in commands]


@pytest.mark.exhaustive
def test_the_commands_of_the_page_on_planning_run(tmp_path):
    commands = run_commands("planning", tmp_path)
    assert {"measure", "compare", "plan", "report"} <= set(commands)
    assert (tmp_path / "docs" / "comparison.png").exists()


@pytest.mark.exhaustive
def test_the_commands_of_the_page_on_batch_sizes_run(tmp_path):
    times = '{"[64,64]":0.05,"[16,256]":0.06,"[8,1024]":0.15,"[8,64]":0.01}'
    assert times in PAGES["batch_sizes"]
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "times.json").write_text(times)
    commands = run_commands("batch_sizes", tmp_path)
    assert commands == ["fit", "measure", "plan", "precompile", "plan"]


@pytest.mark.exhaustive
def test_the_commands_of_the_page_on_several_lengths_run(tmp_path):
    pairs = [{"en": "a" * n, "de": "b" * (n + 9)} for n in range(20, 140)]
    (tmp_path / "examples").mkdir()
    file = tmp_path / "examples" / "pairs.jsonl"
    file.write_text("\n".join(map(json.dumps, pairs)))
    commands = run_commands("several_lengths", tmp_path)
    assert commands == ["measure", "plan", "report"]


def quick_start() -> str:
    """The quick start, up to its loop."""
    code, _, _ = blocks("python", README)[0].partition("for step, batch in")
    return code.replace('glob("*.py")', 'glob("a*.py")')


def values_of_two(loop: str, values: str, folder: pathlib.Path) -> list[list]:
    """Returns values of two processes after a loop that follows the quick start.

    The first `...` of the loop stands for the quick start. Each process writes its
    values to a file, because messages of Gloo's threads can split lines of the output.
    """
    code = textwrap.indent(quick_start(), "    ")
    place, *_ = re.findall(r"^ +\.\.\.(?: .*)?\n", loop, re.MULTILINE)
    loop = loop.replace(place, code, 1).replace(place, "")
    files = [folder / f"values_{index}.json" for index in range(2)]
    for file in files:
        file.unlink(missing_ok=True)
    script = folder / "script.py"
    script.write_text(f"""
import json
import jaxbucket as jb
{loop}
with open({str(folder)!r} + f"/values_{{processes.index}}.json", "x") as file:
    json.dump([{values}], file)
""")
    launch = [sys.executable, ROOT / "scripts" / "launch_local.py", "-n", "2"]
    run = subprocess.run(
        [*launch, "-d", "2", "--", sys.executable, "-W", "error", script],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.exhaustive
def test_the_loop_of_the_page_on_processes_saves_where_it_ends(tmp_path):
    loop, *_ = blocks("python", PAGES["processes"])
    loop = loop.replace("/shared/run", str(tmp_path / "run"))
    for _ in range(2):
        # The second run has nothing left to do.
        ends = values_of_two(loop, "len(schedule), int(state.step)", tmp_path)
        (step, updates), (_, other) = ends
        assert step == updates == other
        assert max(int(x.name) for x in (tmp_path / "run").glob("[0-9]*")) == step


@pytest.mark.exhaustive
def test_the_loops_of_the_page_on_streams_end_in_two_processes(tmp_path):
    code = blocks("python", PAGES["streaming"])
    first = next(i for i, x in enumerate(code) if "processes.check_agreement" in x)
    loop = code[first]
    begin = """
with jb.Processes() as processes:
    ...
    import grain
    # Of its loader, each process reads every second example.
    loader = source[: 400] if processes.index else source[:800]
    loader = grain.MapDataset.source(loader).to_iter_dataset()
"""
    values = "step, batches.ended, batches.counts.read"
    ends = values_of_two(begin + textwrap.indent(loop, "    "), values, tmp_path)
    step = ends[0][0]
    assert ends == [[step, True, 400], [step, True, 200]]
