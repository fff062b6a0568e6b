"""From a source of examples to batches, `grain.MapDataset[Batch]`.

`source` says what a source has to have, `collate` makes a batch of its examples,
`pipeline` those of every step of a schedule, and `workers` loads them ahead. `lengths`
measures how long examples are. This package does not import jax.
"""
