"""Mixtures of streams by weight, each with its own plan, pool and features."""

from __future__ import annotations

import contextlib
import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import grain

from jaxbucket.base.batch import Batch
from jaxbucket.base.checks import check_integer
from jaxbucket.base.digest import digest
from jaxbucket.base.position import DataPosition, is_same, later_change
from jaxbucket.schedule.mixture_checks import check_names
from jaxbucket.schedule.mixture_weights import Weights, as_share, check_weights
from jaxbucket.schedule.turns import turn_order
from jaxbucket.stream.dataset import StreamDataset
from jaxbucket.stream.iterator import StreamIterator
from jaxbucket.stream.reader import StreamCounts
from jaxbucket.stream.state import StreamState, check_not_rejected

# What all streams have in common, and how to compare it.
_SAME: tuple[tuple[str, Callable[[StreamDataset], Any]], ...] = (
    ("accumulate", lambda stream: stream.accumulate),
    ("shard", lambda stream: (stream.shard.parts, stream.shard.num_parts)),
)
_STATE_KEYS = {"step", "names", "weights", "streams"}


class StreamMixture(grain.IterDataset[Batch]):
    """Batches of several streams, in proportion to weights.

    Every step comes from one stream. After any number of steps, or of steps since the
    last change of the weights, each stream has had its share of them to within one, if
    `weights` need no rounding. All processes take the streams in the same order, so
    their buckets are the same at every step. The mixture ends when the stream whose
    turn it is has ended; `num_epochs=None` makes streams endless.

    Example:
      >>> import jaxbucket as jb
      >>> def batches(value):
      ...     examples = grain.MapDataset.source([{"x": [value]}] * 9).to_iter_dataset()
      ...     plan = jb.BucketPlan.from_shapes([(1, 1)])
      ...     return jb.stream_batches(examples, plan, pool_size=4)
      >>> mixture = StreamMixture(
      ...     {"web": batches(1), "code": batches(2)}, {"web": 2, "code": 1}
      ... )
      >>> iterator = iter(mixture)
      >>> [int(next(iterator).features["x"][0, 0]) for _ in range(6)]
      [1, 2, 1, 1, 2, 1]

    Attributes:
      streams: name -> the batches of a stream, as returned by `stream_batches`. Each
        has a plan, a pool, features and a packing of its own.
      weights: name -> a positive number; or step -> such weights, from step 0 on, of
        which some may be 0. Weights whose exact ratio would take a period of more than
        2**16 steps are rounded to multiples of 2**-16 of all steps, as in a
        `jb.Mixture`.

    Raises:
      ValueError: if a stream is not the result of `stream_batches`, a name is not a
        string, streams differ in `accumulate` or `shard`, or a weight is invalid or
        missing.
    """

    def __init__(self, streams: Mapping[str, StreamDataset], weights: Weights):
        if not isinstance(streams, Mapping) or not streams:
            raise ValueError(
                f"`streams={streams!r}` is not a mapping from names to streams. Pass "
                "`{'web': jb.stream_batches(...), 'code': jb.stream_batches(...)}`."
            )
        check_names("streams", list(streams))
        for name, stream in streams.items():
            if not isinstance(stream, StreamDataset):
                raise ValueError(
                    f"`streams[{name!r}]` is a {type(stream).__name__}. Pass the "
                    "result of `stream_batches`."
                )
        for name, value_of in _SAME:
            values = {x: value_of(stream) for x, stream in streams.items()}
            if len(set(values.values())) > 1:
                raise ValueError(
                    f"`streams` have different values of `{name}`: {values}. Pass the "
                    "same one to `stream_batches` for all of them."
                )
        super().__init__(list(streams.values()))
        self.streams = dict(streams)
        self.weights = check_weights(weights, list(self.streams), len(self.streams))
        shares = [list(map(as_share, row)) for row in self.weights.values()]
        self._turns = turn_order(list(self.weights), shares)

    def __iter__(self) -> StreamMixtureIterator:
        return StreamMixtureIterator(self)

    def set_slice(self, sl: slice, sequential_slice: bool = False) -> None:
        raise ValueError(
            "A mixture of streams cannot be divided among workers. Use workers in the "
            "streams of examples, `stream.mp_prefetch(...)`."
        )

    def turn(self, step: int) -> tuple[str, int]:
        """Returns the name of the stream of a step, and its own step.

        Args:
          step: the step of the mixture.
        """
        index, number = self._turns.at(_checked_step(step))
        return list(self.streams)[index], number

    def steps_before(self, step: int) -> dict[str, int]:
        """Returns name -> the number of steps of a stream before a step.

        Args:
          step: the step of the mixture.
        """
        step = _checked_step(step)
        return {
            name: self._turns.before(index, step)
            for index, name in enumerate(self.streams)
        }

    def position(self, step: int) -> DataPosition:
        """Returns the position that processes compare and that checkpoints hold.

        It does not include the states of the streams. Save
        `StreamMixtureIterator.state_before(step)` alongside it.

        Args:
          step: the next step.
        """
        positions = {
            name: self.streams[name].position(number)
            for name, number in self.steps_before(step).items()
        }
        parts = [
            _joined({name: getattr(x, part) for name, x in positions.items()})
            for part in ("plan", "data", "schedule")
        ]
        config, weights = self.config(step), self.config()["weights"]
        later = {x: weights[x] for x in weights if x not in config["weights"]}
        processes = next(iter(positions.values())).schedule["processes"]
        parts[2] |= config
        parts[2] |= {"processes": processes, "later_weights": later}
        parts[2]["fingerprint"] = self.fingerprint
        return DataPosition(step, *parts)

    @functools.cached_property
    def fingerprint(self) -> str:
        """32 hex digits of everything that batches depend on, except the streams."""
        parts = [stream.fingerprint for stream in self.streams.values()]
        return digest(json.dumps([self.config(), parts], sort_keys=True).encode())

    def config(self, before: float = math.inf) -> dict[str, Any]:
        """Returns the names of the streams, and their weights before a step.

        The values are plain Python for JSON.
        """
        weights = {
            str(step): list(row)
            for step, row in self.weights.items()
            if step < max(before, 1)
        }
        return {"names": list(self.streams), "weights": weights}


class StreamMixtureIterator(grain.DatasetIterator[Batch]):
    """Iterates over the batches of a `StreamMixture`.

    Attributes:
      iterators: name -> the iterator of a stream.
    """

    def __init__(self, dataset: StreamMixture):
        super().__init__()
        self._dataset = dataset
        self.iterators: dict[str, StreamIterator] = {
            name: iter(stream) for name, stream in dataset.streams.items()
        }
        self._step = 0
        # False from a rejected state until a valid one is set.
        self._is_valid = True

    @property
    def counts(self) -> dict[str, StreamCounts]:
        """Name -> the numbers of examples of a stream that were read, dropped, ..."""
        return {name: iterator.counts for name, iterator in self.iterators.items()}

    def __next__(self) -> Batch:
        self._assert_not_closed()
        check_not_rejected(self._is_valid)
        name, _ = self._dataset.turn(self._step)
        with _naming(name):
            batch = next(self.iterators[name])
        self._step += 1
        return batch

    def get_state(self) -> dict[str, Any]:
        """Returns the states of all streams, as plain Python for JSON."""
        return self.state_before(self._step)

    def state_before(self, step: int) -> dict[str, Any]:
        """Returns the state in which `step` is the next step.

        A loop that loads ahead saves this state of the step that it has reached.

        Args:
          step: one of the last 64 steps that were served, or the next step.

        Raises:
          ValueError: if the state before `step` is not available.
        """
        check_not_rejected(self._is_valid)
        step = _checked_step(step)
        if step > self._step:
            raise ValueError(
                f"`step={step}` has no state, because the next step is {self._step}."
            )
        states = {}
        for name, number in self._dataset.steps_before(step).items():
            with _naming(name):
                states[name] = self.iterators[name].state_before(number)
        return {"step": step, **self._dataset.config(step), "streams": states}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores the states of all streams.

        All processes of a run must do this before the next step.

        Args:
          state: a state that `get_state` or `state_before` returned, for the same
            streams, and the same weights up to its step.

        Raises:
          ValueError: if `state` is not such a state, or a stream refuses its state.
        """
        if not isinstance(state, Mapping) or state.keys() != _STATE_KEYS:
            raise ValueError(
                "`state` is not a state of a `StreamMixture`. Pass the result of "
                "`get_state()` or `state_before(step)` of its iterator."
            )
        saved = self._checked_states(state)
        # If a stream cannot be restored, the others are at different steps.
        self._is_valid = False
        for name, iterator in self.iterators.items():
            with _naming(name):
                iterator.restore(saved[name])
        self._step, self._is_valid = sum(x.step for x in saved.values()), True

    def _checked_states(self, state: Mapping[str, Any]) -> dict[str, StreamState]:
        """Returns the states of all streams, checked without reading."""
        names, states = list(self.iterators), state["streams"]
        if not is_same(state["names"], names):
            raise ValueError(
                f"`state` is of a mixture with the names {state['names']}, and this "
                f"one has {names}. Restore the previous streams."
            )
        if not isinstance(states, Mapping) or states.keys() != set(names):
            raise ValueError(
                f"`state` does not have a state of each of its streams {names}. Pass a "
                "state as it was saved."
            )
        saved: dict[str, StreamState] = {}
        for name, iterator in self.iterators.items():
            with _naming(name):
                saved[name] = iterator.checked_state(states[name])
        steps = {name: x.step for name, x in saved.items()}
        step = sum(steps.values())
        weights = self._dataset.config(step)["weights"]
        if not is_same(state["weights"], weights):
            raise ValueError(
                f"`state` is of a mixture with the weights {state['weights']}, and "
                f"this one has {weights}. Restore the previous weights. "
                f"{later_change('weights')}"
            )
        expected = self._dataset.steps_before(step)
        if not is_same(state["step"], step) or steps != expected:
            raise ValueError(
                f"`state` is of step {state['step']!r}, but the states of its streams "
                f"are of the steps {steps}. Pass a state as it was saved."
            )
        return saved

    def close(self) -> None:
        super().close()
        for iterator in self.iterators.values():
            iterator.close()


def _joined(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the entries of all streams, "name.entry", with one fingerprint."""
    entries = {
        f"{name}.{key}": value
        for name, part in parts.items()
        for key, value in part.items()
    }
    text = json.dumps(entries, sort_keys=True, default=str)
    return entries | {"fingerprint": digest(text.encode())}


def _checked_step(step: Any) -> int:
    step = check_integer("step", step)
    if step < 0:
        raise ValueError(f"`step={step}` must not be negative.")
    return step


@contextlib.contextmanager
def _naming(name: str) -> Iterator[None]:
    """Adds the name of a stream to the errors of a `with` block."""
    try:
        yield
    except StopIteration:
        raise
    except Exception as error:
        note = f"This is the stream {name!r} of the mixture."
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
        raise
