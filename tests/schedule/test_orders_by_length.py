"""`GroupedByLength`, which draws new batches of similar lengths in every epoch."""

import numpy as np
import pytest
from schedule_cases import batches_of, real_rows, seeds

from jaxbucket import BatchSchedule, plan_buckets
from jaxbucket.base.permutation import fold, permute
from jaxbucket.packing import pack
from jaxbucket.schedule import GroupedByLength

EPOCHS = (0, 10**6)


def random_problem(seed):
    """Returns a random plan and lengths, of which some may be too long."""
    rng = np.random.default_rng(seed)
    size, longest = int(rng.choice([1, 7, 30, 90])), int(rng.choice([1, 9, 60]))
    lengths = rng.integers(1, longest, size, endpoint=True)
    plan = plan_buckets(
        lengths,
        max_tokens=longest * int(rng.integers(1, 5)),
        num_buckets=int(rng.integers(1, 5)),
        max_seq_len=-(-longest * 3 // 4) if seed % 2 else None,
        overlong="drop",
    )
    return plan, lengths


def examples_of(schedule, epoch):
    """Returns `[(bucket, examples)]` for the batches of an epoch."""
    return [(x.bucket, real_rows(x).tolist()) for x in batches_of(schedule, epoch)]


def shuffled_examples(plan, lengths, seed, epoch):
    """Returns the examples of each bucket, shuffled as for all redrawn orders."""
    assigned = plan.assign(lengths)
    for k in range(len(plan)):
        examples = np.flatnonzero(assigned == k)
        places = np.arange(len(examples))
        yield examples[permute(places, len(examples), fold(seed, epoch, k))]


def grouped_batches(plan, lengths, seed, epoch, order):
    """The reference implementation of the batches of `GroupedByLength`."""
    batches = []
    for bucket, drawn in zip(
        plan.buckets, shuffled_examples(plan, lengths, seed, epoch), strict=True
    ):
        size = bucket.batch_size
        count = -(-len(drawn) // size)
        span = min(order.window, max(1, count // 4)) * size
        for start in range(0, len(drawn), span):
            window = sorted(drawn[start : start + span].tolist(), key=lengths.item)
            parts = [window[i : i + size] for i in range(0, len(window), size)]
            batches += [(bucket, part) for part in parts]
    return batches


@pytest.mark.parametrize("seed", seeds(4, 30))
def test_grouped_batches_are_those_of_the_reference(seed):
    plan, lengths = random_problem(seed)
    options = {"seed": 3, "remainder": "pad"}
    spread = BatchSchedule(plan, lengths, order="spread", **options)
    for order in (GroupedByLength(2), GroupedByLength()):
        schedule = BatchSchedule(plan, lengths, order=order, **options)
        for epoch in EPOCHS:
            got = examples_of(schedule, epoch)
            want = grouped_batches(plan, lengths, 3, epoch, order)
            assert sorted(map(str, got)) == sorted(map(str, want))
            # Only the examples differ from those of "spread".
            sizes = [(bucket, len(rows)) for bucket, rows in got]
            assert sizes == [(x, len(rows)) for x, rows in examples_of(spread, epoch)]


def test_packed_rows_of_similar_lengths_share_a_batch():
    lengths = np.random.default_rng(0).integers(1, 60, 400)
    packing = pack(lengths, (64, 256), max_segments_per_row=3)
    plan = plan_buckets(
        packing.row_lengths, max_tokens=1024, boundaries=packing.seq_lens
    )
    ranges = []
    for x in (GroupedByLength(3), "shuffled"):
        schedule = BatchSchedule(plan, lengths, packing=packing, order=x)
        batches = [schedule[step].rows for step in range(len(schedule))]
        tokens = [np.where(rows >= 0, lengths[rows], 0).sum(axis=1) for rows in batches]
        ranges.append(np.mean([np.ptp(x[x > 0]) for x in tokens]))
        rows = np.concatenate([rows[rows >= 0] for rows in batches])
        assert sorted(rows) == list(range(len(lengths)))
    assert ranges[0] < 0.7 * ranges[1]


@pytest.mark.parametrize("window", [0, 2.5])
def test_an_invalid_window_is_refused(window):
    with pytest.raises(ValueError, match="`window="):
        GroupedByLength(window)
