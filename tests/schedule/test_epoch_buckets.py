"""The buckets of an epoch, against those of every single step."""

import numpy as np
import pytest

from jaxbucket import BatchSchedule, Curriculum, Mixture, plan_buckets
from jaxbucket.schedule import GroupedByLength, LinearPacing, NoisySorted
from jaxbucket.schedule.epoch_buckets import epoch_buckets

LENGTHS = np.random.default_rng(0).integers(1, 17, 150)
PLAN = plan_buckets(LENGTHS, max_tokens=64, num_buckets=3)
EASY_FIRST = Curriculum(LENGTHS, LinearPacing(start=0.1, epochs=2))
REPEATING = Curriculum(LENGTHS, LinearPacing(start=0.1, epochs=2), replacement=True)
OTHERS = [EASY_FIRST, NoisySorted(0.5), GroupedByLength(2)]


def check(schedule):
    for epoch in range(3):
        first = epoch * len(schedule)
        steps = range(first, first + len(schedule))
        micro = [x.bucket for step in steps for x in schedule.micro_batches(step)]
        indices = [schedule.plan.buckets.index(bucket) for bucket in micro]
        assert epoch_buckets(schedule, epoch).tolist() == indices


@pytest.mark.parametrize(
    "options",
    [{}, {"accumulate": 3}, {"accumulate": 4, "group": "mixed"}],
    ids=str,
)
@pytest.mark.parametrize("order", ["spread", "shuffled", "ascending", *OTHERS])
def test_the_buckets_are_those_of_the_steps(order, options):
    check(BatchSchedule(PLAN, LENGTHS, order=order, **options))


def test_draws_with_replacement_have_the_buckets_of_their_steps():
    check(BatchSchedule(PLAN, LENGTHS, order=REPEATING))


@pytest.mark.parametrize(
    "each, together", [(1, 1), (1, 3), (2, 1)], ids=["single", "together", "each"]
)
def test_a_mixture_has_the_buckets_of_its_steps(each, together):
    schedules = [
        BatchSchedule(PLAN, lengths, seed=seed, accumulate=each, group="mixed")
        for seed, lengths in enumerate((LENGTHS, LENGTHS[:20], LENGTHS[:70]))
    ]
    check(Mixture(schedules, [3, 2, 1], accumulate=together))


def test_a_component_of_a_mixture_may_miss_an_epoch():
    schedules = [BatchSchedule(PLAN, LENGTHS[:n]) for n in (4, 4)]
    check(Mixture(schedules, [40, 1]))
