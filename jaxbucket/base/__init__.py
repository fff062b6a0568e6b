"""The types that every package speaks, argument checks, and integer permutations.

A `Bucket` is one shape (B, T), a `BucketPlan` a set of them, `BatchIndices` the rows of
one step, and a `Batch` its arrays. This package imports no other.
"""
