"""Tests of README.md and docs/. Their Python blocks are run by conftest.py."""

import inspect
import json
import os
import pathlib
import re
import subprocess
import sys
import textwrap
import types

import numpy as np
import pytest

import jaxbucket as jb

ROOT = pathlib.Path(__file__).parents[1]
# The folder with `jaxbucket`: `ROOT`, unless a wheel is tested.
PACKAGES = pathlib.Path(jb.__file__).parents[1]
GITHUB = "https://github.com/jaxbucket/jaxbucket"
RAW = "https://raw.githubusercontent.com/jaxbucket/jaxbucket/main"
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text()
# "cookbook/data" -> the text of the page.
PAGES = {
    path.relative_to(DOCS).with_suffix("").as_posix(): path.read_text()
    for path in sorted(DOCS.rglob("*.md"))
}


def blocks(language: str, text: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 200
    words, _, _ = README.partition("## Quick start")
    assert len(words.split()) < 250


def test_continuous_integration_runs_the_readmes_test_command():
    train, test = blocks("bash", README)
    assert train.strip() == 'pip install -e ".[train]" && python examples/train_lm.py'
    assert test in (ROOT / ".ci" / "run").read_text()


# The strict build of the site (.ci/run) also checks anchors.
def test_links_lead_to_files():
    for page, text in PAGES.items():
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)[^)]*\)", text):
            assert (DOCS / page).parent.joinpath(target).exists(), (page, target)
        for target in re.findall(rf"\]\({GITHUB}/blob/main/([^)#]+)", text):
            folder = PACKAGES if target.startswith("jaxbucket/") else ROOT
            assert (folder / target).exists(), (page, target)


def test_links_of_the_readme_work_outside_of_the_repository():
    pictures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", README)
    links = re.findall(r"(?<!!)\[[^]]*\]\(([^)]+)\)", README)
    assert pictures and links
    for begin, targets in [(f"{RAW}/", pictures), (f"{GITHUB}/blob/main/", links)]:
        for target in targets:
            assert target.startswith(begin), target
            assert (ROOT / target.removeprefix(begin)).exists(), target


def test_every_page_is_in_the_navigation_of_the_site():
    site = (ROOT / "mkdocs.yml").read_text()
    assert set(re.findall(r"([\w/]+)\.md$", site, re.MULTILINE)) == set(PAGES)


def test_the_reference_has_every_public_name():
    for name in dir(jb):
        package = getattr(jb, name)
        if name.startswith("_") or not inspect.ismodule(package) or name == "cli":
            continue
        expected = {f"jaxbucket.{name}.{x}" for x in public_names(package)}
        if expected:
            text = PAGES[f"reference/{name}"]
            assert set(re.findall(r"^::: (.+)$", text, re.MULTILINE)) == expected
    # Those at the door are in the list of the first page.
    listed = re.findall(r"^\| \[`jb\.(\w+)`\]", PAGES["reference/index"], re.MULTILINE)
    assert sorted(listed) == public_names(jb)


def public_names(module: types.ModuleType) -> list[str]:
    """Returns the functions and classes of jaxbucket that a package shows."""
    names = sorted(name for name in dir(module) if not name.startswith("_"))
    homes = {name: getattr(getattr(module, name), "__module__", "") for name in names}
    return [name for name in names if str(homes[name]).startswith("jaxbucket")]


def test_files_and_folders_that_pages_name_exist():
    for text in [README, *PAGES.values()]:
        for path in re.findall(r"\b(?:benchmarks|scripts|tests)/[\w/]+\.py", text):
            assert (ROOT / path).exists(), path
        for name in re.findall(r"`examples/(\w+\.py)`", text):
            assert (ROOT / "examples" / name).exists(), name


def test_the_messages_of_the_faq_are_those_of_the_library():
    package = pathlib.Path(jb.__file__).parent
    code = "".join(path.read_text() for path in package.rglob("*.py"))
    code = re.sub(r'"\s*\n\s*f?"', "", code)  # strings over several lines
    messages = re.findall(r'^\| "(.+)" \|', PAGES["faq"], re.MULTILINE)
    assert len(messages) > 10
    for message in messages:
        for part in message.split("..."):
            assert part.strip(" `") in code, message


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


# Files of a user's own.
FILES = {
    "data.jsonl": [{"input_ids": [7] * n, "text": "word " * n} for n in range(1, 200)],
    "pairs.jsonl": [{"en": "a" * n, "de": "b" * (n + 9)} for n in range(20, 140)],
}


def run_commands(text: str, folder: pathlib.Path) -> list[str]:
    """Runs the commands of a page; returns the names of those of `jaxbucket`."""
    text = "".join(blocks("console", text)).replace("\\\n", " ")
    lines = [line.removeprefix("$ ") for line in text.splitlines()]
    lines = [line.removeprefix("cd examples && ") for line in lines]
    commands = [x.split() for x in lines if x.startswith("jaxbucket ")]
    (folder / "examples").mkdir()
    files = {name: "\n".join(map(json.dumps, rows)) for name, rows in FILES.items()}
    for line in lines:
        if match := re.fullmatch("echo '(.+)' > (.+)", line):
            files[match[2]] = match[1]
    for name, content in files.items():
        (folder / "examples" / name).write_text(content)
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


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("decide/time_of_a_run", "plan plan simulate"),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (
                ("README", "compare"),
                ("index", "compare measure compare"),
                ("decide/budget", "fit measure plan precompile plan"),
                ("cookbook/translation", "measure plan report"),
            )
        ),
    ],
)
def test_the_commands_of_a_page_run(tmp_path, page, names):
    text = {**PAGES, "README": README}[page]
    assert run_commands(text, tmp_path) == names.split()


@pytest.mark.exhaustive
def test_the_commands_of_the_page_on_the_command_line_run(tmp_path):
    commands = run_commands(PAGES["reference/command_line"], tmp_path)
    assert {"measure", "compare", "plan", "report"} <= set(commands)
    assert (tmp_path / "examples" / "comparison.png").exists()


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
def test_the_script_of_the_page_on_many_hosts_saves_where_it_ends(tmp_path):
    page = PAGES["cookbook/many_hosts"]
    (tmp_path / "train.py").write_text(blocks("python", page)[0])
    commands = "".join(blocks("console", page)).replace("\\\n", " ").splitlines()
    words = {
        "$": [],
        "python": [sys.executable],
        "jaxbucket": [sys.executable, "-m", "jaxbucket"],
        "scripts/launch_local.py": [str(ROOT / "scripts" / "launch_local.py")],
    }
    for command in [*commands, commands[-1]]:  # The second has nothing left to do.
        run = subprocess.run(
            [y for x in command.split() for y in words.get(x, [x])],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode == 0, run.stdout + run.stderr
    assert "[0] 0 programs compiled" in run.stdout
    plan = jb.BucketPlan.from_json((tmp_path / "plan.json").read_text())
    schedule = jb.BatchSchedule(plan, np.load(tmp_path / "lengths.npy"))
    last = max(int(x.name) for x in (tmp_path / "run").glob("[0-9]*"))
    assert last == 2 * len(schedule)


@pytest.mark.exhaustive
def test_the_loops_of_the_page_on_streams_end_in_two_processes(tmp_path):
    code = blocks("python", PAGES["cookbook/streams"])
    first = next(i for i, x in enumerate(code) if "processes.check_agreement" in x)
    loop = code[first]
    begin = """
with jb.Processes() as processes:
    ...
    import grain
    # Of its loader, each process reads every second example.
    loader = source[:300] if processes.index else source[:600]
    loader = grain.MapDataset.source(loader).to_iter_dataset()
"""
    values = "step, batches.ended, batches.counts.read"
    ends = values_of_two(begin + textwrap.indent(loop, "    "), values, tmp_path)
    step = ends[0][0]
    assert ends == [[step, True, 300], [step, True, 150]]
