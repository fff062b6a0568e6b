"""Runs the Python code of README.md and of the pages in docs/ as tests.

The pages continue the README's quick start: they start with its names, on a part of its
data, before anything is compiled.
"""

import os
import pathlib
import tempfile
from typing import Any

from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

ROOT = pathlib.Path(__file__).parent


def quick_start() -> str:
    """Returns the README's first code block up to where it compiles, on less data."""
    _, _, code = (ROOT / "README.md").read_text().partition("```python\n")
    code, _, _ = code.partition("# Compile one executable per bucket.")
    return code.replace('glob("*.py")', 'glob("a*.py")')


def set_up(namespace: dict[str, Any]) -> None:
    namespace["_folder"] = tempfile.TemporaryDirectory()
    namespace["_previous"] = os.getcwd()
    os.chdir(namespace["_folder"].name)
    exec(quick_start(), namespace)


def tear_down(namespace: dict[str, Any]) -> None:
    os.chdir(namespace["_previous"])
    namespace["_folder"].cleanup()


def parsers() -> list[Any]:
    return [PythonCodeBlockParser(), SkipParser()]


readme = Sybil(parsers=parsers(), path=str(ROOT), pattern="README.md")
pages = Sybil(
    parsers=parsers(),
    path=str(ROOT / "docs"),
    pattern="*.md",
    setup=set_up,
    teardown=tear_down,
)
pytest_collect_file = (readme + pages).pytest()
