"""Which outputs of a predict step are sequences, whose padding is removed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from jaxbucket.base.batch import Batch
from jaxbucket.data.example import Sequences, listed_names


class OutputSequences:
    """Finds the sequences of each output, from `sequences` or from shapes.

    An output of shape `[B, T, ...]` is a sequence if T differs between batches. If all
    batches have the same T, it may as well be a vector of T numbers. In packed rows,
    other outputs have shape `[B, S, ...]` instead, where S is `max_segments`. An output
    with axes of several sequences, such as `[B, H, W]`, must be named.

    Args:
      sequences: the outputs that are sequences, None to find them by their shapes. If
        examples have several sequences, a mapping from each to the outputs that share
        its length. An output in several of them has an axis for each, in the order of
        the mapping.
      max_segments: maximum number of examples in a packed row; None for unpacked rows.
    """

    def __init__(self, sequences: Sequences, max_segments: int | None):
        self._given = sequences
        self._max_segments = max_segments
        # Output -> for each axis after B, the sequences whose T it has had in all
        # batches; as many axes as there are sequences.
        self._fitting: dict[str, list[set[str]]] = {}
        # Sequence -> all of its T.
        self._seq_lens: dict[str, set[int]] = defaultdict(set)

    def add(self, output: Batch) -> None:
        """Takes the shapes of a batch of outputs into account.

        Raises:
          ValueError: if `sequences` does not describe the outputs, or if they have no
            shape of packed rows.
        """
        seq_lens = {key: ids.shape[1] for key, ids in output.segment_ids.items()}
        for key, seq_len in seq_lens.items():
            self._seq_lens[key].add(seq_len)
        for name, x in output.features.items():
            fitting = [
                {key for key, seq_len in seq_lens.items() if (seq_len,) == size}
                for size in (x.shape[i : i + 1] for i in range(1, len(seq_lens) + 1))
            ]
            before = self._fitting.get(name, fitting)
            self._fitting[name] = list(map(set.intersection, before, fitting))
        given = self._named()
        for name, x in output.features.items():
            is_sequence = name in given if given is not None else self._fitting[name][0]
            if not is_sequence:
                self._check_segments(name, x)

    def axes(self) -> dict[str, tuple[str, ...]]:
        """Returns the sequences of the axes after B, for each output that has some.

        Raises:
          ValueError: if the shapes do not determine them, and `sequences` is None.
        """
        given = self._named()
        if given is not None:
            return given
        first = {name: axes[0] for name, axes in self._fitting.items() if axes[0]}
        unclear = {
            name: sorted(keys)[0]
            for name, keys in first.items()
            if len(keys) > 1 or any(self._may_be_other(key) for key in keys)
        }
        if unclear:
            raise ValueError(self._unclear(unclear))
        axes = {name: tuple(keys) for name, keys in first.items()}
        for name, keys in axes.items():
            if others := set().union(*self._fitting[name][1:]).difference(keys):
                raise ValueError(_unclear_axes(name, [*keys, *sorted(others)]))
        return axes

    def _may_be_other(self, key: str) -> bool:
        """Whether outputs with the T of a sequence may have another axis instead."""
        if self._max_segments is None:
            return len(self._seq_lens[key]) == 1
        return self._seq_lens[key] == {self._max_segments}

    def _named(self) -> dict[str, tuple[str, ...]] | None:
        """Returns the sequences of outputs as given, None to find them by shapes."""
        if self._given is None:
            return None
        known = sorted(self._seq_lens)
        groups = self._given
        if not isinstance(groups, Mapping):
            groups = {known[0]: listed_names(groups)} if groups else {}
            if groups and len(known) > 1:
                raise ValueError(
                    f"`sequences={self._given!r}`, but examples have the sequences "
                    f"{known}. Pass a mapping from each to the outputs that share its "
                    f"length, for example {dict(groups)}."
                )
        if unknown := sorted(set(groups) - set(known)):
            raise ValueError(
                f"`sequences={self._given!r}` has the keys {unknown}. Use the "
                f"sequences of the examples, {known}."
            )
        named: dict[str, tuple[str, ...]] = {}
        for key, names in groups.items():
            for name in listed_names(names):
                keys = named.get(name, ())
                fitting = [n for n, x in self._fitting.items() if key in x[len(keys)]]
                if name not in fitting:
                    shape = "T, " * (len(keys) + 1) + "..."
                    raise ValueError(
                        f"`sequences={self._given!r}` must name outputs of shape "
                        f"[B, {shape}]. Choose from {sorted(fitting)}."
                    )
                named[name] = (*keys, key)
        return named

    def _check_segments(self, name: str, x: np.ndarray) -> None:
        if self._max_segments in (None, *x.shape[1:2]):
            return
        raise ValueError(
            f"`steps` returned {name!r} with shape {list(x.shape)}, but rows are "
            f"packed. Return [B, {self._max_segments}, ...], with an entry for each of "
            "the `max_segments` examples that a row may have, for instance by "
            "`jb.attention.example_sums`; or [B, T, ...], named in `sequences`."
        )

    def _unclear(self, keys: Mapping[str, str]) -> str:
        names = sorted(keys)
        remedy = {keys[names[0]]: names} if len(self._seq_lens) > 1 else names
        return (
            f"`steps` returned {names} with shape [B, T, ...], but all batches so far "
            "have the same T, so these may also be T values that are not padded, or "
            "belong to another sequence of this T. Pass those that are padded, for "
            f"example `sequences={remedy}`, or `sequences=[]` if none is."
        )


def _unclear_axes(name: str, keys: list[str]) -> str:
    remedy = {key: [name] for key in keys}
    return (
        f"`steps` returned {name!r} with axes as long as the sequences {keys}. List it "
        f"for each of its padded axes, in their order, for example "
        f"`sequences={remedy}`, or pass `sequences=[]` if no output is padded."
    )
