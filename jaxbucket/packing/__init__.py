"""From lengths to rows of several examples, and whether that pays.

`rows` packs one sequence per example (`best_fit`, `subset_sum`) or several
(`vector_best_fit`, `vector_pool`); `packed_plan` chooses between packed and padded
rows.
"""

from etils import epy as _epy

with _epy.lazy_api_imports(globals()):
    from jaxbucket.packing.packed_plan import PackedPlan, plan_packing
    from jaxbucket.packing.rows import Packing, pack
