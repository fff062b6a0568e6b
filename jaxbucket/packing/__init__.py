"""From lengths to rows of several examples, and whether that pays.

`rows` packs one sequence per example (`best_fit`, `subset_sum`) or several
(`vector_best_fit`, `vector_pool`); `packed_plan` chooses between packed and padded
rows.
"""
