"""The parts of a training loop: losses, steps, predictions, checkpoints.

A loss returns sums (`loss`) over the rows of one device (`rows`); `step` and
`accumulation` make train and evaluation steps of it, over a mesh, by jit, shard_map or
`pmap`; `prediction` gives outputs in the order of the source; `checkpoint` saves a
state with its position in the data.
"""
