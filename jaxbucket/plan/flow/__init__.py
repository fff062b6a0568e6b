"""The rows and batches of an epoch, and where examples go that do not fill a batch.

`remainder` is for buckets of one length, `between` for those of several sequences, and
`epoch` for both. `dominance` compares shapes of several sequences. `step_sizes` are the
possible B of shapes, of which `batch_sizes` chooses those that the examples fill.
"""
