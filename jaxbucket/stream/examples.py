"""What a stream yields: the datasets of its epochs, and what their examples are."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeAlias, cast

import grain

from jaxbucket.base.checks import check_function, check_positive, check_seed, check_type
from jaxbucket.base.padding import PadValue, check_pad_value
from jaxbucket.base.permutation import fold
from jaxbucket.data.example import (
    Example,
    Sequences,
    Transform,
    listed_names,
    transform_name,
)
from jaxbucket.data.example_spec import axis_labels

EpochDataset: TypeAlias = Callable[[int, int], grain.IterDataset]
_REMEDY = "Make one of any other loader: `jb.stream.from_loader(loader, to_example)`."


@dataclasses.dataclass(frozen=True, eq=False)
class ExampleStream:
    """The examples of a stream: the datasets of its epochs, and their features.

    `stream_batches` and `sample_lengths` accept a dataset as well, which is a stream
    with the default options.

    Example:
      >>> import grain
      >>> texts = grain.MapDataset.source([{"tokens": [7] * n} for n in (3, 1, 4)])
      >>> def epoch_dataset(epoch, seed):
      ...     return texts.shuffle(seed).to_iter_dataset()
      >>> def crop(example, rng):
      ...     size = rng.integers(1, len(example["tokens"]) + 1)
      ...     return {"tokens": example["tokens"][:size]}
      >>> examples = ExampleStream(epoch_dataset, num_epochs=2, transform=crop)
      >>> import jaxbucket as jb
      >>> len(jb.stream.sample_lengths(examples, 100))
      3

    Attributes:
      dataset: the examples, dicts of arrays; or a function `(epoch, seed) -> dataset`
        that is called for each epoch, with a 32-bit seed derived from `seed`. Each
        process reads a different stream, unless it has the same rows as another.
      num_epochs: the number of times that the stream is read; None to repeat it
        forever. Batches may mix the examples of consecutive epochs. A run may resume
        with a different number, unless its stream had already ended.
      sequences: the features that are padded; by default all with a leading axis. If
        examples have several sequences: a mapping, as for `collate_rows`.
      pad_value: the value of padding: a number for all sequences, or a dict
        `{feature: number}`.
      transform: `(example, rng) -> example`, random augmentation, which may change the
        length. Its example is a copy, a dict of arrays; bytes are `[]` arrays of
        objects, `example["audio"].item()`. Its `np.random.Generator` depends on `seed`,
        the epoch, the index of the example in its epoch, and the first part of the
        rows of this process. Seed any other generator from it, by
        `rng.integers(2**63)` or `rng.spawn(1)`.
      like: an example with the features that `transform` returns, needed if the stream
        of a process may be empty.
      seed: the seed of the epochs, of `transform` and of the order of buckets.

    Raises:
      ValueError: if `dataset` is not a stream, or an option is out of range.
    """

    dataset: grain.IterDataset | EpochDataset
    _: dataclasses.KW_ONLY
    num_epochs: int | None = 1
    sequences: Sequences = None
    pad_value: PadValue = 0
    transform: Transform | None = None
    like: Example | None = None
    seed: int = 0

    def __post_init__(self):
        if not callable(self.dataset):
            check_type("dataset", self.dataset, grain.IterDataset, _REMEDY)
        if self.num_epochs is not None:
            self._set("num_epochs", check_positive("num_epochs", self.num_epochs))
        self._set("pad_value", check_pad_value(self.pad_value))
        self._set("seed", check_seed(self.seed))
        if self.transform is not None:
            check_function("transform", self.transform, "(example, rng)")

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def epoch_dataset(self, epoch: int) -> grain.IterDataset:
        """Returns the dataset of an epoch.

        Raises:
          ValueError: if the function of (epoch, seed) returns something else.
        """
        if isinstance(self.dataset, grain.IterDataset):
            return self.dataset
        dataset = self.dataset(epoch, epoch_seed(self.seed, epoch))
        name = f"dataset({epoch}, seed)"
        return check_type(name, dataset, grain.IterDataset, _REMEDY)

    def config(self, names: Collection[str]) -> dict[str, Any]:
        """Returns what batches depend on, as plain Python for JSON.

        Args:
          names: the names of several sequences; empty if examples have one length.

        Raises:
          ValueError: if a feature is repeated, or the sequences are not `names`.
        """
        one = None if names else self.sequences
        listed = None if one is None else listed_names(cast(Sequence[str], one))
        return {
            "sequences": axis_labels(self.sequences if names else listed, names),
            "pad_value": self.pad_value,
            "transform": self.transform and transform_name(self.transform),
            "seed": self.seed,
        }


def as_stream(
    dataset: ExampleStream | grain.IterDataset | EpochDataset,
) -> ExampleStream:
    """Returns a dataset as a stream with the default options."""
    return dataset if isinstance(dataset, ExampleStream) else ExampleStream(dataset)


def epoch_seed(seed: int, epoch: int) -> int:
    """Returns the seed of an epoch, the high half of `fold(seed, epoch)`.

    It has 32 bits because Grain accepts no larger seeds.
    """
    return fold(seed, epoch) >> 32
