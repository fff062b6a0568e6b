"""From lengths to a `BucketPlan`: the shapes (B, T) that minimize the cost of an epoch.

`limits` determines the batch size for each T, `histogram` counts the lengths, and
`costs` defines the cost of a step of each shape. `optimal` and `boundary_rules` choose
the boundaries of buckets, `joint` those of several sequences at once, and `remainder`
assigns the examples that do not fill a batch. `planner` combines these modules, and
`reports` describes a plan and its cost.
"""

from etils import epy as _epy

with _epy.lazy_api_imports(globals()):
    from jaxbucket.plan.area import AreaBudget, AreaCost
    from jaxbucket.plan.chunks import chunk_lengths
    from jaxbucket.plan.costs import StepTime, TokenCost, TransformerCost
    from jaxbucket.plan.curve import PlanCurve
    from jaxbucket.plan.curve_search import plan_curve
    from jaxbucket.plan.encoder_decoder_cost import EncoderDecoderCost
    from jaxbucket.plan.limits import Limits
    from jaxbucket.plan.planner import plan_buckets
    from jaxbucket.plan.reports.compare import compare_plans
    from jaxbucket.plan.reports.comparison import Comparison
    from jaxbucket.plan.reports.epoch import Report, report
    from jaxbucket.plan.sequence_limits import SequenceLimits
