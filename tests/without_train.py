"""Measures, plans, compares and reports with what `pip install jaxbucket` installs.

    python tests/without_train.py

`.ci/run` runs it where no extra is installed, and `test_without_train.py` where the
libraries of the extras are hidden. It writes into the current folder.
"""

import importlib
import pathlib
import runpy

import click.testing

import jaxbucket as jb
from jaxbucket.cli import main

EXAMPLE = pathlib.Path(__file__).parents[1] / "examples" / "plan_with_numpy.py"
REMEDY = "pip install 'jaxbucket[train]'"
COMPLETE = {"packing", "plan", "schedule"}
PACKAGES = {"attention", "compile", "data", "distributed", "layers", "optim", "sort"}
PACKAGES |= {"stream", "testing", "train", *COMPLETE}
LIMITS = "--max-tokens 64 --num-buckets 2"
COMMANDS = [
    "measure texts.txt --unit bytes -o lengths.npy",
    f"plan lengths.npy {LIMITS} -o plan.json",
    f"plan lengths.npy {LIMITS} --pack always",
    f"compare lengths.npy {LIMITS}",
    "report plan.json lengths.npy",
]
INCOMPLETE_COMMANDS = [
    "measure texts.array_record",
    "analyze without_train:source --metric length -o index",
    "precompile --recipe without_train:recipe --plan plan.json --cache cache",
]


def run(command: str) -> click.testing.Result:
    return click.testing.CliRunner().invoke(main, command.split())


def check_commands() -> None:
    lines = ["a" * n for n in (3, 5, 9, 4, 4, 7)]
    pathlib.Path("texts.txt").write_text("\n".join(lines))
    pathlib.Path("texts.array_record").write_text("")
    for command in COMMANDS:
        result = run(command)
        assert result.exit_code == 0, (command, result.output)
    for command in INCOMPLETE_COMMANDS:
        result = run(command)
        assert result.exit_code == 1 and REMEDY in result.output, (command, result)


def is_complete(package: str) -> bool:
    """Returns whether a package has all its names; what is missing names the extra."""
    module, missing = importlib.import_module(package), []
    for name in dir(module):
        try:
            getattr(module, name)
        except ImportError as error:
            assert str(error).count(REMEDY) == 1, error
            missing.append(name)
    return not missing


def check_names() -> None:
    complete = {name for name in PACKAGES if is_complete(f"jaxbucket.{name}")}
    assert complete == COMPLETE and not is_complete("jaxbucket")
    assert jb.measure_lengths([{"x": [1, 2]}, {"x": [3]}]).tolist() == [2, 1]
    try:
        importlib.import_module("jaxbucket.sharding")
    except ImportError as error:
        assert str(error).count(REMEDY) == 1, error
    else:
        raise AssertionError("jax is installed.")


if __name__ == "__main__":
    check_commands()
    check_names()
    runpy.run_path(str(EXAMPLE))["main"]([])
