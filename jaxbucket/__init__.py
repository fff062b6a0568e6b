"""Shape buckets for training on variable-length data in JAX.

The names of a typical training loop are available here, and all other public names in
their packages, for example `jaxbucket.plan.plan_curve`. Everything is imported on first
use, so that planning does not require jax.
"""

# All packages are imported now, which is cheap, because `lazy_names` replaces Python's
# import in all threads while it runs. It must not run later in a program.
from jaxbucket import attention as attention
from jaxbucket import compile as compile
from jaxbucket import data as data
from jaxbucket import distributed as distributed
from jaxbucket import optim as optim
from jaxbucket import packing as packing
from jaxbucket import plan as plan
from jaxbucket import schedule as schedule
from jaxbucket import sharding as sharding
from jaxbucket import simulate as simulate
from jaxbucket import sort as sort
from jaxbucket import stream as stream
from jaxbucket import testing as testing
from jaxbucket import train as train
from jaxbucket.base.lazy import lazy_names as _lazy_names
from jaxbucket.base.version import __version__ as __version__

with _lazy_names(globals()):
    from jaxbucket.attention.formats import convert_batch as convert_batch
    from jaxbucket.attention.segment import segment_attention as segment_attention
    from jaxbucket.attention.targets import next_tokens as next_tokens
    from jaxbucket.base.batch import Batch as Batch
    from jaxbucket.base.bucket import Bucket as Bucket
    from jaxbucket.base.buckets import BucketPlan as BucketPlan
    from jaxbucket.base.length_counts import LengthCounts as LengthCounts
    from jaxbucket.compile.steps import compile_steps as compile_steps
    from jaxbucket.data.measure import measure_lengths as measure_lengths
    from jaxbucket.data.pipeline import batch_dataset as batch_dataset
    from jaxbucket.distributed.processes import Processes as Processes
    from jaxbucket.distributed.stop import StopRequest as StopRequest
    from jaxbucket.optim.batch_size import scale_by_batch_size as scale_by_batch_size
    from jaxbucket.optim.schedules import scale_schedule as scale_schedule
    from jaxbucket.packing.planner import plan_packing as plan_packing
    from jaxbucket.plan.limits import Limits as Limits
    from jaxbucket.plan.planner import plan_buckets as plan_buckets
    from jaxbucket.plan.reports.epoch import report as report
    from jaxbucket.schedule.batch_schedule import BatchSchedule as BatchSchedule
    from jaxbucket.schedule.curriculum import Curriculum as Curriculum
    from jaxbucket.schedule.joined_schedule import JoinedSchedule as JoinedSchedule
    from jaxbucket.schedule.mixture import Mixture as Mixture
    from jaxbucket.sharding.mesh import data_mesh as data_mesh
    from jaxbucket.stream.dataset import stream_batches as stream_batches
    from jaxbucket.train.checkpoint import Checkpoints as Checkpoints
    from jaxbucket.train.loader import MeshLoader as MeshLoader
    from jaxbucket.train.prediction import make_predict_step as make_predict_step
    from jaxbucket.train.prediction import predict as predict
    from jaxbucket.train.state import create_state as create_state
    from jaxbucket.train.step import make_eval_step as make_eval_step
    from jaxbucket.train.step import make_train_step as make_train_step
