"""Limits on the shapes of a plan, and the largest batch size that they allow."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import numpy as np

from jaxbucket.base.bucket import Bucket
from jaxbucket.base.buckets import BucketPlan
from jaxbucket.base.checks import (
    MAX_TOKENS,
    check_accumulate,
    check_cost,
    check_integer,
    check_positive,
)
from jaxbucket.base.notes import Noting
from jaxbucket.base.policies import TRUNCATING, Overlong, checked_overlong
from jaxbucket.base.sizes import (
    Counted,
    Sizes,
    check_same_sequences,
    check_sequence_names,
    checked_size,
    sizes_of,
)
from jaxbucket.plan.chunks import kept_lengths
from jaxbucket.plan.costs import CostFn, StepTime, TokenCost, TransformerCost, unit_of
from jaxbucket.plan.flow.batch_sizes import fitted, fitted_between
from jaxbucket.plan.flow.dominance import dominates, shape_order
from jaxbucket.plan.flow.step_sizes import StepSizes

# What has the sequences of the limits, for messages.
_OTHERS = "the lengths have"
# What may be a mapping from sequence name to a value.
_PER_SEQUENCE = ("max_tokens", "seq_len_multiple", "max_seq_len", "overlong")

Budget: TypeAlias = int | Mapping[str, int] | Sequence[int] | Callable[[Any], int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits on every shape (B, T), and the cost of a step.

    These are the options of `plan_buckets`, collected for functions such as
    `plan_curve`. Lengths with several sequences give the limits their names.

    Example: the largest B for several T, and a plan with these shapes.
      >>> limits = Limits(max_tokens=4096, batch_size_multiple=8, seq_len_multiple=64)
      >>> limits.batch_sizes([128, 320, 512])
      array([32,  8,  8])
      >>> [str(bucket) for bucket in limits.plan([128, 320, 512]).buckets]
      ['[32, 128]', '[8, 320]', '[8, 512]']

    Example: the largest B for two T of source and target.
      >>> limits = Limits(sequences=("source", "target"), max_tokens=1024)
      >>> limits.batch_sizes([[64, 32], [100, 100]])
      array([10,  5])

    Methods take the T of n shapes as `seq_lens`: `[n, Q]` integers, or `[n]` if Q is 1.

    Attributes:
      max_tokens: the largest B * T, padding counted: an integer, a function of T, or
        one integer for each boundary if the boundaries are given. With several
        sequences, the sum over all of them, a budget for each, or a function from
        `Sizes`, the T of each, to the sum.
      batch_size_multiple: every B is a multiple of this number, or of that which a
        function returns for T.
      seq_len_multiple: every T is a multiple of this number, or of the one of its
        sequence.
      max_seq_len: T of the last bucket, one for all sequences or for each; None for the
        longest length, rounded up. With several sequences and None, one bucket has to
        hold the longest lengths of all of them only if these are truncated.
      min_batch_size: the smallest number of rows in a batch.
      max_batch_size: the largest number of rows in a batch, even if more would fit in
        the budget; None for no limit.
      overlong: what happens to examples longer than the last bucket: "error", "drop",
        "truncate", "truncate_left" (the last tokens are kept) or, with one length,
        "split" (into chunks, by `split_source`); or a mapping from sequence name to one
        of these.
      cost_fn: `(batch_size, seq_len)` -> the cost of a step; None counts tokens.
      accumulate: the number of micro-batches per step, all of the same bucket.
      sample: whether the lengths are a sample of more examples, such as of a stream.
        Then every B is the largest within the limits, even if the sample fills none.
      sequences: the names of several sequences; stored in alphabetical order. By
        default those of the mappings among the other values.

    Raises:
      ValueError: if a value is out of range, the names of a mapping are not those of
        `sequences`, or `max_seq_len` is not a multiple of `seq_len_multiple`.
    """

    max_tokens: Budget
    batch_size_multiple: int | Callable[[Any], int] = 1
    seq_len_multiple: int | Mapping[str, int] = 1
    max_seq_len: int | Mapping[str, int] | None = None
    min_batch_size: int = 1
    max_batch_size: int | None = None
    overlong: Overlong | Mapping[str, Overlong] = "error"
    cost_fn: CostFn | None = None
    accumulate: int = 1
    sample: bool = False
    sequences: tuple[str, ...] = ()

    def __post_init__(self):
        self._set_sequences()
        self._set("accumulate", check_accumulate(self.accumulate))
        for name in ("batch_size_multiple", "min_batch_size"):
            value = getattr(self, name)
            if name == "min_batch_size" or not callable(value):
                self._set(name, check_positive(name, value))
        if (most := self.max_batch_size) is not None:
            least, multiple = self.min_batch_size, self.batch_size_multiple
            if not callable(multiple):
                least = -(-least // multiple) * multiple
            most = check_integer("max_batch_size", most, least=least)
            self._set("max_batch_size", most)
        budget: Any = self.max_tokens
        is_list = isinstance(budget, Sequence) and not isinstance(budget, str)
        if is_list and not self.sequences:
            self._set(
                "max_tokens", tuple(check_positive("max_tokens", x) for x in budget)
            )
        elif not callable(budget):
            self._set_sizes("max_tokens")
        self._set_sizes("seq_len_multiple")
        policies = checked_overlong(self.overlong, self.sequences, _OTHERS)
        self._set("overlong", policies)
        if self.max_seq_len is None:
            return
        self._set_sizes("max_seq_len")
        if (self._each(self.max_seq_len) % self.multiples).any():
            raise ValueError(
                f"`max_seq_len={self.max_seq_len!r}` is not a multiple of "
                f"`seq_len_multiple={self.seq_len_multiple!r}`. Change one of the two."
            )

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _set_sizes(self, name: str) -> None:
        self._set(name, sizes_of(name, getattr(self, name), self.sequences, _OTHERS))

    def _set_sequences(self) -> None:
        argument, names = "sequences", cast(Any, self.sequences)
        if not names:
            given = {name: getattr(self, name) for name in _PER_SEQUENCE}
            mappings = (x for x in given.items() if isinstance(x[1], Mapping))
            argument, names = next(mappings, (argument, ()))
        if names:
            names = [names] if isinstance(names, str) else names
            check_sequence_names(argument, dict.fromkeys(names))
        self._set("sequences", tuple(sorted(set(names))))

    def of(self, lengths: Counted) -> Limits:
        """Returns the limits with the names of the sequences of lengths.

        Raises:
          ValueError: if the limits have other sequences.
        """
        names = tuple(lengths) if isinstance(lengths, Mapping) else ()
        if self.sequences:
            others = "the `limits` have"
            check_same_sequences("lengths", names, self.sequences, others)
        return dataclasses.replace(self, sequences=names) if names else self

    def _each(self, value: Any) -> np.ndarray:
        """Returns the value of each sequence, `[Q]`; with one length, `[1]`."""
        if isinstance(value, Mapping):
            return np.array([value[name] for name in self.sequences])
        return np.full(max(len(self.sequences), 1), value)

    @property
    def multiples(self) -> np.ndarray:
        """`[Q]` int64: the multiple of each T."""
        return self._each(self.seq_len_multiple)

    def batch_multiples(self, seq_lens: np.ndarray) -> np.ndarray:
        """Returns the number of which every B of each shape is a multiple, `[n]`."""
        return self._of_shapes("batch_size_multiple", seq_lens)

    def least_batch_sizes(self, seq_lens: np.ndarray) -> np.ndarray:
        """Returns the smallest B of each shape, `[n]` int64."""
        multiples = self.batch_multiples(seq_lens)
        return -(-self.min_batch_size // multiples) * multiples

    @property
    def truncates(self) -> bool:
        """Whether a sequence is truncated."""
        return any(policy in TRUNCATING for policy in self._each(self.overlong))

    @property
    def must_hold_all(self) -> bool:
        """Whether one bucket must hold the longest sequences together.

        It is the bucket of `max_seq_len`. Truncation also requires one, because it
        limits each sequence by itself.
        """
        return self.max_seq_len is not None or self.truncates

    def rounded(self, lengths: np.ndarray) -> np.ndarray:
        """Returns lengths, `[..., Q]` or `[...]`, rounded up to possible T, int64."""
        # A T is positive, even if no example has the sequence.
        lengths = np.maximum(np.asarray(lengths, np.int64), 1)
        return -(-lengths // self.multiples) * self.multiples

    def max_seq_lens(self, lengths: np.ndarray) -> np.ndarray:
        """Returns the longest T of each sequence, `[Q]` int64, for `[N, Q]` lengths."""
        if self.max_seq_len is not None:
            return self._each(self.max_seq_len).astype(np.int64)
        return self.rounded(lengths.max(axis=0))

    def planned_lengths(self, lengths: np.ndarray) -> np.ndarray:
        """Returns which of `[N, Q]` lengths to plan for, `[n, Q]`, truncated if needed.

        Raises:
          ValueError: if a sequence is too long and its policy is "error", or no
            example is left.
        """
        (longest,) = self.named(self.max_seq_lens(lengths)[None])
        lengths = lengths if self.sequences else lengths[:, 0]
        return kept_lengths(lengths, longest, self.overlong)

    def sizes(
        self, seq_lens: np.ndarray, batch_sizes: np.ndarray, examples: np.ndarray
    ) -> StepSizes:
        """Returns the possible numbers of rows of a step of each shape.

        Args:
          seq_lens: the T, int64.
          batch_sizes: `[n]` int64, the largest B of each shape, as `batch_sizes`.
          examples: `[n]` integers, the largest number of examples of each shape.
        """
        return StepSizes.of(
            batch_sizes,
            lambda shape, rows: self.costs(rows, seq_lens[shape]),
            examples,
            *(self.batch_multiples(seq_lens), self.least_batch_sizes(seq_lens)),
            self.accumulate,
            sample=self.sample,
            is_linear=isinstance(
                self.cost_fn, TokenCost | TransformerCost | StepTime | None
            ),
        )

    def batch_sizes(self, seq_lens: Any) -> np.ndarray:
        """Returns the largest B for each shape, `[n]` int64; 0 if no row fits."""
        seq_lens = np.asarray(seq_lens, np.int64)
        if isinstance(self.max_tokens, Mapping):
            rows = (self._each(self.max_tokens) // seq_lens).min(axis=1)
        else:
            rows = self._of_shapes("max_tokens", seq_lens) // _totals(seq_lens)
        rows = np.minimum(rows, (MAX_TOKENS - 1) // _totals(seq_lens))
        if self.max_batch_size is not None:
            rows = np.minimum(rows, self.max_batch_size)
        multiples = self.batch_multiples(seq_lens)
        rows = rows // multiples * multiples
        return np.where(rows < self.min_batch_size, 0, rows)

    def _of_shapes(self, name: str, seq_lens: np.ndarray) -> np.ndarray:
        """Returns a limit that may depend on T, for each shape, `[n]` int64."""
        value = getattr(self, name)
        if isinstance(value, tuple):
            return np.array(value, np.int64)
        if not callable(value):
            return np.full(len(seq_lens), value, np.int64)
        numbers = []
        for size in self.named(seq_lens):
            with Noting(f"This is `{name}({size!r})`."):
                number = value(size)
            # A budget of 0 holds no row, as too small a one.
            least = 0 if name == "max_tokens" else 1
            named = f"{name}({size!r})"
            numbers.append(check_integer(named, number, least=least, most=2**62 - 1))
        return np.array(numbers, np.int64)

    def named(self, seq_lens: np.ndarray) -> list[Any]:
        """Returns the T of shapes as users see them: integers, or `Sizes`."""
        if not self.sequences:
            return seq_lens.ravel().tolist()
        rows = seq_lens.tolist()
        return [Sizes(dict(zip(self.sequences, row, strict=True))) for row in rows]

    def costs(self, batch_sizes: np.ndarray, seq_lens: np.ndarray) -> np.ndarray:
        """Returns the cost of a step of each shape, `[n]`: by default its tokens.

        Raises:
          ValueError: if `cost_fn` returns a cost that is not positive.
        """
        if self.cost_fn is None:
            return batch_sizes * _totals(seq_lens)
        shapes = zip(batch_sizes.tolist(), self.named(seq_lens), strict=True)
        costs = (self._cost(*shape) for shape in shapes)
        return np.fromiter(costs, np.float64, len(seq_lens))

    def _cost(self, batch_size: int, seq_len: Any) -> float:
        name = f"cost_fn({batch_size}, {seq_len})"
        with Noting(f"This is `{name}`."):
            cost = cast(CostFn, self.cost_fn)(batch_size, seq_len)
        return check_cost(name, cost)

    def costed(self, plan: BucketPlan) -> BucketPlan:
        """Returns a plan with the same shapes, and the costs of their steps.

        Raises:
          ValueError: if `costs` raises it.
        """
        if self.cost_fn is None:
            return dataclasses.replace(plan, step_costs=None, cost_unit="tokens")
        costs = tuple(self.costs(plan.batch_sizes, plan.seq_lens).tolist())
        unit = unit_of(self.cost_fn)
        return dataclasses.replace(plan, step_costs=costs, cost_unit=unit)

    def check_boundaries(self, seq_lens: np.ndarray) -> None:
        """Raises a ValueError if `max_seq_len` is not the last of given T, `[K, Q]`."""
        if self.max_seq_len is None:
            return
        last = self._each(self.max_seq_len)
        if not (seq_lens == last).all(axis=1).any() or (seq_lens > last).any():
            raise ValueError(
                f"`max_seq_len={self.max_seq_len!r}` is not the last of `boundaries`, "
                f"{self.named(seq_lens)}. Leave it out, or change one of the two."
            )

    def plan(self, seq_lens: Any, counts: Any = None) -> BucketPlan:
        """Returns the plan whose buckets have the given T.

        Args:
          seq_lens: `[K]` increasing integers, the boundaries; or `[K, Q]`, the T of
            each sequence.
          counts: `[K]` integers, the number of examples of each bucket in the order of
            the plan, for which each B is chosen; None for the largest B.

        Raises:
          ValueError: if a bucket cannot hold a single row, or if `max_tokens` is a
            sequence of a different size.
        """
        seq_lens = np.asarray(seq_lens, np.int64)
        if self.sequences:
            seq_lens = seq_lens[shape_order(seq_lens)]
        budget: Any = self.max_tokens
        if isinstance(budget, tuple) and len(budget) != len(seq_lens):
            raise ValueError(
                f"`max_tokens={budget}`: pass one integer, or one for each of "
                f"{len(seq_lens)} boundaries."
            )
        batch_sizes = self.check_shapes(seq_lens)
        if counts is not None:
            rows = self._fitted(seq_lens, batch_sizes, np.asarray(counts, np.int64))
            batch_sizes = rows // self.accumulate
        if callable(budget) or isinstance(budget, tuple):
            budget = int(self._of_shapes("max_tokens", seq_lens).max())
        plan = BucketPlan(
            tuple(map(Bucket, batch_sizes.tolist(), self.named(seq_lens))),
            max_tokens=budget,
            batch_size_multiple=int(np.gcd.reduce(self.batch_multiples(seq_lens))),
            seq_len_multiple=checked_size("seq_len_multiple", self.seq_len_multiple),
            overlong=self.overlong,
        )
        return self.costed(plan)

    def _fitted(
        self, seq_lens: np.ndarray, batch_sizes: np.ndarray, counts: np.ndarray
    ) -> np.ndarray:
        """Returns the rows of a step of each bucket for its examples, `[K]` int64."""
        # Remainders may come from all shorter buckets, or else from any bucket.
        if not self.sequences:
            sizes = self.sizes(seq_lens, batch_sizes, np.cumsum(counts))
            return fitted(sizes, counts).rows
        examples = np.full_like(batch_sizes, counts.sum())
        sizes = self.sizes(seq_lens, batch_sizes, examples)
        return fitted_between(sizes, counts, dominates(seq_lens))[0]

    def check_shapes(self, seq_lens: np.ndarray) -> np.ndarray:
        """Returns the largest B for each shape, `[n]` int64.

        Raises:
          ValueError: if the budget does not hold the fewest rows of a shape.
        """
        batch_sizes = self.batch_sizes(seq_lens)
        if batch_sizes.all():
            return batch_sizes
        bad = int(np.argmin(batch_sizes))
        least = int(self.least_batch_sizes(seq_lens)[bad])
        if self.max_batch_size is not None and self.max_batch_size < least:
            raise ValueError(
                f"`max_batch_size={self.max_batch_size}` is less than {least}, the "
                f"smallest B of `seq_len={self.named(seq_lens)[bad]!r}`. Raise it."
            )
        budget, needed = self.max_tokens, least * int(_totals(seq_lens).max())
        if isinstance(budget, Mapping):
            most = np.maximum(self._each(budget), least * seq_lens.max(axis=0))
            needed = dict(zip(self.sequences, most.tolist(), strict=True))
        else:
            if callable(budget):
                needed = least * int(_totals(seq_lens)[bad])
            budget = int(self._of_shapes("max_tokens", seq_lens)[bad])
        raise ValueError(
            f"`max_tokens={budget!r}` does not hold {least} row{'s' * (least > 1)} of "
            f"`seq_len={self.named(seq_lens)[bad]!r}`. Raise it to {needed}, for all "
            "devices together, or lower `max_seq_len`, `batch_size_multiple` or "
            "`min_batch_size`."
        )


def _totals(seq_lens: np.ndarray) -> np.ndarray:
    """Returns the positions of a row of each shape, `[n]`, over all sequences."""
    return seq_lens if seq_lens.ndim == 1 else seq_lens.sum(axis=1)
