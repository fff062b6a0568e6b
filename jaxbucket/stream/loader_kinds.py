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
    how = (
        _torch_batch(loader)
        or _grain_batch(loader)
        or _hf_batch(loader)
        or _hf_batch(getattr(loader, "dataset", None))
    )
    if how:
        raise ValueError(
            f"`loader` is a {type(loader).__name__} that makes batches, {how}, so "
            "each would count as one example. Pass `batched=True`, with PyTorch also "
            "`collate_fn=list`, or do not make batches (PyTorch: `batch_size=None` "
            "without a `batch_sampler`). If a batch is an example, pass "
            "`batched=False`, or convert it by `to_example`."
        )


def _torch_batch(loader: Any) -> str | None:
    """Returns how a `DataLoader` of PyTorch makes batches."""
    collate = getattr(loader, "collate_fn", None)
    sampler = getattr(loader, "batch_sampler", None)
    if collate is None or sampler is None:
        return None
    size = getattr(loader, "batch_size", None) or getattr(sampler, "batch_size", None)
    # With a batch size of 1, another function usually returns the single example.
    if size == 1 and getattr(collate, "__name__", None) != "default_collate":
        return None
    return "by its `batch_sampler`" if size is None else f"`batch_size={size}`"


def _grain_batch(loader: Any) -> str | None:
    """Returns how a loader or a dataset of Grain makes batches."""
    for operation in getattr(loader, "_operations", ()):
        if type(operation).__name__ in ("Batch", "BatchOperation"):
            return f"`{operation}`"
    while type(loader).__name__ in _GRAIN_PREFETCHES and loader.parents:
        (loader,) = loader.parents
    is_batch = type(loader).__name__ in ("BatchMapDataset", "BatchIterDataset")
    return "by its `batch`" if is_batch else None


# Datasets that yield the elements of another one.
_GRAIN_PREFETCHES = {
    "PrefetchIterDataset",
    "MultiprocessPrefetchIterDataset",
    "ThreadPrefetchIterDataset",
}


def _hf_batch(dataset: Any) -> str | None:
    """Returns how a streaming dataset of Hugging Face makes batches."""
    for step in _steps(dataset):
        function = getattr(step, "function", None)
        if function is None:
            continue
        # The functions of `IterableDataset.batch`; later functions may undo it.
        names = ("batch_fn", "_batch_fn", "_batch_arrow_table")
        is_own = getattr(function, "__module__", "").startswith("datasets.")
        is_batch = is_own and getattr(function, "__name__", "") in names
        return f"`batch_size={step.batch_size}`" if is_batch else None
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


def goes_on(loader: Any, iterator: Any) -> bool:
    """Whether a new iterator of a loader may start where the last one was."""
    has_state = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
    datasets = (loader, getattr(loader, "dataset", None))
    is_new = has_first_state(loader, iterator) or any(map(is_hugging_face, datasets))
    return has_state and not is_new


def has_first_state(loader: Any, iterator: Any) -> bool:
    """Whether the state before the first element is known."""
    # A dataset with a state, as of Hugging Face, has that of the epoch before.
    dataset = getattr(loader, "dataset", None)
    return hasattr(iterator, "state_dict") and not hasattr(dataset, "state_dict")
