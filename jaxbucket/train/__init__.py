"""The parts of a training loop: batches on a mesh, steps, predictions, checkpoints.

`loader` yields the batches, and `state` defines the training state. `loss` describes
the contract of losses, which return sums over rows. `step` and `accumulation` build
train and evaluation steps from a loss; a train step combines `gradients` and an
`update`. `modes` runs them by jit or shard_map, and `pmap` on every device.
`prediction` returns outputs in the order of the source. `checkpoint` saves a state with
its position in the data, and `calibration` measures step times.
"""

from jaxbucket.base.lazy import lazy_names as _lazy_names

with _lazy_names(globals()):
    from jaxbucket.train.calibration import Calibration as Calibration
    from jaxbucket.train.calibration import calibrate as calibrate
    from jaxbucket.train.calibration import calibration_shapes as calibration_shapes
    from jaxbucket.train.checkpoint import Checkpoints as Checkpoints
    from jaxbucket.train.checkpoint import Restored as Restored
    from jaxbucket.train.loader import MeshLoader as MeshLoader
    from jaxbucket.train.modes import row_keys as row_keys
    from jaxbucket.train.prediction import make_predict_step as make_predict_step
    from jaxbucket.train.prediction import predict as predict
    from jaxbucket.train.state import TrainState as TrainState
    from jaxbucket.train.state import create_state as create_state
    from jaxbucket.train.step import make_eval_step as make_eval_step
    from jaxbucket.train.step import make_train_step as make_train_step
