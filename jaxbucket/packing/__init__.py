"""Packing: rows of several examples, and the choice between packed and padded rows.

`rows` packs examples with one sequence (`best_fit`, `subset_sum`) or with several
(`vector_best_fit`, `vector_pool`). `packed_plan` compares the costs of packed and
padded rows.
"""

from etils import epy as _epy

with _epy.lazy_api_imports(globals()):
    from jaxbucket.packing.packed_plan import PackedPlan
    from jaxbucket.packing.planner import plan_packing
    from jaxbucket.packing.rows import Packing, pack
