"""The order "spread": any window of steps has the share of every bucket."""

import pickle

import numpy as np
import pytest

from jaxbucket import BatchSchedule, Bucket, BucketPlan, plan_buckets
from jaxbucket.schedule.spread import spread_evenly


def random_counts(seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    num_items = int(rng.integers(1, 17))
    shares = rng.dirichlet(np.full(num_items, rng.choice([0.1, 1, 10])))
    return rng.multinomial(int(10 ** rng.uniform(0, 3.3)), shares)


def deviations(sequence: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Returns `[K, N + 1]`, the excess of each item in the first t positions."""
    seen = np.cumsum(sequence == np.arange(len(counts))[:, None], axis=1)
    seen = np.hstack([np.zeros((len(counts), 1)), seen])
    return seen - counts[:, None] / len(sequence) * np.arange(len(sequence) + 1)


def sequence_of(counts: np.ndarray) -> np.ndarray:
    return spread_evenly(np.arange(counts.sum()), counts)[0]


@pytest.mark.parametrize("seed", range(60))
def test_every_window_has_the_share_of_every_item(seed):
    counts = random_counts(seed)
    items, numbers = spread_evenly(np.arange(counts.sum()), counts)
    for item, count in enumerate(counts):
        np.testing.assert_array_equal(numbers[items == item], np.arange(count))
    excess = deviations(items, counts)
    assert np.abs(excess).max() < 2
    # A window is the difference of two such parts, also if it continues at the start.
    assert np.ptp(excess, axis=1).max() < 4


def test_errors_are_typically_below_one():
    errors = []
    for seed in range(200):
        counts = random_counts(seed)
        errors.append(np.abs(deviations(sequence_of(counts), counts)).max())
    assert np.quantile(errors, 0.9) < 1
    assert max(errors) < 1.5


@pytest.mark.parametrize("seed", range(10))
def test_any_position_is_computed_without_the_others(seed):
    rng = np.random.default_rng(seed)
    counts = random_counts(seed)
    items, numbers = spread_evenly(np.arange(counts.sum()), counts)
    some = rng.integers(0, counts.sum(), 20)
    for got, want in zip(spread_evenly(some, counts), (items, numbers), strict=True):
        np.testing.assert_array_equal(got, want[some])


@pytest.mark.parametrize(
    "counts", [[2**30, 2**29, 2**29 - 1], [2**31 - 3, 2], [2**31 - 1]]
)
def test_the_longest_sequences_do_not_overflow(counts):
    total = sum(counts)
    items, numbers = spread_evenly(np.arange(total - 100, total), np.array(counts))
    for item, count in enumerate(counts):
        seen = numbers[items == item]
        np.testing.assert_array_equal(seen, np.arange(count - len(seen), count))
    with pytest.raises(ValueError, match="2,147,483,648 batches per epoch are too ma"):
        spread_evenly(np.arange(3), np.array([2**31 - 5, 5]))


def test_a_single_item_and_no_items():
    assert sequence_of(np.array([0, 3])).tolist() == [1, 1, 1]
    assert sequence_of(np.array([0, 0])).tolist() == []


def make_schedule(seed=0, size=3000, **options) -> BatchSchedule:
    rng = np.random.default_rng(1)
    lengths = np.ceil(np.minimum(rng.lognormal(3.5, 0.8, size), 300)).astype(int)
    plan = plan_buckets(lengths, max_tokens=1200, num_buckets=6)
    return BatchSchedule(plan, lengths, seed=seed, order="spread", **options)


def bucket_numbers(schedule: BatchSchedule, num_steps: int) -> np.ndarray:
    batches = (x for i in range(num_steps) for x in schedule.micro_batches(i))
    return np.array([schedule.plan.buckets.index(batch.bucket) for batch in batches])


@pytest.mark.parametrize("seed", range(5))
def test_any_window_of_a_run_has_the_share_of_every_bucket(seed):
    schedule = make_schedule(seed)
    numbers = bucket_numbers(schedule, 3 * len(schedule))
    counts = np.bincount(numbers, minlength=len(schedule.plan))
    assert np.ptp(deviations(numbers, counts), axis=1).max() < 2.5
    options = {"seed": seed, "order": "shuffled"}
    shuffled = BatchSchedule(schedule.plan, schedule.lengths, **options)
    others = bucket_numbers(shuffled, 3 * len(schedule))
    assert np.ptp(deviations(others, counts), axis=1).max() > 4


def test_epochs_and_seeds_have_different_batches():
    schedule, other = make_schedule(), make_schedule(seed=1)
    one, two = schedule[0], schedule[len(schedule)]
    assert one.bucket == two.bucket and not np.array_equal(one.rows, two.rows)
    starts = {str(make_schedule(seed)[0].bucket) for seed in range(20)}
    assert len(starts) > 1 and schedule.fingerprint != other.fingerprint


def test_batches_that_are_not_full_are_at_any_place_of_an_epoch():
    schedule = make_schedule(size=1000, remainder="pad")
    batches = [schedule[step] for step in range(40 * len(schedule))]
    missing = np.array([np.sum(batch.rows < 0) for batch in batches]) > 0
    by_epoch = missing.reshape(40, -1)
    assert set(by_epoch.sum(axis=1)) == {by_epoch[0].sum()} and by_epoch[0].sum() > 2
    # Each of them is a random batch of its bucket.
    number = by_epoch.mean(axis=0)
    assert number.max() < 0.8 and np.ptp(np.flatnonzero(number)) > len(number) / 2


def test_the_rest_of_an_opened_epoch_is_spread():
    bucket = make_schedule().plan.buckets[-1]
    schedule = make_schedule(opening=[(bucket, 4)])
    numbers = bucket_numbers(schedule, 2 * len(schedule))
    assert set(numbers[:4]) == {len(schedule.plan) - 1}
    for part in (numbers[4 : len(schedule)], numbers[len(schedule) :]):
        counts = np.bincount(part, minlength=len(schedule.plan))
        assert np.ptp(deviations(part, counts), axis=1).max() < 2.5


def test_micro_batches_of_a_step_are_of_different_buckets():
    schedule = make_schedule(accumulate=2, group="mixed")
    same = [len({x.bucket for x in schedule[i]}) == 1 for i in range(len(schedule))]
    assert np.mean(same) < 0.1


def test_a_copy_in_another_process_has_the_same_batches():
    schedule = make_schedule()
    copy = pickle.loads(pickle.dumps(schedule))
    for step in range(len(schedule)):
        np.testing.assert_array_equal(copy[step].rows, schedule[step].rows)


def test_a_plan_of_one_bucket_is_spread():
    plan = BucketPlan((Bucket(2, 4),), max_tokens=8)
    schedule = BatchSchedule(plan, [1, 2, 3, 4, 4], order="spread")
    rows = np.concatenate([batch.rows for batch in schedule])
    assert sorted(rows[rows >= 0]) == [0, 1, 2, 3, 4]
