"""The parts of a training loop: losses, steps, predictions, checkpoints.

A loss returns sums (`loss`) over the rows of one device (`rows`); `step` and
`accumulation` make train and evaluation steps of it, over a mesh, by jit, shard_map or
`pmap`; `prediction` gives outputs in the order of the source; `checkpoint` saves a
state with its position in the data.
"""

from etils import epy as _epy

with _epy.lazy_api_imports(globals()):
    from jaxbucket.train.accumulation import data_parallel_accumulate
    from jaxbucket.train.calibration import Calibration, calibrate, calibration_shapes
    from jaxbucket.train.checkpoint import Checkpoints, Restored
    from jaxbucket.train.prediction import data_parallel_predict, predict
    from jaxbucket.train.rows import gather_rows, row_numbers
    from jaxbucket.train.step import (
        TrainState,
        create_state,
        data_parallel,
        data_parallel_eval,
    )
