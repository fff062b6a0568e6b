"""Imports examples from their folder."""

import gc
import importlib
import pathlib

import jax
import pytest

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch):
    """Imports an example from its folder."""
    monkeypatch.syspath_prepend(EXAMPLES)
    # The compiled steps of other tests warn of compilations while they exist.
    gc.collect()
    # Adam's bias correction is a float to the power of an integer.
    with jax.numpy_dtype_promotion("standard"):
        yield importlib.import_module
