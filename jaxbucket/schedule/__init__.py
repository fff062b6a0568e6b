"""From a step to the examples of its batch, as pure functions of the step.

`BatchSchedule` deals the rows of an epoch (`epoch_rows`) in an order (`orders`,
`curriculum`); `Mixture` takes steps from several schedules. Nothing advances, so that a
run resumes from one integer.
"""

from etils import epy as _epy

with _epy.lazy_api_imports(globals()):
    from jaxbucket.base.batch import BatchIndices
    from jaxbucket.schedule.batch_schedule import BatchSchedule
    from jaxbucket.schedule.curriculum import Curriculum
    from jaxbucket.schedule.difficulty_index import DifficultyIndex
    from jaxbucket.schedule.mixture import Mixture
    from jaxbucket.schedule.pacing import (
        CyclicPacing,
        LinearPacing,
        RootPacing,
        StepPacing,
    )
