"""Schedules: pure functions from a step to the examples of its batch.

No schedule has a state that advances, so a run resumes from a single integer. This is
how `schedule[1234]` of a `BatchSchedule` gets its rows:

1. When the schedule is created, `epoch_rows` assigns each example to its bucket, and
   decides how many rows and batches each bucket has in an epoch. Examples that do not
   fill a batch are promoted to a longer bucket, padded or dropped (`plan.flow`). With
   packed rows, the same is done with rows of several examples (`packed_rows`).
2. The step is divided by the steps of an epoch: 1,234 is step 234 of epoch 1 if there
   are 1,000 (`batch_schedule`). It has one position of the epoch, or several with
   micro-batches of different buckets.
3. The order of the schedule finds the batch at this position. The named orders
   (`orders`, with the sequences of `spread`) and `GroupedByLength` compute its number,
   and `EpochRows.batch_rows` turns the number into a bucket and some of its rows.
4. `EpochRows.examples` returns the examples of these rows. With the orders that are
   redrawn in each epoch, a keyed permutation, which depends on the seed, the epoch and
   the bucket, shuffles them without a table. A `Curriculum` instead deals all batches
   of the epoch from the examples that its pacing functions have opened (`curriculum`,
   `metric`, `pacing`, `paced_order`).
5. Rows are filled up with -1 and cut into micro-batches, and may be balanced
   (`balance`). `PackedRows` replaces each packed row by its examples, which are drawn
   among those of the same lengths.

`data.pipeline` and `data.reader` load these rows, and `sharding.global_batch` puts them
on the mesh.

A `Mixture` and a `JoinedSchedule` only decide which step of which component comes next
(`combined`). A `BatchSampler` yields the indices of examples for PyTorch.
"""

from jaxbucket.base.lazy import lazy_names as _lazy_names

with _lazy_names(globals()):
    from jaxbucket.base.batch import BatchIndices as BatchIndices
    from jaxbucket.schedule.batch_counts import BatchCounts as BatchCounts
    from jaxbucket.schedule.batch_sampler import BatchSampler as BatchSampler
    from jaxbucket.schedule.batch_schedule import BatchSchedule as BatchSchedule
    from jaxbucket.schedule.curriculum import Curriculum as Curriculum
    from jaxbucket.schedule.difficulty_index import DifficultyIndex as DifficultyIndex
    from jaxbucket.schedule.joined_schedule import JoinedSchedule as JoinedSchedule
    from jaxbucket.schedule.mixture import ComponentReport as ComponentReport
    from jaxbucket.schedule.mixture import Mixture as Mixture
    from jaxbucket.schedule.mixture import MixtureReport as MixtureReport
    from jaxbucket.schedule.orders import GroupedByLength as GroupedByLength
    from jaxbucket.schedule.pacing import ByValue as ByValue
    from jaxbucket.schedule.pacing import LinearPacing as LinearPacing
    from jaxbucket.schedule.pacing import RootPacing as RootPacing
    from jaxbucket.schedule.pacing import StepPacing as StepPacing
