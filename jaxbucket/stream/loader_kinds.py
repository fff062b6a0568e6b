"""What must be known about the loaders of PyTorch and Hugging Face.

They are recognized by their attributes, because neither library is imported here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any


def check_not_batched(loader: Any) -> None:
    """Raises a ValueError if a loader is known to make batches.

    Example:
      >>> check_not_batched([{"tokens": [7, 3]}])
    """
    if size := _torch_batch_size(loader) or _grain_batch(loader) or _hf_batch(loader):
        raise ValueError(
            f"`loader` is a {type(loader).__name__} that makes batches, {size}, so "
            "each would count as one example. Pass `batched=True`, with PyTorch also "
            "`collate_fn=list`, or do not make batches (PyTorch: `batch_size=None`). "
            "If a batch is an example, pass `batched=False`, or convert it by "
            "`to_example`."
        )


def _torch_batch_size(loader: Any) -> str | None:
    """Returns the batch size of a `DataLoader` of PyTorch that makes batches."""
    collate = getattr(loader, "collate_fn", None)
    if collate is None or getattr(loader, "batch_sampler", None) is None:
        return None
    size = getattr(loader, "batch_size", None)
    # With a batch size of 1, another function usually returns the single example.
    is_default = getattr(collate, "__name__", None) == "default_collate"
    return f"`batch_size={size}`" if is_default or size != 1 else None


def _grain_batch(loader: Any) -> str | None:
    """Returns the operation of a `grain.DataLoader` that makes batches."""
    for operation in getattr(loader, "_operations", ()):
        if type(operation).__name__ in ("Batch", "BatchOperation"):
            return f"`{operation}`"
    return None


def _hf_batch(loader: Any) -> str | None:
    """Returns the batch size of a streaming dataset of Hugging Face with batches."""
    for step in _steps(loader):
        function = getattr(step, "function", None)
        # The functions of `IterableDataset.batch`.
        if getattr(function, "__name__", "") in ("_batch_fn", "_batch_arrow_table"):
            return f"`batch_size={step.batch_size}`"
    return None


def is_hugging_face(dataset: Any) -> bool:
    """Whether a dataset is a streaming dataset of Hugging Face."""
    names = [(x.__module__, x.__name__) for x in type(dataset).__mro__]
    return ("datasets.iterable_dataset", "IterableDataset") in names


def has_shuffle_buffer(loader: Any) -> bool:
    """Whether a loader reads a streaming dataset that shuffles through a buffer."""
    steps = itertools.chain(_steps(loader), _steps(getattr(loader, "dataset", None)))
    return any(type(x).__name__ == "BufferShuffledExamplesIterable" for x in steps)


def _steps(dataset: Any) -> Iterator[Any]:
    """Yields the steps of a dataset of Hugging Face, from the last to the first."""
    step = getattr(dataset, "_ex_iterable", None)
    while step is not None:
        yield step
        step = getattr(step, "ex_iterable", None)


def has_first_state(loader: Any, iterator: Any) -> bool:
    """Whether the state before the first element is known."""
    # A dataset with a state, as of Hugging Face, has that of the epoch before.
    dataset = getattr(loader, "dataset", None)
    return hasattr(iterator, "state_dict") and not hasattr(dataset, "state_dict")
