"""From lengths to a `BucketPlan`: which shapes (B, T) an epoch costs least in.

`limits` says how many rows a T may have, `histogram` counts the lengths, `costs` prices
a step of each shape, `optimal` and `rules` choose where buckets end, and `remainder`
says what becomes of examples that fill no batch. `reports` shows what a plan costs.
"""
