"""Planning needs no extra, and whatever does names it.

The test hides the libraries of the extras. `.ci/run` runs this file as a program where
none of them is installed; it writes into the current folder.
"""

import importlib
import os
import pathlib
import runpy
import subprocess
import sys

import click.testing

ROOT = pathlib.Path(__file__).parents[1]
REMEDY = "pip install 'jaxbucket[train]'"
PACKAGES = {"attention", "compile", "data", "distributed", "optim", "sharding", "sort"}
PACKAGES |= {"packing", "plan", "schedule", "stream", "testing", "train"}
COMMANDS = """\
measure lengths:texts -o lengths.npy
plan lengths.npy --max-tokens 64 -o plan.json
plan lengths.npy --max-tokens 64 --pack always
compare lengths.npy --max-tokens 64
report plan.json lengths.npy"""
INCOMPLETE = "precompile --recipe nowhere:recipe --plan plan.json --cache cache"
TEXTS = """
import numpy
def texts():
    return [{"tokens": numpy.zeros(n)} for n in (5, 8, 15)]
"""
# Python imports a module of this name when it starts.
HIDE = """
import sys
LIBRARIES = {"absl", "flax", "grain", "jax", "jaxlib", "ml_dtypes", "optax", "orbax"}
LIBRARIES |= {"matplotlib", "pyarrow", "scipy"}
class Hidden:
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in LIBRARIES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hidden)
"""


def test_planning_works_without_the_extras(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(HIDE)
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, __file__]
    output = subprocess.check_output(command, cwd=tmp_path, env=env, text=True)
    assert output.splitlines()[-1] == "jax imported: False"


def check_commands() -> None:
    from jaxbucket.cli import main

    pathlib.Path("lengths.py").write_text(TEXTS)
    for commands, status in [(COMMANDS, 0), (INCOMPLETE, 1)]:
        for command in commands.splitlines():
            result = click.testing.CliRunner().invoke(main, command.split())
            assert result.exit_code == status, (command, result.output)
            assert (REMEDY in result.output) == bool(status), result.output


def is_complete(package: str) -> bool:
    """Returns whether a package has all its names; any other must name the extra."""
    names, missing = [""], 0
    for name in names:
        try:
            module = importlib.import_module(package)
            names += [] if name else dir(module)
            getattr(module, name or "__doc__")
        except ImportError as error:
            assert str(error).count(REMEDY) == 1, error
            missing += 1
    return not missing


if __name__ == "__main__":
    check_commands()
    complete = {x for x in PACKAGES if is_complete(f"jaxbucket.{x}")}
    assert complete == {"packing", "plan", "schedule"}
    assert not is_complete("jaxbucket")
    runpy.run_path(str(ROOT / "examples" / "plan_with_numpy.py"))["main"]([])
