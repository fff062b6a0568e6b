"""The rows and batches of an epoch, and where examples go that do not fill a batch.

`remainder` is for buckets of one length, `between` for those of several sequences, and
`epoch` for both. `dominance` compares shapes of several sequences.
"""
