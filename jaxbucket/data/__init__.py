"""Turns a source of examples into a `grain.MapDataset` of batches.

`source` defines what a source must provide, `collate` builds one batch from examples,
`pipeline` builds the batches of every step of a schedule, and `workers` loads them
ahead of use. `lengths` measures the lengths of examples. This package does not import
jax.
"""

from jaxbucket.base.lazy import lazy_names as _lazy_names

with _lazy_names(globals()):
    from jaxbucket.base.batch import Batch as Batch
    from jaxbucket.base.batch import RowShard as RowShard
    from jaxbucket.base.position import DataPosition as DataPosition
    from jaxbucket.data.block_source import BlockSource as BlockSource
    from jaxbucket.data.block_source import join_examples as join_examples
    from jaxbucket.data.chunk_source import split_source as split_source
    from jaxbucket.data.collate import collate_rows as collate_rows
    from jaxbucket.data.concat_source import ConcatSource as ConcatSource
    from jaxbucket.data.concat_source import concat_then_split as concat_then_split
    from jaxbucket.data.joined_source import concatenate as concatenate
    from jaxbucket.data.lengths.accumulated import (
        AccumulatedMetric as AccumulatedMetric,
    )
    from jaxbucket.data.lengths.difficulty import (
        measure_difficulty as measure_difficulty,
    )
    from jaxbucket.data.lengths.measure import measure_lengths as measure_lengths
    from jaxbucket.data.lengths.rarity import token_rarity as token_rarity
    from jaxbucket.data.pipeline import batch_dataset as batch_dataset
    from jaxbucket.data.selected_source import select as select
    from jaxbucket.data.token_file import TokenFile as TokenFile
    from jaxbucket.data.token_file_writer import write_token_file as write_token_file
    from jaxbucket.data.uncollate import unbatch as unbatch
    from jaxbucket.data.workers import load_in_workers as load_in_workers
    from jaxbucket.data.zipped_source import zip_sources as zip_sources
