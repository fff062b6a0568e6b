"""Batches a stream of unknown lengths into a `grain.IterDataset[Batch]`.

`reader` reads examples into a `pool`, after `overlong` has measured them. `iterator`
takes batches from the pool, and saves and restores where it is; `lockstep` keeps the
processes of a run in the same bucket until a `drain` empties their pools. `loader`
reads the examples of other data loaders. This package does not import jax.
"""

from jaxbucket.base.lazy import lazy_names as _lazy_names

with _lazy_names(globals()):
    from jaxbucket.stream.dataset import StreamDataset as StreamDataset
    from jaxbucket.stream.dataset import sample_lengths as sample_lengths
    from jaxbucket.stream.dataset import stream_batches as stream_batches
    from jaxbucket.stream.drift import DriftWarning as DriftWarning
    from jaxbucket.stream.examples import ExampleStream as ExampleStream
    from jaxbucket.stream.iterator import StreamIterator as StreamIterator
    from jaxbucket.stream.loader import from_loader as from_loader
