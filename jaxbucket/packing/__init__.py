"""Packing: rows of several examples, and the choice between packed and padded rows.

`rows` packs examples with one sequence (`best_fit`, `subset_sum`) or with several
(`vector_best_fit`). `planner` compares the costs of packed and padded rows, and
`row_search` searches for the T of packed rows.
"""

from jaxbucket.base.lazy import lazy_names as _lazy_names

with _lazy_names(globals()):
    from jaxbucket.packing.planner import PackedPlan as PackedPlan
    from jaxbucket.packing.planner import plan_packing as plan_packing
    from jaxbucket.packing.rows import Packing as Packing
    from jaxbucket.packing.rows import pack as pack
