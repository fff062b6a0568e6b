"""Tests of the ways to update and of the table of `benchmarks/learning.py`."""

import importlib
import pathlib

import jax.numpy as jnp
import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def module(monkeypatch):
    """Imports a module of the benchmark by its name."""
    for folder in ("examples", "benchmarks"):
        monkeypatch.syspath_prepend(ROOT / folder)
    return importlib.import_module


def run(way, seed, bits):
    point = {"step": 100, "tokens": 9000, "bits_per_byte": bits}
    return {"way": way, "seed": seed, "curve": [point]}


def test_a_single_seed_has_no_standard_error(module, capsys):
    show = module("learning_report").show
    runs = [run("packed", 0, 2.5), run("spread", 0, 2.51)]
    show(runs)
    assert "±" not in capsys.readouterr().out.partition("Held-out")[0]
    show([*runs, run("packed", 1, 2.7), run("spread", 1, 2.73)])
    table = capsys.readouterr().out
    assert "2.600 ± 0.100" in table and "+0.020 ± 0.010" in table


def test_gradients_are_clipped_relative_to_those_of_their_bucket(module):
    tx = module("learning_ways").clip_by_bucket(1.0, max_size=4, decay=0.5)
    state = tx.init({"w": jnp.zeros(2)})
    norms = []
    for size, gradient in [(4, 2.0), (1, 6.0), (4, 2.0), (1, 6.0)]:
        updates = {"w": jnp.array([gradient, 0.0])}
        updates, state = tx.update(updates, state, num_rows=jnp.asarray(size))
        norms.append(float(updates["w"][0]))
    # The mean norms of all gradients are 2, 4, 3 and 4.5.
    assert norms == pytest.approx([1.0, 6 / 4, 2 / 3, 6 / 4.5])


@pytest.mark.parametrize("way", ["unknown", "spread, unknown", "unknown, no clipping"])
def test_unknown_ways_are_refused(module, way):
    check_ways = module("learning_ways").check_ways
    check_ways(["packed", "2 spread, long warm-up", "spread, clipping by bucket"])
    with pytest.raises(SystemExit, match=f"Unknown way: {way}. See the docstring"):
        check_ways([way])
    with pytest.raises(SystemExit, match="several buckets cannot be clipped by one"):
        check_ways(["2 spread, clipping by bucket"])
