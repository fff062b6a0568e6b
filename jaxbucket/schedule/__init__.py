"""Schedules: pure functions from a step to the examples of its batch.

A `BatchSchedule` arranges the rows of each epoch (`epoch_rows`) in an order (`orders`,
`curriculum`). A `Mixture` takes its steps from several schedules. No schedule has a
state that advances, so a run resumes from a single integer. A `BatchSampler` yields the
indices of examples for PyTorch.
"""

from etils import epy as _epy

with _epy.lazy_api_imports(globals()):
    from jaxbucket.base.batch import BatchIndices
    from jaxbucket.schedule.batch_sampler import BatchSampler
    from jaxbucket.schedule.batch_schedule import BatchSchedule
    from jaxbucket.schedule.curriculum import Curriculum
    from jaxbucket.schedule.difficulty_index import DifficultyIndex
    from jaxbucket.schedule.grouped_by_length import GroupedByLength
    from jaxbucket.schedule.joined_schedule import JoinedSchedule
    from jaxbucket.schedule.mixture import Mixture
    from jaxbucket.schedule.mixture_report import ComponentReport, MixtureReport
    from jaxbucket.schedule.noisy_sorted import NoisySorted
    from jaxbucket.schedule.pacing import (
        ByValue,
        CyclicPacing,
        LinearPacing,
        RootPacing,
        StepPacing,
    )
