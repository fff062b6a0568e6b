"""Turns a source of examples into a `grain.MapDataset` of batches.

`source` defines what a source must provide, `collate` builds one batch from examples,
`pipeline` builds the batches of every step of a schedule, and `workers` loads them
ahead of use. `lengths` measures the lengths of examples. This package does not import
jax.
"""

from etils import epy as _epy

with _epy.lazy_api_imports(globals()):
    from jaxbucket.base.batch import Batch, RowShard
    from jaxbucket.base.position import DataPosition
    from jaxbucket.data.block_source import BlockSource, join_examples
    from jaxbucket.data.chunk_source import split_source
    from jaxbucket.data.collate import collate_rows
    from jaxbucket.data.concat_source import ConcatSource, concat_then_split
    from jaxbucket.data.joined_source import concatenate
    from jaxbucket.data.lengths.accumulated import AccumulatedMetric
    from jaxbucket.data.lengths.difficulty import measure_difficulty
    from jaxbucket.data.lengths.measure import measure_lengths
    from jaxbucket.data.lengths.rarity import token_rarity
    from jaxbucket.data.pipeline import batch_dataset
    from jaxbucket.data.selected_source import select
    from jaxbucket.data.token_file import TokenFile
    from jaxbucket.data.token_file_writer import write_token_file
    from jaxbucket.data.uncollate import unbatch
    from jaxbucket.data.workers import load_in_workers
    from jaxbucket.data.zipped_source import zip_sources
