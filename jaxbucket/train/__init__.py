"""The parts of a training loop: losses, steps, predictions, checkpoints.

A loss returns sums (`loss`) over the rows of one device (`rows`); `step` and
`accumulation` make train and evaluation steps of it, over a mesh, by jit, shard_map or
`pmap`; `prediction` gives outputs in the order of the source; `checkpoint` saves a
state with its position in the data.
"""

from etils import epy as _epy

with _epy.lazy_api_imports(globals()):
    from jaxbucket.train.calibration import Calibration, calibrate, calibration_shapes
    from jaxbucket.train.checkpoint import Checkpoints, Restored
    from jaxbucket.train.loader import MeshLoader
    from jaxbucket.train.prediction import make_predict_step, predict
    from jaxbucket.train.rows import gather_rows, row_numbers
    from jaxbucket.train.state import TrainState, create_state
    from jaxbucket.train.step import make_eval_step, make_train_step
