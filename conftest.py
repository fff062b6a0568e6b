"""Runs the Python code of README.md and of the pages in docs/ as tests.

A reader copies one block, after the README's quick start. So every block runs alone, in
a folder of its own: it starts with a copy of the names of the quick start, on a part of
its data, before anything is compiled. Only invisible blocks continue the one before.
"""

import functools
import gc
import os
import pathlib
import tempfile
from typing import Any

# Read when jax is imported. Otherwise it may look for the drivers of a GPU. Blocks run
# on eight devices, as tests/ do: then they run on one, two or four devices as well.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
import jax
import pytest
from sybil import Example, Sybil
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown import CodeBlockParser, SkipParser

ROOT = pathlib.Path(__file__).parent


def quick_start() -> str:
    """Returns the README's first Python block."""
    _, _, code = (ROOT / "README.md").read_text().partition("```python\n")
    return code.partition("```\n")[0]


@functools.cache
def names_of_the_quick_start() -> dict[str, Any]:
    """Runs the quick start up to where it compiles, on less data, once per process."""
    code, _, _ = quick_start().partition("# Compile one executable per bucket.")
    code = code.replace('glob("*.py")', 'glob("a*.py")')
    names: dict[str, Any] = {}
    exec(code.replace("num_buckets=6", "num_buckets=3"), names)
    return names


def copy_of(names: dict[str, Any]) -> dict[str, Any]:
    """Returns the names with arrays of their own, because steps donate their state."""
    from flax import nnx

    names = dict(names)
    names["source"] = list(names["source"])
    names["model"] = nnx.clone(names["model"])
    names["state"] = jax.tree.map(jax.numpy.copy, names["state"])
    return names


class BlockEvaluator(PythonEvaluator):
    """Runs each visible block with fresh names, in a new folder."""

    def __call__(self, example: Example) -> None:
        names = example.namespace
        document = example.document
        if not document.text.startswith("<!---", example.start):
            tear_down(names)
            set_up(names)
            if example.parsed != quick_start():
                names |= copy_of(names_of_the_quick_start())
        super().__call__(example)


# As users have them, unlike in tests/: optax does not run with strict promotion.
OPTIONS = {
    "jax_numpy_dtype_promotion": "standard",
    "jax_disable_most_optimizations": False,
}


def set_up(namespace: dict[str, Any]) -> None:
    namespace["_folder"] = tempfile.TemporaryDirectory()
    options = {name: jax.config.values[name] for name in OPTIONS}
    namespace["_restore"] = os.getcwd(), options
    os.chdir(namespace["_folder"].name)
    for name, value in OPTIONS.items():
        jax.config.update(name, value)


def tear_down(namespace: dict[str, Any]) -> None:
    folder, options = namespace["_restore"]
    os.chdir(folder)
    for name, value in options.items():
        jax.config.update(name, value)
    namespace["_folder"].cleanup()
    # Compiled steps watch for later compilations for as long as they exist.
    namespace.clear()
    gc.collect()


def pages(folder: pathlib.Path, *patterns: str) -> Sybil:
    return Sybil(
        parsers=[CodeBlockParser("python", BlockEvaluator()), SkipParser()],
        path=str(folder),
        patterns=patterns,
        setup=set_up,
        teardown=tear_down,
    )


pytest_collect_file = (
    pages(ROOT, "README.md") + pages(ROOT / "docs", "*.md", "**/*.md")
).pytest()


# Before pytest itself selects tests by their markers.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the pages, which train for minutes together, as exhaustive."""
    for item in items:
        if item.path.suffix == ".md":
            item.add_marker(pytest.mark.exhaustive)
