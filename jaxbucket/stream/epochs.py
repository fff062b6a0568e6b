"""The epochs of the user's stream, and the shares of it that Grain's workers read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sized
from typing import Any, TypeAlias

import grain

from jaxbucket.base.checks import check_seed, with_article
from jaxbucket.base.permutation import fold

EpochStream: TypeAlias = Callable[[int, int], grain.IterDataset]
Stream: TypeAlias = grain.IterDataset | EpochStream


def check_stream(dataset: Any) -> None:
    """Raises a ValueError with a remedy if `dataset` is not a stream."""
    if isinstance(dataset, grain.IterDataset):
        return
    has_loader = isinstance(dataset, grain.MapDataset | grain.DataLoader)
    if callable(dataset) and not has_loader:
        return
    raise ValueError(
        f"`dataset` is {with_article(dataset)}, not a `grain.IterDataset`. Pass "
        f"{stream_of(dataset)}, or a function of (epoch, seed)."
    )


def stream_of(dataset: Any) -> str:
    """Returns an expression that makes a stream of something else, for messages."""
    if isinstance(dataset, grain.MapDataset):
        return "`dataset.to_iter_dataset()`"
    if isinstance(dataset, grain.DataLoader):
        return (
            "`grain.MapDataset.source(data_source).shuffle(seed).apply(operations)"
            ".to_iter_dataset()`, with the arguments of the loader"
        )
    if isinstance(dataset, Iterable) and not isinstance(dataset, Sized):
        return "`jb.stream.from_loader(dataset)`"
    return "`grain.MapDataset.source(examples).to_iter_dataset()`"


def open_epoch(dataset: Stream, epoch: int, seed: int) -> grain.IterDataset:
    """Returns the stream of an epoch."""
    if isinstance(dataset, grain.IterDataset):
        return dataset
    return dataset(epoch, epoch_seed(seed, epoch))


def epoch_seed(seed: int, epoch: int) -> int:
    """Returns the seed of an epoch, the high half of `fold(seed, epoch)`.

    It has 32 bits because Grain accepts no larger seeds.
    """
    return fold(check_seed(seed), epoch) >> 32


def slice_stream(dataset: Any, sl: slice, sequential_slice: bool) -> None:
    """Restricts a stream to a worker's share, in place, as Grain does.

    Raises:
      ValueError: if the stream cannot be divided among workers.
    """
    if hasattr(dataset, "set_slice"):
        dataset.set_slice(sl, sequential_slice)
        return
    if not dataset.parents:
        raise ValueError(
            f"The {type(dataset).__name__} cannot be divided among workers, because it "
            "has no `set_slice`. Load without workers, or start from a "
            "`grain.MapDataset`."
        )
    for parent in dataset.parents:
        slice_stream(parent, sl, sequential_slice)
