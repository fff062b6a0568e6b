"""The parts of a training loop: batches on a mesh, steps, predictions, checkpoints.

`loader` yields the batches, and `state` defines the training state. `loss` describes
the contract of losses, which return sums over rows and reach the rows of other devices
through `global_rows`. `step` and `accumulation` build train and evaluation steps from a
loss, for jit, shard_map or `pmap`; a train step combines `gradients` and an `update`.
`prediction` returns outputs in the order of the source, or `prediction_files` writes
them into a directory, which `predictions` reads. `checkpoint` saves a state with its
position in the data, and `calibration` measures step times. `bucket_gradients` measures
how far batches of one bucket are from the data.
"""

from etils import epy as _epy

with _epy.lazy_api_imports(globals()):
    from jaxbucket.train.bias_plot import plot_bias
    from jaxbucket.train.bias_report import BucketBias
    from jaxbucket.train.bucket_gradients import bucket_bias
    from jaxbucket.train.calibration import Calibration, calibrate, calibration_shapes
    from jaxbucket.train.checkpoint import Checkpoints, Restored
    from jaxbucket.train.global_rows import gather_rows, row_numbers, sum_over_rows
    from jaxbucket.train.loader import MeshLoader
    from jaxbucket.train.loss import row_keys
    from jaxbucket.train.prediction import make_predict_step, predict
    from jaxbucket.train.prediction_files import write_predictions
    from jaxbucket.train.predictions import Predictions
    from jaxbucket.train.state import TrainState, create_state
    from jaxbucket.train.step import make_eval_step, make_train_step
