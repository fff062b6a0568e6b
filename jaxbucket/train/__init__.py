"""The parts of a training loop: batches on a mesh, steps, predictions, checkpoints.

`loader` gives the batches, and `state` what a step changes. A loss (`loss`) returns
sums over the rows that it is given, and gets those of other devices by `global_rows`;
`step` and `accumulation` make train and evaluation steps of it, by jit, shard_map or
`pmap`, of `gradients` and an `update`. `prediction` gives outputs in the order of the
source, and `checkpoint` saves a state with its position in the data.
"""

from etils import epy as _epy

with _epy.lazy_api_imports(globals()):
    from jaxbucket.train.calibration import Calibration, calibrate, calibration_shapes
    from jaxbucket.train.checkpoint import Checkpoints, Restored
    from jaxbucket.train.global_rows import gather_rows, row_numbers
    from jaxbucket.train.loader import MeshLoader
    from jaxbucket.train.prediction import make_predict_step, predict
    from jaxbucket.train.state import TrainState, create_state
    from jaxbucket.train.step import make_eval_step, make_train_step
