"""Types shared by all packages, argument checks, and integer permutations.

A `Bucket` is one batch shape (B, T) and a `BucketPlan` is a set of buckets.
`BatchIndices` lists the examples of a batch, and a `Batch` holds its arrays. This
package does not import any other package of jaxbucket.
"""
