"""Measures the lengths of a source with Apache Beam, on all machines that it has.

    python examples/measure_with_beam.py my_data:open_source /shared/lengths

`my_data.open_source()` returns the source, such as an `ArrayRecordDataSource` of Grain.
Every task measures a part of it and stores the lengths in the folder, which all
machines can access. Training jobs then call `jb.measure_lengths(source, cache=folder)`,
which only reads them. A pipeline that was stopped measures the missing parts when it is
run again. Options of Beam, such as `--runner=DataflowRunner`, follow the others.

Requires `pip install "jaxbucket[train,beam]"`.
"""

import argparse
import importlib
from typing import Any

import apache_beam as beam
import numpy as np
from apache_beam.options.pipeline_options import PipelineOptions

import jaxbucket as jb


def measure_part(index: int, count: int, name: str, cache: str) -> int:
    """Measures and stores one part of a source; returns its number of examples."""
    lengths = jb.measure_lengths(
        open_source(name), share=(index, count), cache=cache, progress=False
    )
    return len(lengths)


def open_source(name: str) -> Any:
    """Returns the source of `module:function`."""
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)()


def main(arguments: list[str] | None = None) -> np.ndarray:
    parser = argparse.ArgumentParser()
    parser.add_argument("source", help="module:function that returns the source")
    parser.add_argument("cache", help="a folder that all machines can access")
    parser.add_argument("--parts", type=int, default=256, help="number of tasks")
    args, others = parser.parse_known_args(arguments)
    with beam.Pipeline(options=PipelineOptions(others)) as pipeline:
        _ = (
            pipeline
            | beam.Create(range(args.parts))
            | beam.Reshuffle()
            | beam.Map(measure_part, args.parts, args.source, args.cache)
        )
    lengths = jb.measure_lengths(open_source(args.source), cache=args.cache)
    print(f"{len(lengths):,} lengths, {lengths.sum(dtype=np.int64):,} tokens")
    return lengths


if __name__ == "__main__":
    main()
