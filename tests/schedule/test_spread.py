"""The order "spread": any window of steps has the share of every bucket."""

from collections.abc import Iterable, Sequence

import numpy as np
import pytest

from jaxbucket import BatchSchedule, plan_buckets
from jaxbucket.schedule.spread import SpreadUpdates, item_at, occurrences


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


def spread_evenly(
    positions: Iterable[int], counts: Sequence[int] | np.ndarray
) -> np.ndarray:
    """Returns the items at positions, and the numbers of their occurrences."""
    counts = tuple(map(int, counts))
    return np.array([item_at(int(position), counts) for position in positions]).T


def at(updates: SpreadUpdates, positions: Iterable[int], start: int = 0) -> np.ndarray:
    """Returns the buckets at positions, and the numbers of their batches."""
    return np.array([updates.at(int(position), start) for position in positions]).T


@pytest.mark.parametrize("counts", [(3, 0, 5, 1), (7,), (1, 1), (40, 2, 9, 9, 1)])
def test_occurrences_are_those_of_the_sequence(counts):
    total = sum(counts)
    items, numbers = spread_evenly(np.arange(total), np.array(counts))
    for position in range(2 * total):
        before = occurrences(position, counts)
        epoch, place = divmod(position, total)
        item = items[place]
        assert before[item] == epoch * counts[item] + numbers[place]
        after = occurrences(position + 1, counts)
        assert [b - a for a, b in zip(before, after, strict=True)] == [
            int(i == item) for i in range(len(counts))
        ]


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


@pytest.mark.parametrize(
    "counts", [[2**30, 2**29, 2**29 - 1], [2**62 - 3, 2], [2**62 - 1]]
)
def test_the_longest_sequences_do_not_overflow(counts):
    total = sum(counts)
    items, numbers = spread_evenly(range(total - 100, total), counts)
    for item, count in enumerate(counts):
        seen = numbers[items == item]
        np.testing.assert_array_equal(seen, np.arange(count - len(seen), count))


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


def test_seeds_start_with_different_buckets():
    assert len({str(make_schedule(seed)[0].bucket) for seed in range(20)}) > 1


def test_batches_that_are_not_full_are_at_any_place_of_an_epoch():
    schedule = make_schedule(size=1000, remainder="pad")
    batches = [schedule[step] for step in range(40 * len(schedule))]
    missing = np.array([np.sum(batch.rows < 0) for batch in batches]) > 0
    by_epoch = missing.reshape(40, -1)
    assert set(by_epoch.sum(axis=1)) == {by_epoch[0].sum()} and by_epoch[0].sum() > 2
    # Each of them is a random batch of its bucket.
    number = by_epoch.mean(axis=0)
    assert number.max() < 0.8 and np.ptp(np.flatnonzero(number)) > len(number) / 2


def updates_of(counts: np.ndarray, size: int, head: int = 0, start: int = 0):
    """Returns the whole updates, `[U, size]`, and all other batches."""
    updates = SpreadUpdates(counts, size, head)
    items, _ = at(updates, np.arange(counts.sum()), start)
    head = min(head, len(items))
    last = head + updates.num_updates * size
    others = np.concatenate([items[:head], items[last:]])
    return items[head:last].reshape(-1, size), others


@pytest.mark.parametrize("seed", range(60))
def test_updates_have_each_batch_once_and_one_of_each_part(seed):
    counts, size, head = random_counts(seed), 2 + seed % 4, seed % 3
    updates = SpreadUpdates(counts, size, head)
    items, numbers = at(updates, np.arange(counts.sum()), start=seed)
    for item, count in enumerate(counts):
        assert sorted(numbers[items == item]) == list(range(count))
    some = np.random.default_rng(seed).integers(0, len(items), 20)
    got = at(updates, some, seed)
    np.testing.assert_array_equal(got, np.stack([items, numbers])[:, some])
    whole, others = updates_of(counts, size, head)
    head = min(head, len(items))
    assert len(others) == head + (len(items) - head) % size
    # Sorted, the first batches of all updates are the shortest, and so on.
    parts = np.sort(whole, axis=0).T.ravel()
    np.testing.assert_array_equal(parts, np.sort(whole, axis=None))
    # The others are evenly spaced in the sorted epoch.
    excess = np.cumsum(np.bincount(others, minlength=len(counts)))
    excess = excess - len(others) * np.cumsum(counts) / len(items)
    assert np.abs(excess).max() <= 2


@pytest.mark.parametrize("seed", range(40))
def test_updates_of_short_and_long_batches_come_evenly(seed):
    counts, size = random_counts(seed), 2 + seed % 3
    whole, _ = updates_of(counts, size)
    kinds, kind = np.unique(whole, axis=0, return_inverse=True)
    assert len(kinds) <= len(counts) + size
    excess = deviations(kind.ravel(), np.bincount(kind.ravel(), minlength=len(kinds)))
    assert np.abs(excess).max(initial=0) < 2
    # So does each bucket, in any window of updates.
    if len(whole):
        seen = np.bincount(whole.ravel(), minlength=len(counts))
        excess = deviations(whole.ravel(), seen)[:, ::size]
        assert np.ptp(excess, axis=1).max() < 4 * size
    # Pairs of buckets whose values are symmetric have equal means.
    even = updates_of(np.concatenate([counts, counts[::-1]]), 2)[0]
    np.testing.assert_array_equal(even.sum(axis=1), 2 * len(counts) - 1)


@pytest.mark.parametrize("size", [2, 3, 4, 6])
def test_updates_have_similar_mixes_of_lengths(size):
    ratios = []
    for seed in range(100):
        counts = random_counts(seed)
        if np.count_nonzero(counts) < 3 or counts.sum() < 50 * size:
            continue
        values = np.log2(1 + np.arange(len(counts)))
        means = values[updates_of(counts, size)[0]].mean(axis=1)
        shuffled = np.random.default_rng(seed).permutation(np.repeat(values, counts))
        others = shuffled[: means.size * size].reshape(-1, size).mean(axis=1)
        ratios.append(means.std() / others.std())
    assert len(ratios) >= 20 and np.median(ratios) < 0.5 and max(ratios) < 1.2


def test_an_update_that_completes_an_opening_has_batches_of_all_lengths():
    counts = np.array([50, 100, 50])
    items, _ = at(SpreadUpdates(counts, 4, head=3), np.arange(200))
    assert items[:3].tolist() == [0, 1, 2]
    assert items[-1] == 1


def test_an_update_may_have_a_large_part_of_all_batches():
    counts = np.array([30_000, 29_999])
    updates = SpreadUpdates(counts, 2**16, head=20_000)
    items, numbers = at(updates, np.arange(59_999))
    for item, count in enumerate(counts):
        np.testing.assert_array_equal(np.sort(numbers[items == item]), np.arange(count))


def test_micro_batches_of_a_step_have_short_and_long_buckets():
    schedule = make_schedule(accumulate=2, group="mixed")
    for number in range(3):
        steps = range(number * len(schedule), (number + 1) * len(schedule))
        pairs = np.array([[x.bucket.seq_len for x in schedule[step]] for step in steps])
        # The sorted pairs: the shorter one gets longer as the longer one gets shorter.
        pairs = pairs[: len(pairs) - (schedule.flow.num_batches % 2)]
        assert pairs[:, 0].max() <= pairs[:, 1].min()
        order = np.lexsort((-pairs[:, 1], pairs[:, 0]))
        assert (np.diff(pairs[order, 1]) <= 0).all()
