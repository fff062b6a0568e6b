"""Turns a source of examples into a `grain.MapDataset` of batches.

`source` defines what a source must provide, `collate` builds one batch from examples,
`pipeline` builds the batches of every step of a schedule, and `workers` loads them
ahead of use. `measure` measures the lengths of examples. This package does not import
jax.
"""

from jaxbucket.base.lazy import lazy_names as _lazy_names

with _lazy_names(globals()):
    from jaxbucket.base.batch import Batch as Batch
    from jaxbucket.base.position import DataPosition as DataPosition
    from jaxbucket.base.row_shard import RowShard as RowShard
    from jaxbucket.data.collate import collate_rows as collate_rows
    from jaxbucket.data.measure import measure_difficulty as measure_difficulty
    from jaxbucket.data.measure import measure_lengths as measure_lengths
    from jaxbucket.data.pipeline import batch_dataset as batch_dataset
    from jaxbucket.data.spans import concat_then_split as concat_then_split
    from jaxbucket.data.spans import join_examples as join_examples
    from jaxbucket.data.spans import split_source as split_source
    from jaxbucket.data.token_file import TokenFile as TokenFile
    from jaxbucket.data.token_file import write_token_file as write_token_file
    from jaxbucket.data.uncollate import unbatch as unbatch
    from jaxbucket.data.views import concatenate as concatenate
    from jaxbucket.data.views import select as select
    from jaxbucket.data.views import zip_sources as zip_sources
    from jaxbucket.data.workers import load_in_workers as load_in_workers
