"""The command `jaxbucket analyze`: examples sorted by metrics of their difficulty."""

from __future__ import annotations

import pathlib
import shutil
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from jaxbucket.base.progress import bar_if_slow
from jaxbucket.cli.options import NEW, POSITIVE, json_option
from jaxbucket.cli.outputs import check_outputs, new_figure
from jaxbucket.cli.show import show
from jaxbucket.data.lengths.quantities import DIFFICULTY_DTYPES
from jaxbucket.data.lengths.values import short_repr
from jaxbucket.data.source import Source

if TYPE_CHECKING:
    import numpy as np

    from jaxbucket.base.process_group import ProcessGroup
    from jaxbucket.cli.metrics import NamedMetric
    from jaxbucket.schedule.difficulty_index import DifficultyIndex

_FOLDER = click.Path(file_okay=False, writable=True, path_type=pathlib.Path)
# Measured values of a run that has not finished.
_CACHE = ".measured"


@click.command()
@click.argument("source")
@click.option(
    "--metric",
    "metrics",
    metavar="NAME[=WHAT]",
    multiple=True,
    required=True,
    help="length, rarity or mean_rarity, of a feature as in rarity=tokens; or the "
    "metric of a function, as in NAME=module:function. Repeat it for several metrics.",
)
@click.option(
    "--output",
    "-o",
    type=_FOLDER,
    required=True,
    help="Write an index for each metric into this folder, which all processes share.",
)
@click.option(
    "--vocab-size",
    type=POSITIVE,
    help="The number of different tokens, for rarity and mean_rarity.",
)
@click.option(
    "--dtype",
    type=click.Choice(DIFFICULTY_DTYPES),
    default="float32",
    help="The dtype of the values of functions. float32 is exact for integers up to "
    "2**24.",
)
@click.option(
    "--num-workers",
    type=click.IntRange(min=0),
    default=0,
    help="Number of worker processes.",
)
@click.option("--plot", type=NEW, help="Draw histograms to this file.")
@json_option
def analyze(
    source: str,
    metrics: tuple[str, ...],
    output: pathlib.Path,
    vocab_size: int | None,
    dtype: str,
    num_workers: int,
    plot: pathlib.Path | None,
    as_json: bool,
) -> None:
    """Measure metrics of the examples in SOURCE, and sort the examples by each.

    SOURCE is module:function, a function without arguments that returns a
    random-access source. For each metric, this writes a difficulty index, which
    `jb.Curriculum` and `jb.schedule.DifficultyIndex` read. All metrics are measured in
    one pass; rarity, and any other `jb.data.AccumulatedMetric`, needs another pass to
    count tokens. A run that was killed continues where it stopped. In several
    processes, each measures a share of the examples.
    """
    check_outputs([], plot=plot)
    from jaxbucket.cli.metrics import parse_metrics
    from jaxbucket.distributed.processes import Processes

    with Processes() as processes:
        is_first = processes.index == 0
        height = 1 + 2.5 * len(metrics)
        # Check that a plot can be drawn before measuring, which may take hours.
        with new_figure(plot if is_first else None, 8, height) as figure:
            named = parse_metrics(metrics, vocab_size, dtype)
            indexes = _write_indexes(
                _load_source(source), named, output, num_workers, processes
            )
            if figure:
                from jaxbucket.cli.metric_report import plot_metrics

                plot_metrics(indexes, figure)
        if is_first:
            _show(indexes, output, as_json)


def _load_source(name: str) -> Source:
    """Returns the source that a function returns.

    Raises:
      ValueError: if there is no such function, or it returns anything else.
    """
    from jaxbucket.data.lengths.functions import call_function

    source = call_function(name)
    # Special methods are looked up on the type, so that a class is not a source.
    methods = ("__getitem__", "__len__")
    has_indices = all(hasattr(type(source), method) for method in methods)
    if not has_indices or isinstance(source, (str, bytes, Mapping, type)):
        raise ValueError(
            f"`{name}` returned {short_repr(source)}. Return a random-access source, "
            "such as a list of examples."
        )
    return source


def _write_indexes(
    source: Source,
    metrics: Mapping[str, NamedMetric],
    folder: pathlib.Path,
    num_workers: int,
    processes: ProcessGroup,
) -> dict[str, DifficultyIndex]:
    """Measures all metrics and writes the index of each, in all processes together."""
    from jaxbucket.sharding import data_mesh
    from jaxbucket.sort.difficulty import write_difficulty_index

    # Before measuring, which may take hours.
    _check_folders([folder / name for name in metrics])
    shares = _measure(source, metrics, folder / _CACHE, num_workers, processes)
    write = bar_if_slow("Sorting")(write_difficulty_index)
    indexes = {
        name: write(
            folder / name,
            shares[name],
            data_mesh(),
            processes=processes,
            num_examples=len(source),
        )
        for name in metrics
    }
    # All processes have read their files.
    processes.gather("deleting measured values", "")
    if processes.index == 0:
        shutil.rmtree(folder / _CACHE, ignore_errors=True)
    return indexes


def _check_folders(folders: list[pathlib.Path]) -> None:
    """Raises a ValueError if a folder of an index holds anything else."""
    from jaxbucket.sort.difficulty import is_free, is_index

    for folder in folders:
        if not (is_free(folder) or is_index(folder)):
            raise ValueError(
                f"`--output {folder.parent}`: {folder} exists but is not an index. "
                "Delete it, or pass a different folder."
            )


def _measure(
    source: Source,
    metrics: Mapping[str, NamedMetric],
    cache: pathlib.Path,
    num_workers: int,
    processes: ProcessGroup,
) -> dict[str, np.ndarray]:
    """Returns the values of each metric in this process's share of the source.

    Raises:
      ValueError: if an example has no value, or a worker process ends.
    """
    from jaxbucket.data.lengths.difficulty import measure_difficulty
    from jaxbucket.data.lengths.parallel_pass import WorkerDied

    try:
        return measure_difficulty(
            source,
            {name: metric.function for name, metric in metrics.items()},
            dtype={name: metric.dtype for name, metric in metrics.items()},
            num_workers=num_workers,
            cache=cache,
            cache_key={name: f"{name} {x.key}" for name, x in metrics.items()},
            processes=processes,
            progress=processes.index == 0,
        )
    except WorkerDied:
        raise ValueError(
            "A worker process died, possibly for lack of memory. Run the command again "
            "to continue where it stopped, with fewer `--num-workers`."
        ) from None
    except RuntimeError as error:
        raise ValueError(str(error)) from error


def _show(
    indexes: Mapping[str, DifficultyIndex], folder: pathlib.Path, as_json: bool
) -> None:
    from jaxbucket.cli.metric_report import MetricReport, MetricSummary

    report = MetricReport({name: MetricSummary.of(x) for name, x in indexes.items()})
    numbers: dict[str, Any] = report.to_dict()
    for name, fields in numbers.items():
        fields["index"] = str(folder / name)
    show(as_json, numbers, report)
