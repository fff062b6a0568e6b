"""The rows and batches of an epoch, and where examples go that do not fill a batch.

`remainder` decides this, with a search in `between` for several sequences. `dominance`
compares shapes of several sequences. `step_sizes` are the possible B of shapes, and
`batch_sizes` chooses those that the examples fill.
"""
