"""Batches a stream of unknown lengths into a `grain.IterDataset[Batch]`.

`reader` reads examples into a `pool` (or a `packed_pool`), after `overlong` has
measured them. `iterator` takes batches from the pool, `rounds` coordinates the
processes of a run until a `drain` empties their pools, and `state` saves and restores
an iterator. `mixture` takes batches from several streams in turn. `loader_stream` reads
the examples of other data loaders. This package does not import jax.
"""

from jaxbucket.base.lazy import lazy_names as _lazy_names

with _lazy_names(globals()):
    from jaxbucket.stream.dataset import sample_lengths as sample_lengths
    from jaxbucket.stream.dataset import stream_batches as stream_batches
    from jaxbucket.stream.drift import Drift as Drift
    from jaxbucket.stream.drift import DriftWarning as DriftWarning
    from jaxbucket.stream.loader_stream import from_loader as from_loader
    from jaxbucket.stream.mixture import StreamMixture as StreamMixture
    from jaxbucket.stream.pending_examples import easy_first as easy_first
    from jaxbucket.stream.stream_end import StreamEnd as StreamEnd
