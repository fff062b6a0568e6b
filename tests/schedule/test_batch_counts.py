"""Numbers of examples by step, without the examples."""

import numpy as np
import pytest

import jaxbucket as jb
from jaxbucket.schedule.batch_counts import BatchCounts
from jaxbucket.schedule.orders import GroupedByLength


@pytest.mark.parametrize("order", ["spread", "shuffled", GroupedByLength()], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"remainder": "pad"},
        {"remainder": "drop"},
        {"remainder": "repeat"},
        {"accumulate": 3},
        {"accumulate": 3, "group": "mixed"},
        {"accumulate": 4, "group": "mixed", "remainder": "repeat", "seed": 7},
    ],
    ids=str,
)
def test_every_step_has_the_numbers_of_the_schedule(problem, order, options):
    plan, lengths = problem
    try:
        schedule = jb.BatchSchedule(plan, lengths, order=order, **options)
    except ValueError:
        # No bucket has a full batch.
        with pytest.raises(ValueError, match="`remainder="):
            BatchCounts(plan, lengths, order=order, **options)
        return
    for known in (lengths, jb.LengthCounts(lengths)):
        counts = BatchCounts(plan, known, order=order, **options)
        assert counts.steps_per_epoch == schedule.steps_per_epoch
        assert counts.report == schedule.report()
        for step in range(min(2 * len(schedule), 150)):
            expected = tuple(
                (x.bucket, int((x.rows >= 0).sum()))
                for x in schedule.micro_batches(step)
            )
            assert counts.micro_batches(step) == expected


def test_several_sequences_have_the_numbers_of_the_schedule():
    rng = np.random.default_rng(0)
    pairs = {"source": rng.integers(1, 50, 700), "target": rng.integers(1, 50, 700)}
    plan = jb.plan_buckets(pairs, max_tokens=600, num_buckets=4)
    schedule, counts = jb.BatchSchedule(plan, pairs), BatchCounts(plan, pairs)
    for step, batch in enumerate(schedule):
        rows = int((batch.rows >= 0).sum())
        assert counts.micro_batches(step) == ((batch.bucket, rows),)


@pytest.mark.parametrize(
    "argument, options",
    [
        ("order", {"order": "source"}),
        ("order", {"order": "ascending"}),
        ("order", {"order": "unknown"}),
        ("order", {"order": jb.Curriculum([1, 2, 3])}),
        ("group", {"group": "other"}),
        ("accumulate", {"accumulate": 0}),
        ("seed", {"seed": -1}),
        ("remainder", {"remainder": "other"}),
    ],
)
def test_an_option_that_does_not_fit_is_named(argument, options):
    plan = jb.plan_buckets([3, 5, 9], max_tokens=18)
    with pytest.raises(ValueError, match=f"`{argument}"):
        BatchCounts(plan, [3, 5, 9], **options)
