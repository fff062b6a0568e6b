"""From lengths to a `BucketPlan`: which shapes (B, T) an epoch costs least in.

`limits` says how many rows a T may have, `histogram` counts the lengths, and `costs`
prices a step of each shape; `optimal` and `boundary_rules` choose where buckets end,
and `remainder` says what becomes of examples that fill no batch. `planner` puts them
together, and `reports` shows what a plan costs.
"""

from etils import epy as _epy

with _epy.lazy_api_imports(globals()):
    from jaxbucket.plan.chunks import chunk_lengths
    from jaxbucket.plan.costs import StepTime, TokenCost, TransformerCost
    from jaxbucket.plan.curve import PlanCurve, plan_curve
    from jaxbucket.plan.limits import Limits
    from jaxbucket.plan.planner import plan_buckets
    from jaxbucket.plan.reports.comparison import Comparison, compare_plans
    from jaxbucket.plan.reports.epoch import Report, report
