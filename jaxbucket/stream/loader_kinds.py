"""What must be known about the loaders of PyTorch and Hugging Face.

They are recognized by their attributes, because neither library is imported here.
"""

from __future__ import annotations

from typing import Any


def check_not_batched(loader: Any) -> None:
    """Raises a ValueError if a loader of PyTorch makes batches by default.

    Another `collate_fn` may return a single example.
    """
    collate = getattr(getattr(loader, "collate_fn", None), "__name__", None)
    has_sampler = getattr(loader, "batch_sampler", None) is not None
    if has_sampler and collate == "default_collate":
        raise ValueError(
            f"`loader` is a {type(loader).__name__} that makes batches, "
            f"`batch_size={getattr(loader, 'batch_size', None)}`, so each would count "
            "as one example. Pass `batched=True` and create the loader with "
            "`collate_fn=list`, or create it with `batch_size=None`. If a batch is "
            "an example, convert it by `to_example`."
        )


def is_hugging_face(dataset: Any) -> bool:
    """Whether a dataset is a streaming dataset of Hugging Face."""
    names = [(x.__module__, x.__name__) for x in type(dataset).__mro__]
    return ("datasets.iterable_dataset", "IterableDataset") in names


def has_shuffle_buffer(loader: Any) -> bool:
    """Whether a loader reads a streaming dataset that shuffles through a buffer."""
    for dataset in (loader, getattr(loader, "dataset", None)):
        # The steps of the dataset, from the last to the first.
        step = getattr(dataset, "_ex_iterable", None)
        while step is not None:
            if type(step).__name__ == "BufferShuffledExamplesIterable":
                return True
            step = getattr(step, "ex_iterable", None)
    return False


def has_first_state(loader: Any, iterator: Any) -> bool:
    """Whether the state before the first element is known."""
    # A dataset with a state, as of Hugging Face, has that of the epoch before.
    dataset = getattr(loader, "dataset", None)
    return hasattr(iterator, "state_dict") and not hasattr(dataset, "state_dict")
