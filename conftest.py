"""Runs the Python code of README.md and of the pages in docs/ as tests.

Each page runs in a folder of its own. The pages continue the README's quick start: they
start with its names, on a part of its data, before anything is compiled.
"""

import gc
import os
import pathlib
import tempfile
from typing import Any

# Read when jax is imported. Otherwise it may look for the drivers of a GPU.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
import jax
import pytest
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

ROOT = pathlib.Path(__file__).parent


def quick_start() -> str:
    """Returns the README's first code block up to where it compiles, on less data."""
    _, _, code = (ROOT / "README.md").read_text().partition("```python\n")
    code, _, _ = code.partition("# Compile one executable per bucket.")
    code = code.replace('glob("*.py")', 'glob("a*.py")')
    return code.replace("num_buckets=6", "num_buckets=3")


def set_up(namespace: dict[str, Any]) -> None:
    namespace["_folder"] = tempfile.TemporaryDirectory()
    namespace["_restore"] = os.getcwd(), jax.config.jax_numpy_dtype_promotion
    os.chdir(namespace["_folder"].name)
    # As users have it: optax does not run with the strict promotion of tests/.
    jax.config.update("jax_numpy_dtype_promotion", "standard")


def set_up_page(namespace: dict[str, Any]) -> None:
    set_up(namespace)
    exec(quick_start(), namespace)


def tear_down(namespace: dict[str, Any]) -> None:
    folder, promotion = namespace["_restore"]
    os.chdir(folder)
    jax.config.update("jax_numpy_dtype_promotion", promotion)
    namespace["_folder"].cleanup()
    # Compiled steps watch for later compilations for as long as they exist.
    namespace.clear()
    gc.collect()


readme = Sybil(
    parsers=[PythonCodeBlockParser(), SkipParser()],
    path=str(ROOT),
    pattern="README.md",
    setup=set_up,
    teardown=tear_down,
)
pages = Sybil(
    parsers=[PythonCodeBlockParser(), SkipParser()],
    path=str(ROOT / "docs"),
    pattern="*.md",
    setup=set_up_page,
    teardown=tear_down,
)
pytest_collect_file = (readme + pages).pytest()


# Before pytest itself selects tests by their markers.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the pages, which train for minutes together, as exhaustive."""
    for item in items:
        if item.path.suffix == ".md":
            item.add_marker(pytest.mark.exhaustive)
