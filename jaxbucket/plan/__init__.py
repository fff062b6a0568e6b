"""From lengths to a `BucketPlan`: the shapes (B, T) that minimize the cost of an epoch.

`limits` determines the batch size for each T, `histogram` counts the lengths, and
`costs` defines the cost of a step of each shape. `optimal` and `boundary_rules` choose
the boundaries of buckets, `joint_planner` those of several sequences, and `remainder`
assigns the examples that do not fill a batch. `planner` combines these modules, and
`reports` describes a plan and its cost.
"""

from jaxbucket.base.lazy import lazy_names as _lazy_names

with _lazy_names(globals()):
    from jaxbucket.plan.chunks import chunk_lengths as chunk_lengths
    from jaxbucket.plan.costs import StepTime as StepTime
    from jaxbucket.plan.costs import TokenCost as TokenCost
    from jaxbucket.plan.costs import TransformerCost as TransformerCost
    from jaxbucket.plan.curve import PlanCurve as PlanCurve
    from jaxbucket.plan.curve import plan_curve as plan_curve
    from jaxbucket.plan.limits import Limits as Limits
    from jaxbucket.plan.planner import plan_buckets as plan_buckets
    from jaxbucket.plan.planner import plan_within as plan_within
    from jaxbucket.plan.reports.compare import compare_plans as compare_plans
    from jaxbucket.plan.reports.comparison import Comparison as Comparison
    from jaxbucket.plan.reports.epoch import Report as Report
    from jaxbucket.plan.reports.epoch import report as report
