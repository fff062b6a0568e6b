"""From lengths to a `BucketPlan`: the shapes (B, T) that minimize the cost of an epoch.

How a plan for one length comes about (`planner.plan_within`):

1. `limits.Limits` hold the options. They say how large B may be for a T, which numbers
   of rows a step may have and what these cost (`flow.step_sizes`, with `costs`).
2. `candidates` count the examples up to every T at which a bucket may end.
3. `optimal` chooses K of them: `lower_bound` bounds the cost of all longer examples by
   dynamic programming, as if every batch were full, and `branch_and_bound` extends
   choices bucket by bucket, remainders included, pruned by these bounds.
   `boundary_rules` are simpler ways to choose.
4. `flow.batch_sizes` chooses B of each bucket for the examples that it gets, and
   `Limits.plan` makes the plan.

How a plan for several lengths comes about, with a T for each in every shape. The
sequences are planned jointly, in the files `joint_*` (`joint_planner.plan_sequences`):

1. `nested` finds shapes to start from: it sorts the examples by one number, and lets
   `optimal` cut this order into K buckets.
2. `joint_points` count the examples that need each combination of T, and
   `joint_pricing` says what a batch of any shape holds and costs.
3. `joint_search` adds and swaps shapes while an epoch becomes cheaper, from a few
   shapes and from the nested ones; `joint_swaps` counts what each of thousands of
   shapes would take, at once. Few combinations are enumerated.
4. Every set of shapes found is priced with B by `flow.batch_sizes`. The cheapest one
   gets its final B for all lengths, and buckets without batches are removed unless
   that costs more.

In both, `flow.remainder` says where examples go that do not fill a batch: it is also
what `BatchSchedule` follows. `reports` describe an epoch of a plan, and compare
numbers of buckets.
"""

from jaxbucket.base.lazy import lazy_names as _lazy_names

with _lazy_names(globals()):
    from jaxbucket.plan.chunks import chunk_lengths as chunk_lengths
    from jaxbucket.plan.costs import StepTime as StepTime
    from jaxbucket.plan.costs import TokenCost as TokenCost
    from jaxbucket.plan.costs import TransformerCost as TransformerCost
    from jaxbucket.plan.devices import device_limits as device_limits
    from jaxbucket.plan.devices import row_shard_shares as row_shard_shares
    from jaxbucket.plan.limits import Limits as Limits
    from jaxbucket.plan.memory_fit import FittedBatchSizes as FittedBatchSizes
    from jaxbucket.plan.planner import plan_buckets as plan_buckets
    from jaxbucket.plan.planner import plan_within as plan_within
    from jaxbucket.plan.reports.comparison import Comparison as Comparison
    from jaxbucket.plan.reports.comparison import compare_plans as compare_plans
    from jaxbucket.plan.reports.curve import PlanCurve as PlanCurve
    from jaxbucket.plan.reports.curve import plan_curve as plan_curve
    from jaxbucket.plan.reports.epoch import Report as Report
    from jaxbucket.plan.reports.epoch import report as report
