import numpy as np
import pytest

from jaxbucket.base.assignment import cheapest
from jaxbucket.plan.flow.dominance import dominates, fits, shape_order


def random_shapes(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    size, sides = int(rng.integers(1, 9)), int(rng.integers(2, 5))
    seq_lens = np.unique(rng.integers(1, 12, (size, sides)), axis=0)
    lengths = rng.integers(1, 12, (200, sides))
    return lengths, seq_lens, rng.integers(1, 5, len(seq_lens))


@pytest.mark.parametrize("seed", range(5))
def test_examples_are_in_the_cheapest_shape_that_holds_them(seed, monkeypatch):
    monkeypatch.setattr("jaxbucket.base.assignment._COMPARED", 64)
    lengths, seq_lens, rates = random_shapes(seed)
    shapes = cheapest(lengths, seq_lens, rates)
    assert shapes.dtype == np.int16
    held = fits(lengths, seq_lens)
    for example, shape in enumerate(shapes.tolist()):
        holding = [
            (rates[k], k)
            for k, ends in enumerate(seq_lens)
            if all(lengths[example] <= ends)
        ]
        assert held[example].tolist() == [
            all(lengths[example] <= ends) for ends in seq_lens
        ]
        assert shape == (min(holding)[1] if holding else -1)


@pytest.mark.parametrize("seed", range(5))
def test_a_dominating_shape_is_later(seed):
    _, seq_lens, _ = random_shapes(seed)
    ordered = seq_lens[shape_order(seq_lens)]
    above = dominates(ordered)
    assert not np.tril(above).any()
    for low, a in enumerate(ordered):
        for high, b in enumerate(ordered):
            assert above[low, high] == (low != high and bool((a <= b).all()))
    keys = [(row.sum(), *row) for row in ordered.tolist() for row in [np.array(row)]]
    assert keys == sorted(keys)


def test_several_plans_are_ordered_at_once():
    plans = np.random.default_rng(0).integers(1, 9, (5, 4, 3))
    orders = shape_order(plans)
    assert [o.tolist() for o in orders] == [shape_order(p).tolist() for p in plans]
    assert dominates(plans).shape == (5, 4, 4)
