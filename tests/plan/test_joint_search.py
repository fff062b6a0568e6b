import itertools

import numpy as np
import pytest

from jaxbucket.base.assignment import cheapest
from jaxbucket.plan import joint_search as search
from jaxbucket.plan.flow.batch_sizes import fitted_between
from jaxbucket.plan.flow.dominance import dominates, fits, shape_order
from jaxbucket.plan.joint_planner import search_shapes
from jaxbucket.plan.joint_points import Points
from jaxbucket.plan.joint_pricing import Pricing
from jaxbucket.plan.joint_search import Search, estimated_costs
from jaxbucket.plan.joint_swaps import Assignment, Grid, Swaps
from jaxbucket.plan.limits import Limits


def by_pairs(batch_size, sizes):
    return batch_size * (sizes.total + np.prod(list(sizes.values())) / 7)


def by_time(batch_size, sizes):
    """Steps with an overhead, in which some T are slow, so that rates are erratic."""
    slow = 1 + 0.3 * (sizes["a"] % 3 == 0)
    return 1.5 + batch_size * sizes.total * slow


COSTS = None, by_pairs, by_time


def limits_of(sides, max_tokens, multiples=None, **options):
    names = tuple("abcde"[:sides])
    if multiples is not None:
        multiples = map(int, multiples)
        options["seq_len_multiple"] = dict(zip(names, multiples, strict=True))
    return Limits(sequences=names, max_tokens=max_tokens, **options)


def epoch_of(lengths, seq_lens, limits):
    """Returns the cost of an epoch with shapes, infinite if an example fits none."""
    if not fits(lengths, seq_lens).any(axis=1).all():
        return np.inf
    most = limits.batch_sizes(seq_lens)
    shapes = cheapest(lengths, seq_lens, limits.costs(most, seq_lens) / most)
    counts = np.bincount(shapes, minlength=len(seq_lens))
    steps = limits.sizes(seq_lens, most, np.full_like(most, len(lengths)))
    return fitted_between(steps, counts, dominates(seq_lens))[1]


class Problem:
    """A random problem."""

    def __init__(self, seed: int, most: int = 36, num_buckets: int = 3):
        rng = np.random.default_rng(seed)
        sides = int(rng.integers(2, 4))
        ends = rng.integers(2, int(most ** (1 / sides)) + 1, sides)
        self.num_buckets = int(rng.integers(1, num_buckets + 1))
        self.multiples = rng.integers(1, 4, sides)
        self.last = ends * self.multiples
        size = int(rng.integers(3, 60))
        self.lengths = rng.integers(1, self.last + 1, (size, sides))
        self.lengths[0] = self.last
        budget = int(self.last.sum() * rng.choice([1.0, 1.3, 2.0, 4.0]))
        self.limits = limits_of(sides, budget, self.multiples, cost_fn=COSTS[seed % 3])

    def search(self) -> Search:
        points = Points.of(self.lengths, self.multiples, self.last, 1 << 16)
        pricing = Pricing.of(self.limits, points)
        return Search(points, pricing, self.num_buckets, False)

    def shapes(self) -> np.ndarray:
        sides = map(np.arange, self.multiples, self.last + 1, self.multiples)
        shapes = np.array(list(itertools.product(*sides)))
        return shapes[shape_order(shapes)]

    def cost(self, seq_lens: np.ndarray) -> float:
        """Returns the cost of an epoch with shapes."""
        return epoch_of(self.lengths, seq_lens, self.limits)

    def least_cost(self) -> float:
        """Returns the cost of the cheapest epoch over all sets of shapes."""
        shapes = self.shapes()
        sizes = self.limits.batch_sizes(shapes)
        shapes = shapes[sizes > 0]
        sizes = sizes[sizes > 0]
        rates = self.limits.costs(sizes, shapes) / sizes
        paid = np.where(fits(self.lengths, shapes), rates, np.inf)
        least = np.inf
        for number in range(1, self.num_buckets + 1):
            for chosen in map(list, itertools.combinations(range(len(shapes)), number)):
                # An epoch costs at least as much as with full batches.
                if paid[:, chosen].min(axis=1).sum() < least:
                    least = min(least, self.cost(shapes[chosen]))
        return least


def check_near_the_best_set(seeds: range) -> None:
    excesses = []
    for seed in seeds:
        problem = Problem(seed)
        plan = search_shapes(problem.lengths, problem.limits, problem.num_buckets)
        cost, least = problem.cost(plan), problem.least_cost()
        assert len(plan) <= problem.num_buckets
        assert cost >= least * (1 - 1e-9)
        excesses.append(cost / least - 1)
    assert np.mean(np.array(excesses) > 0.02) <= 0.1
    assert np.mean(excesses) < 0.01


def test_hardly_any_set_of_shapes_is_cheaper():
    check_near_the_best_set(range(12))


@pytest.mark.exhaustive
def test_hardly_any_set_of_shapes_is_cheaper_in_many_problems():
    check_near_the_best_set(range(20, 100))


@pytest.mark.parametrize("seed", range(8))
def test_swaps_count_what_every_shape_takes(seed):
    problem = Problem(seed)
    points, pricing = problem.search().points, problem.search().pricing
    axes = [np.arange(len(values)) for values in points.values]
    grid = Grid.of(points, axes, pricing)
    rng = np.random.default_rng(seed)
    shapes = grid.shapes[rng.permutation(len(grid))[:3]]
    choice = Assignment.of(points, shapes, pricing)
    for without in (None, 0):
        swaps = Swaps(choice, grid, without)
        others = shapes if without is None else shapes[1:]
        for c, shape in enumerate(grid.shapes):
            new = Assignment.of(points, np.append(others, shape[None], axis=0), pricing)
            finite = np.isfinite(grid.prices.rates[c])
            assert swaps.costs[c] == pytest.approx(new.cost if finite else np.inf)
            equal = (others == shape).all(axis=1).any()
            if finite and np.isfinite(new.rates).all() and not equal:
                counts = swaps.counts(np.array([c]))[0]
                counts = counts if without is None else np.delete(counts, without)
                assert counts.tolist() == new.counts(new.first)[:-1].tolist()


@pytest.mark.parametrize("seed", range(8))
def test_costs_of_many_epochs_are_no_better_than_the_best_steps(seed):
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 6))
    seq_lens = rng.integers(1, 9, (20, size, 2))
    seq_lens = np.take_along_axis(seq_lens, shape_order(seq_lens)[:, :, None], axis=1)
    multiple = 1 + seed % 2
    limits = limits_of(2, 40, batch_size_multiple=multiple)
    pricing = Pricing(limits)
    counts = rng.integers(0, 30, (20, size))
    shuffled = rng.permutation(size)
    estimates = estimated_costs(counts[:, shuffled], seq_lens[:, shuffled], pricing)
    for k in range(20):
        most, examples = limits.batch_sizes(seq_lens[k]), counts[k].sum() + 1
        steps = limits.sizes(seq_lens[k], most, np.full_like(most, examples))
        padded = steps.padded_costs(np.arange(size), counts[k]).sum()
        least = fitted_between(steps, counts[k], dominates(seq_lens[k]))[1]
        assert least <= estimates[k] * (1 + 1e-9)
        assert least <= padded


def test_one_shape_holds_all_if_it_must():
    lengths = np.array([[1, 8], [8, 1]] * 50)
    free = search_shapes(lengths, limits_of(2, 90), 3)
    assert free.tolist() == [[1, 8], [8, 1]]
    limits = limits_of(2, 90, max_seq_len={"a": 9, "b": 10})
    assert search_shapes(lengths, limits, 3).tolist() == [[1, 8], [8, 1], [9, 10]]
    assert search_shapes(lengths, limits, 1).tolist() == [[9, 10]]


def test_a_huge_cost_excludes_a_shape():
    lengths = np.array([[2, 2], [2, 4], [4, 4]] * 20)

    def cost_fn(batch_size, sizes):
        return 1e99 if dict(sizes) == {"a": 2, "b": 4} else batch_size * sizes.total

    limits = limits_of(2, 32, cost_fn=cost_fn)
    shapes = search_shapes(lengths, limits, 3)
    assert [2, 4] not in shapes.tolist()
    # An epoch of 40 examples that need 7 tokens, and of 20 that need 4.
    assert epoch_of(lengths, shapes, limits) < 1.1 * (40 * 7 + 20 * 4)


def test_any_number_of_sequences():
    rng = np.random.default_rng(5)
    lengths = np.maximum(1, rng.lognormal(3, 0.7, (300, 5)).astype(int))
    limits = limits_of(5, 8000, [8] * 5)
    shapes = search_shapes(lengths, limits, 4)
    whole = lengths.max(axis=0).sum() * len(lengths)
    assert epoch_of(lengths, shapes, limits) < whole / 1.5


@pytest.mark.exhaustive
def test_plans_do_not_depend_on_the_order_of_examples(monkeypatch):
    rng = np.random.default_rng(0)
    lengths = np.maximum(1, rng.lognormal(4, 0.6, (400, 2)).astype(int))
    limits = limits_of(2, 4096, [4, 8], cost_fn=by_pairs)
    shapes = search_shapes(lengths, limits, 4)
    other = search_shapes(rng.permutation(lengths), limits, 4)
    np.testing.assert_array_equal(shapes, other)
    # With many distinct lengths, the search goes from coarse to fine.
    monkeypatch.setattr(search, "_MAX_POINTS", 200)
    coarse = epoch_of(lengths, search_shapes(lengths, limits, 4), limits)
    assert coarse < 1.02 * epoch_of(lengths, shapes, limits)


@pytest.mark.exhaustive
def test_a_million_pairs_are_planned():
    rng = np.random.default_rng(0)
    source = np.maximum(1, rng.lognormal(6, 0.6, 1_000_000).astype(int))
    target = np.maximum(1, (source * rng.lognormal(0, 0.3, len(source))).astype(int))
    lengths = np.stack([source, target], axis=1).clip(max=4096)
    limits = limits_of(2, 1 << 17, [8, 8])
    shapes = search_shapes(lengths, limits, 16)
    whole = lengths.max(axis=0).sum() * len(lengths)
    assert epoch_of(lengths, shapes, limits) < whole / 1.5


@pytest.mark.parametrize(
    ("name", "num_buckets", "max_tokens"),
    [("max_tokens", 2, 11), ("num_buckets", 1, 13)],
)
def test_shapes_that_hold_not_all_examples_are_refused(name, num_buckets, max_tokens):
    lengths = np.array([[4, 5], [9, 3]])
    with pytest.raises(ValueError, match=f"`{name}"):
        search_shapes(lengths, limits_of(2, max_tokens), num_buckets)
