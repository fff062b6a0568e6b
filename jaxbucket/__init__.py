"""Shape buckets for training on variable-length data in JAX.

The names of a typical training loop are available here, and all other public names in
their packages, for example `jaxbucket.plan.plan_curve`. Everything is imported on first
use, so that planning does not require jax.
"""

from etils import epy as _epy

# All packages are imported now, which is cheap, because `lazy_api_imports` replaces
# Python's import in all threads while it runs. It must not run later in a program.
from jaxbucket import (
    attention,
    compile,
    data,
    distributed,
    layers,
    optim,
    packing,
    plan,
    schedule,
    sort,
    stream,
    testing,
    train,
)
from jaxbucket.base.version import __version__

with _epy.lazy_api_imports(globals()):
    from jaxbucket import sharding
    from jaxbucket.attention.masks import next_tokens
    from jaxbucket.attention.segment import segment_attention
    from jaxbucket.base.batch import Batch
    from jaxbucket.base.bucket import Bucket
    from jaxbucket.base.buckets import BucketPlan
    from jaxbucket.compile.executable_cache import ExecutableCache
    from jaxbucket.compile.steps import compile_steps
    from jaxbucket.data.lengths.measure import measure_lengths
    from jaxbucket.data.pipeline import batch_dataset
    from jaxbucket.distributed.processes import Processes
    from jaxbucket.distributed.stop import StopRequest
    from jaxbucket.optim.batch_size import scale_by_batch_size
    from jaxbucket.optim.schedules import scale_schedule
    from jaxbucket.packing.planner import plan_packing
    from jaxbucket.plan.limits import Limits
    from jaxbucket.plan.planner import plan_buckets
    from jaxbucket.plan.reports.epoch import report
    from jaxbucket.schedule.batch_schedule import BatchSchedule
    from jaxbucket.schedule.curriculum import Curriculum
    from jaxbucket.schedule.joined_schedule import JoinedSchedule
    from jaxbucket.schedule.mixture import Mixture
    from jaxbucket.sharding import data_mesh
    from jaxbucket.stream.dataset import stream_batches
    from jaxbucket.train.checkpoint import Checkpoints
    from jaxbucket.train.loader import MeshLoader
    from jaxbucket.train.prediction import make_predict_step, predict
    from jaxbucket.train.state import create_state
    from jaxbucket.train.step import make_eval_step, make_train_step
