"""Shape buckets for training on variable-length data in JAX.

`import jaxbucket` needs numpy alone: planning runs where no jax is. What needs jax,
grain or flax is imported on first use.
"""

import importlib
from typing import TYPE_CHECKING

from jaxbucket.base.batch import Batch, BatchIndices, RowShard
from jaxbucket.base.buckets import Bucket, BucketPlan
from jaxbucket.base.position import DataPosition
from jaxbucket.base.version import __version__ as __version__
from jaxbucket.data.chunk_source import split_source
from jaxbucket.data.collate import collate_rows, unbatch
from jaxbucket.data.concat_source import ConcatSource, concat_then_split
from jaxbucket.data.source import concatenate
from jaxbucket.data.token_file import TokenFile, write_token_file
from jaxbucket.packing.packed_plan import PackedPlan, plan_packing
from jaxbucket.packing.rows import Packing, pack
from jaxbucket.plan.buckets import plan_buckets
from jaxbucket.plan.chunks import chunk_lengths
from jaxbucket.plan.costs import StepTime, TokenCost, TransformerCost
from jaxbucket.plan.curve import PlanCurve, plan_curve
from jaxbucket.plan.limits import Limits
from jaxbucket.plan.reports.comparison import Comparison, compare_plans
from jaxbucket.plan.reports.epoch import Report, report
from jaxbucket.schedule.curriculum import Curriculum
from jaxbucket.schedule.difficulty_index import DifficultyIndex
from jaxbucket.schedule.mixture import Mixture
from jaxbucket.schedule.pacing import CyclicPacing, LinearPacing, RootPacing, StepPacing
from jaxbucket.schedule.schedule import BatchSchedule
from jaxbucket.stream.drift import Drift, DriftWarning
from jaxbucket.stream.end import StreamEnd

if TYPE_CHECKING:
    from jaxbucket.attention.masks import (
        NextTokens,
        attention_mask,
        next_tokens,
        sequence_lengths,
        token_weights,
    )
    from jaxbucket.attention.segment import segment_attention
    from jaxbucket.compile import (
        CompiledSteps,
        CompileReport,
        ExecutableCache,
        compile_steps,
        count_compiles,
    )
    from jaxbucket.data.lengths.measure import measure_difficulty, measure_lengths
    from jaxbucket.data.pipeline import batch_dataset
    from jaxbucket.data.workers import load_in_workers
    from jaxbucket.distributed.processes import Processes
    from jaxbucket.distributed.stop import StopRequest
    from jaxbucket.optim import (
        is_linear_in_lr,
        scale_by_adam_sde,
        scale_by_batch_size,
        scale_schedule,
        schedule_by_work,
        warmup_inverse_sqrt_schedule,
    )
    from jaxbucket.sharding import (
        batch_specs,
        data_mesh,
        local_rows,
        prefetch_to_mesh,
        replicate,
    )
    from jaxbucket.sort import SortedKeys, SortedShare, sample_sort
    from jaxbucket.sort.difficulty import write_difficulty_index
    from jaxbucket.stream.dataset import sample_lengths, stream_batches
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


_ON_FIRST_USE = {
    "data_parallel_accumulate": "train.accumulation",
    "segment_attention": "attention.segment",
    "batch_dataset": "data.pipeline",
    "NextTokens": "attention.masks",
    "attention_mask": "attention.masks",
    "next_tokens": "attention.masks",
    "sequence_lengths": "attention.masks",
    "token_weights": "attention.masks",
    "measure_difficulty": "data.lengths.measure",
    "measure_lengths": "data.lengths.measure",
    "write_difficulty_index": "sort.difficulty",
    "load_in_workers": "data.workers",
    "batch_specs": "sharding",
    "data_mesh": "sharding",
    "local_rows": "sharding",
    "prefetch_to_mesh": "sharding",
    "replicate": "sharding",
    "Calibration": "train.calibration",
    "calibrate": "train.calibration",
    "calibration_shapes": "train.calibration",
    "Checkpoints": "train.checkpoint",
    "Restored": "train.checkpoint",
    "CompileReport": "compile",
    "CompiledSteps": "compile",
    "ExecutableCache": "compile",
    "compile_steps": "compile",
    "count_compiles": "compile",
    "is_linear_in_lr": "optim",
    "scale_by_adam_sde": "optim",
    "scale_by_batch_size": "optim",
    "scale_schedule": "optim",
    "schedule_by_work": "optim",
    "warmup_inverse_sqrt_schedule": "optim",
    "data_parallel_predict": "train.prediction",
    "predict": "train.prediction",
    "StopRequest": "distributed.stop",
    "Processes": "distributed.processes",
    "gather_rows": "train.rows",
    "row_numbers": "train.rows",
    "SortedKeys": "sort",
    "SortedShare": "sort",
    "sample_sort": "sort",
    "sample_lengths": "stream.dataset",
    "stream_batches": "stream.dataset",
    "TrainState": "train.step",
    "create_state": "train.step",
    "data_parallel": "train.step",
    "data_parallel_eval": "train.step",
}

__all__ = [
    "Batch",
    "BatchIndices",
    "BatchSchedule",
    "Bucket",
    "BucketPlan",
    "Calibration",
    "Checkpoints",
    "Comparison",
    "CompileReport",
    "CompiledSteps",
    "ConcatSource",
    "Curriculum",
    "CyclicPacing",
    "DataPosition",
    "DifficultyIndex",
    "Drift",
    "DriftWarning",
    "ExecutableCache",
    "Limits",
    "LinearPacing",
    "Mixture",
    "NextTokens",
    "PackedPlan",
    "Packing",
    "PlanCurve",
    "Processes",
    "Report",
    "Restored",
    "RootPacing",
    "RowShard",
    "SortedKeys",
    "SortedShare",
    "StepPacing",
    "StepTime",
    "StopRequest",
    "StreamEnd",
    "TokenCost",
    "TokenFile",
    "TrainState",
    "TransformerCost",
    "attention_mask",
    "batch_dataset",
    "batch_specs",
    "calibrate",
    "calibration_shapes",
    "chunk_lengths",
    "collate_rows",
    "compare_plans",
    "compile_steps",
    "concat_then_split",
    "concatenate",
    "count_compiles",
    "create_state",
    "data_mesh",
    "data_parallel",
    "data_parallel_accumulate",
    "data_parallel_eval",
    "data_parallel_predict",
    "gather_rows",
    "is_linear_in_lr",
    "load_in_workers",
    "local_rows",
    "measure_difficulty",
    "measure_lengths",
    "next_tokens",
    "pack",
    "plan_buckets",
    "plan_curve",
    "plan_packing",
    "predict",
    "prefetch_to_mesh",
    "replicate",
    "report",
    "row_numbers",
    "sample_lengths",
    "sample_sort",
    "scale_by_adam_sde",
    "scale_by_batch_size",
    "scale_schedule",
    "schedule_by_work",
    "segment_attention",
    "sequence_lengths",
    "split_source",
    "stream_batches",
    "token_weights",
    "unbatch",
    "warmup_inverse_sqrt_schedule",
    "write_difficulty_index",
    "write_token_file",
]


def __getattr__(name: str):
    if name in _ON_FIRST_USE:
        module = importlib.import_module(f"jaxbucket.{_ON_FIRST_USE[name]}")
        return getattr(module, name)
    raise AttributeError(f"module 'jaxbucket' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_ON_FIRST_USE})
