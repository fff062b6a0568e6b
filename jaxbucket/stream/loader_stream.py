"""Other people's data loaders as a `grain.IterDataset` of examples.

All of them can be iterated over: Grain's `DataLoader`, PyTorch's, webdataset, streaming
datasets of Hugging Face, and any other iterable. Some can save and restore where they
are. None of them is imported here.
"""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

import grain

from jaxbucket.base.batch import RowShard, checked_shard
from jaxbucket.base.checks import check_choice
from jaxbucket.data.example import Example
from jaxbucket.stream.loader_iterator import LoaderIterator, rejected
from jaxbucket.stream.loader_kinds import (
    check_not_batched,
    goes_on,
    has_shuffle_buffer,
    is_hugging_face,
)
from jaxbucket.stream.loader_values import (
    check_examples,
    checksum_after,
    num_rows,
    to_numpy,
)

Resume: TypeAlias = Literal["state", "replay"]


def from_loader(
    loader: Iterable[Any],
    *,
    to_example: Callable[[Any], Example] | None = None,
    batched: bool | None = None,
    shard: RowShard | None = None,
    resume: Resume = "state",
) -> LoaderDataset:
    """Returns a `grain.IterDataset` of the examples of another data loader.

    Resuming restores the state of the loader if it has one: its iterator has
    `get_state` and `set_state` (Grain), or the loader has `state_dict` and
    `load_state_dict` (streaming datasets of Hugging Face, `StatefulDataLoader` of
    torchdata). Any other loader is iterated over from its beginning, and the examples
    that were read before are skipped, so it must yield the same examples again; an
    error is raised if some that are compared differ. A generator has no
    second epoch and cannot be resumed in the same process, because it can be iterated
    over only once. Pass an object that returns a new iterator each time.

    Example:
      >>> import jaxbucket as jb
      >>> loader = [{"tokens": [[7, 3], [5, 2]]}, {"tokens": [[1, 1]]}]
      >>> dataset = from_loader(loader, batched=True)
      >>> [example["tokens"] for example in dataset]
      [[7, 3], [5, 2], [1, 1]]
      >>> shard = jb.base.batch.RowShard((1,), num_parts=2)  # `local_rows(mesh)`
      >>> [x["tokens"] for x in from_loader(loader, batched=True, shard=shard)]
      [[5, 2]]

    Args:
      loader: yields examples, or batches of them: dicts of arrays, tensors or numbers.
      to_example: converts what the loader yields to an example, a dict of arrays, for
        instance `lambda pair: {"tokens": pair[0], "label": pair[1]}`.
      batched: whether the loader yields batches: lists of dicts, or dicts of columns
        with a common leading axis. Lists of arrays or of tuples are refused as batches,
        and lists of arrays of one length as columns, because PyTorch's default
        `collate_fn` makes such lists of columns. By default it yields examples, and
        loaders of PyTorch, Grain and Hugging Face that make batches are refused; False
        accepts their batches as examples.
      shard: `local_rows(mesh)`, to give every group of processes with different rows
        its own part of the examples, taken in turn. By default this process gets all
        examples, as it should if the loader has been sharded already.
      resume: "replay" ignores the state of the loader, even one that was saved before.
        Use it if the state is not complete, as that of a shuffled Hugging Face dataset,
        whose buffer is lost.

    Returns:
      The dataset, for `stream_batches` and `sample_lengths`.

    Raises:
      ValueError: if `loader` cannot be iterated over, or is known to make batches and
        neither `batched` nor `to_example` is given. From an iterator: if a batch is not
        as described, or if a generator is iterated over or resumed a second time.
    """
    if not isinstance(loader, Iterable):
        raise ValueError(
            f"`loader` is a {type(loader).__name__}, which cannot be iterated over. "
            "Pass an iterable of examples."
        )
    check_choice("resume", resume, get_args(Resume))
    if batched is None and to_example is None:
        check_not_batched(loader)
    return LoaderDataset(
        loader, to_example, bool(batched), checked_shard(shard), resume
    )


class LoaderDataset(grain.IterDataset[Any]):
    """The examples of another data loader, created by `from_loader`."""

    def __init__(
        self,
        loader: Iterable[Any],
        to_example: Callable[[Any], Example] | None,
        batched: bool,
        shard: RowShard,
        resume: Resume,
    ):
        super().__init__()
        self.loader = loader
        self.to_example = to_example
        self.batched = batched
        self.resume = resume
        # Processes with the same rows need the same examples.
        self.parts = frozenset(shard.parts)
        self.num_parts = shard.num_parts
        self._is_started = False
        self._ragged: set[str] = set()
        self._has_warned = False
        # Weak, because PyTorch waits for its workers if a cycle of objects owns them.
        self._reader: weakref.ref[LoaderIterator] | None = None
        # Where the last iteration began, unless it has ended; of a loader that goes on.
        self.first_state: Any = None
        # The checksum of the state in which this dataset has left the loader.
        self.position = 0

    def __getstate__(self) -> dict[str, Any]:
        # Grain's workers receive a copy without the iterators of this process.
        return {**self.__dict__, "_reader": None}

    def __iter__(self) -> LoaderIterator:
        return LoaderIterator(self)

    @property
    def has_state(self) -> bool:
        """Whether the loader, rather than its iterator, saves and restores a state."""
        return self.resume == "state" and all(
            hasattr(self.loader, name) for name in ("state_dict", "load_state_dict")
        )

    def lend(self, reader: LoaderIterator) -> None:
        """Suspends the iterator that has read the loader, if another one reads it now.

        The loader has a single state, but a stream, for instance, reads its first
        example by a second iterator.
        """
        if not self.has_state:
            return
        last = self._reader() if self._reader is not None else None
        if last is not None and last is not reader:
            last.suspend()
        self._reader = weakref.ref(reader)

    def open(self) -> Iterator[Any]:
        """Returns a new iterator over the loader, from its beginning.

        Raises:
          ValueError: if the loader is an iterator that has been started.
        """
        rewind(self)
        loader: Any = self.loader
        iterator = iter(loader)
        if goes_on(loader, iterator):
            self.first_state = copy.deepcopy(loader.state_dict())
            self.mark()
        if iterator is loader:
            if self._is_started:
                raise ValueError(
                    f"`loader` is a {type(self.loader).__name__}, which can be "
                    "iterated over only once, so it cannot be sampled before it is "
                    "read, has no second epoch and cannot be resumed. Pass an object "
                    "that returns a new iterator each time."
                )
            self._is_started = True
        return iterator

    def open_at(self, state: Any) -> Iterator[Any]:
        """Returns a new iterator over the loader, from a state of the loader."""
        loader: Any = self.loader
        if not hasattr(loader, "load_state_dict"):
            iterator: Any = self.open()
            if not hasattr(iterator, "set_state"):
                raise ValueError(
                    "The state is that of a loader with a state, but `loader`, a "
                    f"{type(loader).__name__}, has none. Pass such a loader, or "
                    "`resume='replay'` if this one yields the same examples."
                )
            iterator.set_state(state)
            return iterator
        loader_state, random_state = state
        try:
            loader.load_state_dict(loader_state)
            iterator = iter(loader)
        except Exception as error:
            raise rejected(loader, error) from error
        if random_state is not None:
            loader.generator.set_state(random_state)
        self.mark()
        return iterator

    def mark(self) -> None:
        """Remembers where a loader that goes on is: others may move it elsewhere."""
        if self.first_state is not None:
            loader: Any = self.loader
            self.position = checksum_after(0, loader.state_dict())

    def state(self) -> Any:
        """Returns the states of the loader and of its random generator, if any.

        A resumed `StatefulDataLoader` draws less from its generator than a new one, so
        its next epoch would have another order.
        """
        loader: Any = self.loader
        if not self._has_warned and has_shuffle_buffer(loader):
            self._has_warned = True
            warnings.warn(
                "`loader` shuffles through a buffer, which Hugging Face does not "
                "include in its state, so this stream cannot be resumed. Pass "
                "`resume='replay'` to `from_loader`.",
                stacklevel=2,
            )
        generator = getattr(loader, "generator", None)
        get_state = getattr(generator, "get_state", lambda: None)
        return loader.state_dict(), get_state()

    def forget_state(self) -> None:
        """Lets later iterations over the loader start at its beginning."""
        for dataset in (self.loader, getattr(self.loader, "dataset", None)):
            # These start every iteration at the state that was loaded.
            if is_hugging_face(dataset):
                dataset.load_state_dict(None)  # pyright: ignore

    def split(self, element: Any) -> Sequence[Any]:
        """Returns the examples of what the loader yields, which are not converted."""
        if not self.batched:
            return [element]
        if isinstance(element, list | tuple):
            check_examples(element)
            return element
        if isinstance(element, Mapping):
            rows = range(num_rows(element, self._ragged))
            return [{name: x[row] for name, x in element.items()} for row in rows]
        raise ValueError(
            f"`loader` yields a {type(element).__name__}, but with `batched=True` "
            "it must yield lists of examples, or dicts of arrays."
        )

    def example(self, element: Any) -> Any:
        """Returns an example after `to_example`, with numpy arrays."""
        if self.to_example is not None:
            try:
                element = self.to_example(element)
            except StopIteration as error:
                # It would look like the end of the loader.
                raise RuntimeError("`to_example` raised StopIteration.") from error
        if isinstance(element, Mapping):
            return {name: to_numpy(value) for name, value in element.items()}
        return element


def rewind(dataset: grain.MapDataset[Any] | grain.IterDataset[Any]) -> None:
    """Moves loaders that would go on back, unless the user has moved them since."""
    if isinstance(dataset, LoaderDataset) and dataset.first_state is not None:
        loader: Any = dataset.loader
        if checksum_after(0, loader.state_dict()) == dataset.position:
            loader.load_state_dict(copy.deepcopy(dataset.first_state))
            dataset.position = checksum_after(0, dataset.first_state)
    for parent in dataset.parents:
        rewind(parent)
