import itertools
import time

import numpy as np
import pytest

from jaxbucket.base.assignment import cheapest
from jaxbucket.plan.flow.batch_sizes import fitted_between
from jaxbucket.plan.flow.dominance import dominates, fits, shape_order
from jaxbucket.plan.joint import search
from jaxbucket.plan.joint.additions import Choice, Grid
from jaxbucket.plan.joint.epoch import epoch_costs
from jaxbucket.plan.joint.planner import search_shapes
from jaxbucket.plan.joint.points import Points
from jaxbucket.plan.joint.pricing import Prices, Pricing
from jaxbucket.plan.joint.search import Search


def by_tokens(batch_sizes, seq_lens):
    return batch_sizes * seq_lens.sum(axis=1)


def by_pairs(batch_sizes, seq_lens):
    return batch_sizes * (seq_lens.sum(axis=1) + seq_lens.prod(axis=1) / 7)


def by_time(batch_sizes, seq_lens):
    """Steps with an overhead, in which some T are slow, so that rates are erratic."""
    slow = 1 + 0.3 * (seq_lens[:, 0] % 3 == 0)
    return 1.5 + batch_sizes * seq_lens.sum(axis=1) * slow


COSTS = by_tokens, by_pairs, by_time


def rows_within(max_tokens):
    return lambda seq_lens: max_tokens // seq_lens.sum(axis=1)


class Problem:
    """A random problem."""

    def __init__(self, seed: int, most: int = 36, num_buckets: int = 3):
        rng = np.random.default_rng(seed)
        self.costs_fn = COSTS[seed % 3]
        sides = int(rng.integers(2, 4))
        ends = rng.integers(2, int(most ** (1 / sides)) + 1, sides)
        self.num_buckets = int(rng.integers(1, num_buckets + 1))
        self.multiples = rng.integers(1, 4, sides)
        self.last = ends * self.multiples
        size = int(rng.integers(3, 60))
        self.lengths = rng.integers(1, self.last + 1, (size, sides))
        self.lengths[0] = self.last
        self.budget = int(self.last.sum() * rng.choice([1.0, 1.3, 2.0, 4.0]))
        self.batch_sizes_fn = rows_within(self.budget)

    def plan(self, **options):
        return search_shapes(
            self.lengths,
            self.num_buckets,
            self.batch_sizes_fn,
            self.costs_fn,
            **{"multiples": self.multiples, **options},
        )

    def pricing(self) -> Pricing:
        return Pricing(self.batch_sizes_fn, self.costs_fn)

    def search(self) -> Search:
        points = Points.of(self.lengths, self.multiples, self.last, 1 << 16)
        pricing = self.pricing()
        pricing = pricing.with_unit(points.seq_lens(points.indices), len(self.lengths))
        return Search(points, pricing, self.num_buckets, False)

    def shapes(self) -> np.ndarray:
        sides = map(np.arange, self.multiples, self.last + 1, self.multiples)
        shapes = np.array(list(itertools.product(*sides)))
        return shapes[shape_order(shapes)]

    def costs(self, seq_lens: np.ndarray) -> tuple[float, float]:
        """Returns the cost of an epoch with shapes, and with full batches."""
        if not fits(self.lengths, seq_lens).any(axis=1).all():
            return np.inf, np.inf
        sizes = self.batch_sizes_fn(seq_lens)
        costs = self.costs_fn(sizes, seq_lens)
        shapes = cheapest(self.lengths, seq_lens, costs / sizes)
        counts = np.bincount(shapes, minlength=len(seq_lens))
        steps = self.pricing().sizes(seq_lens, len(self.lengths))
        cost = fitted_between(steps, counts, dominates(seq_lens))[1]
        return cost, float(counts @ (costs / sizes))

    def least_cost(self) -> float:
        """Returns the cost of the cheapest epoch over all sets of shapes."""
        shapes = self.shapes()
        sizes = self.batch_sizes_fn(shapes)
        shapes = shapes[sizes > 0]
        rates = self.costs_fn(sizes[sizes > 0], shapes) / sizes[sizes > 0]
        paid = np.where(fits(self.lengths, shapes), rates, np.inf)
        least = np.inf
        for number in range(1, self.num_buckets + 1):
            for chosen in map(list, itertools.combinations(range(len(shapes)), number)):
                # An epoch costs at least as much as with full batches.
                if paid[:, chosen].min(axis=1).sum() < least:
                    least = min(least, self.costs(shapes[chosen])[0])
        return least


def check_near_the_best_set(seeds: range) -> None:
    excesses = []
    for seed in seeds:
        problem = Problem(seed)
        plan, least = problem.plan(), problem.least_cost()
        assert len(plan.seq_lens) <= problem.num_buckets
        assert problem.costs(plan.seq_lens) == pytest.approx(
            (plan.epoch_cost, plan.steady_cost)
        )
        assert plan.epoch_cost >= least * (1 - 1e-9)
        excesses.append(plan.epoch_cost / least - 1)
    assert np.mean(np.array(excesses) > 0.02) <= 0.1
    assert np.mean(excesses) < 0.01


def test_hardly_any_set_of_shapes_is_cheaper():
    check_near_the_best_set(range(20))


@pytest.mark.exhaustive
def test_hardly_any_set_of_shapes_is_cheaper_in_many_problems():
    check_near_the_best_set(range(20, 100))


@pytest.mark.parametrize("seed", range(30))
def test_additions_count_what_every_shape_takes(seed):
    problem = Problem(seed)
    points, pricing = problem.search().points, problem.search().pricing
    axes = [np.arange(len(values)) for values in points.values]
    grid = Grid.of(points, axes, pricing)
    rng = np.random.default_rng(seed)
    shapes = grid.shapes[rng.permutation(len(grid))[:3]]
    choice = Choice.of(points, shapes, pricing)
    for without in (None, 0):
        additions = choice.additions(grid, without)
        others = shapes if without is None else shapes[1:]
        for c, shape in enumerate(grid.shapes):
            new = Choice.of(points, np.append(others, shape[None], axis=0), pricing)
            finite = np.isfinite(grid.prices.rates[c])
            assert additions.costs[c] == pytest.approx(new.cost if finite else np.inf)
            equal = (others == shape).all(axis=1).any()
            if finite and np.isfinite(new.rates).all() and not equal:
                counts = additions.counts(np.array([c]))[0]
                counts = counts if without is None else np.delete(counts, without)
                assert counts.tolist() == new.counts(new.first)[:-1].tolist()


@pytest.mark.parametrize("seed", range(30))
def test_costs_of_many_epochs_are_no_better_than_the_best_steps(seed):
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 6))
    seq_lens = rng.integers(1, 9, (20, size, 2))
    seq_lens = np.take_along_axis(seq_lens, shape_order(seq_lens)[:, :, None], axis=1)
    multiple = 1 + seed % 2
    pricing = Pricing(
        lambda seq_lens: 40 // seq_lens.sum(axis=1) // multiple * multiple,
        by_tokens,
        batch_size_multiple=multiple,
    )
    columns = pricing(seq_lens.reshape(-1, 2))
    prices = Prices(*(column.reshape(20, size) for column in columns))
    counts = rng.integers(0, 30, (20, size))
    shuffled = rng.permutation(size)
    estimates = epoch_costs(
        counts[:, shuffled],
        seq_lens[:, shuffled],
        Prices(*(column[:, shuffled] for column in prices)),
        pricing,
    )
    for k in range(20):
        steps = pricing.sizes(seq_lens[k], int(counts[k].sum()) + 1)
        padded = steps.padded_costs(np.arange(size), counts[k]).sum()
        least = fitted_between(steps, counts[k], dominates(seq_lens[k]))[1]
        assert least <= estimates[k] * (1 + 1e-9)
        assert least <= padded


def test_one_shape_holds_all_if_it_must():
    lengths = np.array([[1, 8], [8, 1]] * 50)
    options = {"multiples": [1, 1], "max_seq_lens": [9, 10]}
    arguments = lengths, 3, rows_within(90), by_tokens
    free = search_shapes(*arguments, **options)
    assert free.seq_lens.tolist() == [[1, 8], [8, 1]]
    plan = search_shapes(*arguments, **options, must_hold_all=True)
    assert plan.seq_lens.tolist() == [[1, 8], [8, 1], [9, 10]]
    assert plan.epoch_cost == free.epoch_cost
    single = search_shapes(lengths, 1, *arguments[2:], **options, must_hold_all=True)
    assert single.seq_lens.tolist() == [[9, 10]]


def test_pairs_are_held_by_shapes_that_the_budget_allows():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 100, (500, 2))
    lengths = lengths[lengths.sum(axis=1) <= 100]
    plan = search_shapes(lengths, 8, rows_within(120), by_tokens, multiples=[4, 4])
    assert fits(lengths, plan.seq_lens).any(axis=1).all()
    assert (plan.seq_lens.sum(axis=1) <= 120).all()


def test_accumulated_batches_are_full_together():
    lengths = np.array([[4, 4]] * 5)
    plan = search_shapes(
        lengths, 1, rows_within(16), by_tokens, multiples=[1, 1], accumulate=2
    )
    assert plan.epoch_cost == 64


def test_a_huge_cost_excludes_a_shape():
    lengths = np.array([[2, 2], [2, 4], [4, 4]] * 20)

    def costs_fn(batch_sizes, seq_lens):
        excluded = (seq_lens == [2, 4]).all(axis=1)
        return np.where(excluded, 1e99, by_tokens(batch_sizes, seq_lens))

    plan = search_shapes(lengths, 3, rows_within(32), costs_fn, multiples=[1, 1])
    assert [2, 4] not in plan.seq_lens.tolist()
    # An epoch of 40 examples that need 7 tokens, and of 20 that need 4.
    assert plan.epoch_cost < 1.1 * (40 * 7 + 20 * 4)


@pytest.mark.parametrize("sides", [1, 2, 3, 4, 5])
def test_any_number_of_sequences(sides):
    rng = np.random.default_rng(sides)
    lengths = np.maximum(1, rng.lognormal(3, 0.7, (300, sides)).astype(int))
    plan = search_shapes(
        lengths, 4, rows_within(8000), by_tokens, multiples=[8] * sides
    )
    assert fits(lengths, plan.seq_lens).any(axis=1).all()
    whole = by_tokens(1, lengths.max(axis=0)[None])[0] * len(lengths)
    assert plan.steady_cost <= plan.epoch_cost < whole / 1.5


@pytest.mark.exhaustive
def test_plans_are_deterministic_and_do_not_depend_on_the_order_of_examples():
    rng = np.random.default_rng(0)
    lengths = np.maximum(1, rng.lognormal(4, 0.6, (400, 2)).astype(int))
    arguments = 4, rows_within(4096), by_pairs
    plan = search_shapes(lengths, *arguments, multiples=[4, 8])
    other = search_shapes(rng.permutation(lengths), *arguments, multiples=[4, 8])
    np.testing.assert_array_equal(plan.seq_lens, other.seq_lens)
    assert plan.epoch_cost == other.epoch_cost


@pytest.mark.exhaustive
def test_many_distinct_lengths_are_searched_from_coarse_to_fine(monkeypatch):
    rng = np.random.default_rng(0)
    lengths = np.maximum(1, rng.lognormal(4, 0.6, (500, 2)).astype(int))
    arguments = lengths, 4, rows_within(4096), by_tokens
    exact = search_shapes(*arguments, multiples=[4, 4])
    monkeypatch.setattr(search, "_MAX_POINTS", 200)
    coarse = search_shapes(*arguments, multiples=[4, 4])
    assert coarse.epoch_cost < 1.02 * exact.epoch_cost


@pytest.mark.exhaustive
def test_a_million_pairs_take_seconds():
    rng = np.random.default_rng(0)
    source = np.maximum(1, rng.lognormal(6, 0.6, 1_000_000).astype(int))
    target = np.maximum(1, (source * rng.lognormal(0, 0.3, len(source))).astype(int))
    lengths = np.stack([source, target], axis=1).clip(max=4096)
    start = time.process_time()
    plan = search_shapes(lengths, 16, rows_within(1 << 17), by_tokens, multiples=[8, 8])
    assert time.process_time() - start < 10
    whole = by_tokens(1, lengths.max(axis=0)[None])[0] * len(lengths)
    assert plan.epoch_cost < whole / 1.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": [1, 2]}, r"`lengths` has shape \(2,\) and dtype int64. Pass int"),
        ({"lengths": [[1.5, 2]]}, r"`lengths` has shape \(1, 2\) and dtype float64"),
        ({"lengths": np.zeros((0, 2), int)}, r"`lengths` has shape \(0, 2\)"),
        ({"lengths": [[1, 2], [0, 3]]}, r"`lengths\[1\]=\[0, 3\]`: a length must be b"),
        ({"multiples": [1]}, r"`multiples=\[1\]` must be 2 positive integers, one for"),
        ({"multiples": [1, 0]}, r"`multiples=\[1, 0\]` must be 2 positive integers"),
        (
            {"multiples": [2, 3], "max_seq_lens": [9, 9]},
            r"`max_seq_lens=\[9, 9\]` are not multiples of `multiples=\[2, 3\]`. Use "
            r"\[10, 9\]",
        ),
        (
            {"max_seq_lens": [8, 8]},
            r"`lengths\[1\]=\[9, 3\]` is beyond `max_seq_lens=\[8, 8\]`. Raise",
        ),
        ({"num_buckets": 0}, "`num_buckets=0` must be a positive integer"),
        ({"accumulate": 0}, "`accumulate=0` must be a positive integer"),
        (
            {"batch_sizes_fn": rows_within(13), "must_hold_all": True},
            r"`max_seq_lens=\[9, 5\]` does not fit in a batch, but `must_hold_all",
        ),
        (
            {"batch_sizes_fn": rows_within(11)},
            r"No batch of the shape \[9, 3\] is allowed, but an example needs it",
        ),
        (
            {"batch_sizes_fn": rows_within(13), "num_buckets": 1},
            "`num_buckets=1`: no choice of so few shapes was found that holds all ex",
        ),
    ],
)
def test_invalid_arguments_are_refused(options, message):
    arguments = {
        "lengths": [[4, 5], [9, 3]],
        "num_buckets": 2,
        "batch_sizes_fn": rows_within(100),
        "costs_fn": by_tokens,
        "multiples": [1, 1],
    }
    with pytest.raises(ValueError, match=message):
        search_shapes(**{**arguments, **options})
