"""Shape buckets for training on variable-length data in JAX.

`import jaxbucket` needs numpy alone: planning runs where no jax is. What needs jax,
grain or flax is imported on first use.
"""

import importlib
from typing import TYPE_CHECKING

from jaxbucket.base import Batch, BatchIndices, Bucket, BucketPlan, RowShard
from jaxbucket.chunk_source import split_source
from jaxbucket.chunks import chunk_lengths
from jaxbucket.collate import collate_rows, unbatch
from jaxbucket.comparison import Comparison, compare_plans
from jaxbucket.concat_source import ConcatSource, concat_then_split
from jaxbucket.costs import StepTime, TokenCost, TransformerCost
from jaxbucket.curriculum import Curriculum
from jaxbucket.curve import PlanCurve, plan_curve
from jaxbucket.difficulty_index import DifficultyIndex
from jaxbucket.drift import Drift, DriftWarning
from jaxbucket.limits import Limits
from jaxbucket.mixture import Mixture
from jaxbucket.pacing import CyclicPacing, LinearPacing, RootPacing, StepPacing
from jaxbucket.packed_plan import PackedPlan, plan_packing
from jaxbucket.packing import Packing, pack
from jaxbucket.plan import plan_buckets
from jaxbucket.position import DataPosition
from jaxbucket.schedule import BatchSchedule
from jaxbucket.source import concatenate
from jaxbucket.stats import Report, report
from jaxbucket.stream_end import StreamEnd
from jaxbucket.token_file import TokenFile, write_token_file

if TYPE_CHECKING:
    from jaxbucket.accumulation import data_parallel_accumulate
    from jaxbucket.attention import segment_attention
    from jaxbucket.calibration import Calibration, calibrate, calibration_shapes
    from jaxbucket.checkpoint import Checkpoints, Restored
    from jaxbucket.compile import (
        CompiledSteps,
        CompileReport,
        ExecutableCache,
        compile_steps,
        count_compiles,
    )
    from jaxbucket.difficulty import write_difficulty_index
    from jaxbucket.input_pipeline import batch_dataset
    from jaxbucket.masks import (
        NextTokens,
        attention_mask,
        next_tokens,
        sequence_lengths,
        token_weights,
    )
    from jaxbucket.measuring import measure_difficulty, measure_lengths
    from jaxbucket.optim import (
        is_linear_in_lr,
        scale_by_adam_sde,
        scale_by_batch_size,
        scale_schedule,
        schedule_by_work,
        warmup_inverse_sqrt_schedule,
    )
    from jaxbucket.prediction import data_parallel_predict, predict
    from jaxbucket.preemption import StopRequest
    from jaxbucket.processes import Processes
    from jaxbucket.rows import gather_rows, row_numbers
    from jaxbucket.sharding import (
        batch_specs,
        data_mesh,
        local_rows,
        prefetch_to_mesh,
        replicate,
    )
    from jaxbucket.sort import SortedKeys, SortedShare, sample_sort
    from jaxbucket.streaming import sample_lengths, stream_batches
    from jaxbucket.train import (
        TrainState,
        create_state,
        data_parallel,
        data_parallel_eval,
    )
    from jaxbucket.workers import load_in_workers

__version__ = "0.1.0"

_ON_FIRST_USE = {
    "data_parallel_accumulate": "accumulation",
    "segment_attention": "attention",
    "batch_dataset": "input_pipeline",
    "NextTokens": "masks",
    "attention_mask": "masks",
    "next_tokens": "masks",
    "sequence_lengths": "masks",
    "token_weights": "masks",
    "measure_difficulty": "measuring",
    "measure_lengths": "measuring",
    "write_difficulty_index": "difficulty",
    "load_in_workers": "workers",
    "batch_specs": "sharding",
    "data_mesh": "sharding",
    "local_rows": "sharding",
    "prefetch_to_mesh": "sharding",
    "replicate": "sharding",
    "Calibration": "calibration",
    "calibrate": "calibration",
    "calibration_shapes": "calibration",
    "Checkpoints": "checkpoint",
    "Restored": "checkpoint",
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
    "data_parallel_predict": "prediction",
    "predict": "prediction",
    "StopRequest": "preemption",
    "Processes": "processes",
    "gather_rows": "rows",
    "row_numbers": "rows",
    "SortedKeys": "sort",
    "SortedShare": "sort",
    "sample_sort": "sort",
    "sample_lengths": "streaming",
    "stream_batches": "streaming",
    "TrainState": "train",
    "create_state": "train",
    "data_parallel": "train",
    "data_parallel_eval": "train",
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
