"""Schedules: pure functions from a step to the examples of its batch.

A `BatchSchedule` arranges the rows of each epoch (`epoch_rows`) in an order (`orders`,
`curriculum`). A `Mixture` takes its steps from several schedules. No schedule has a
state that advances, so a run resumes from a single integer. A `BatchSampler` yields the
indices of examples for PyTorch.
"""

from jaxbucket.base.lazy import lazy_names as _lazy_names

with _lazy_names(globals()):
    from jaxbucket.base.batch import BatchIndices as BatchIndices
    from jaxbucket.schedule.batch_sampler import BatchSampler as BatchSampler
    from jaxbucket.schedule.batch_schedule import BatchSchedule as BatchSchedule
    from jaxbucket.schedule.curriculum import Curriculum as Curriculum
    from jaxbucket.schedule.difficulty_index import DifficultyIndex as DifficultyIndex
    from jaxbucket.schedule.grouped_by_length import GroupedByLength as GroupedByLength
    from jaxbucket.schedule.joined_schedule import JoinedSchedule as JoinedSchedule
    from jaxbucket.schedule.mixture import Mixture as Mixture
    from jaxbucket.schedule.mixture_report import ComponentReport as ComponentReport
    from jaxbucket.schedule.mixture_report import MixtureReport as MixtureReport
    from jaxbucket.schedule.pacing import ByValue as ByValue
    from jaxbucket.schedule.pacing import LinearPacing as LinearPacing
    from jaxbucket.schedule.pacing import RootPacing as RootPacing
    from jaxbucket.schedule.pacing import StepPacing as StepPacing
