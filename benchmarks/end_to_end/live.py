"""The display of a run: a progress bar, and a line at every tenth of it."""

import contextlib
import hashlib
import math
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from records import StepRecord
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

import jaxbucket as jb

# No markup: a path may have brackets in it.
console = Console(highlight=False, markup=False)

LINES = 10
_RECENT_STEPS = 20


class Clock:
    """A clock that measures training and compilation, and that can be paused."""

    def __init__(self, seconds: float = 0.0):
        self._before = seconds
        self._start: float | None = None

    def start(self) -> None:
        self._start = time.perf_counter()

    def pause(self) -> None:
        self._before = self.seconds
        self._start = None

    @property
    def seconds(self) -> float:
        if self._start is None:
            return self._before
        return self._before + time.perf_counter() - self._start


class TrainingLog:
    """Context manager that records every step and displays the progress of the run.

    Attributes:
      records: every step since this process started.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        num_steps: int | None,
        seconds: float | None,
        first_step: int = 0,
    ):
        self.records: list[StepRecord] = []
        self.lines: list[dict[str, Any]] = []
        self._clock = clock
        self._num_steps = num_steps
        self._seconds = seconds
        self._first_step = first_step
        self._pending: tuple[jb.Bucket, dict[str, Any], Future[float]] | None = None
        self._waiter = ThreadPoolExecutor(1)
        self._progress = Progress(
            BarColumn(12),
            TextColumn("{task.description}", markup=False),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._task = self._progress.add_task("", total=1.0)

    def __enter__(self) -> "TrainingLog":
        self._progress.start()
        self._last_time = self._clock.seconds
        self._shown = self._tenths
        console.print("  step   bits/byte   real tokens/s   padding        LR")
        return self

    def __exit__(self, *error: object) -> None:
        if error == (None, None, None):
            self.settle()
        self._progress.stop()
        self._waiter.shutdown()

    @property
    def step(self) -> int:
        """The number of recorded updates since step 0."""
        return self._first_step + len(self.records)

    @property
    def seconds(self) -> float:
        """Seconds of training so far."""
        return self._clock.seconds

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stops the clock, after the last step, for work that is not training."""
        self.settle()
        self._clock.pause()
        try:
            yield
        finally:
            self._clock.start()

    @property
    def done(self) -> float:
        """The share of the run that is done."""
        shares = [0.0]
        if self._num_steps is not None:
            dispatched = self.step + (self._pending is not None)
            shares.append(dispatched / self._num_steps)
        if self._seconds is not None:
            shares.append(self._clock.seconds / self._seconds)
        return min(1.0, max(shares))

    def add(self, batch: jb.Batch, metrics: dict[str, Any]) -> None:
        """Adds a step that was dispatched, and records the previous step.

        Reading the metrics of a step waits for its end. Because they are read one step
        late, the device is never idle.
        """
        self.settle()
        # A thread measures when the step ends, because some backends run a step within
        # the call that dispatches it, and others long afterwards.
        end = self._waiter.submit(self._end, metrics)
        self._pending = batch.bucket, metrics, end

    def settle(self) -> None:
        """Waits for the last step, and records it."""
        if self._pending is None:
            return
        bucket, metrics, end = self._pending
        self._pending = None
        nats, tokens = float(metrics["loss_sum"]), int(metrics["weight"])
        now = end.result()
        self.records.append(
            StepRecord(
                self.step,
                bucket,
                now - self._last_time,
                nats / max(tokens, 1),
                tokens,
                float(metrics["learning_rate"]),
            )
        )
        self._last_time = now
        self._show()

    def _end(self, metrics: dict[str, Any]) -> float:
        jax.block_until_ready(metrics)
        return self._clock.seconds

    @property
    def _tenths(self) -> int:
        return int(self.done * LINES + 1e-9)

    def _show(self) -> None:
        recent = averages(self.records[-_RECENT_STEPS:])
        last = self.records[-1]
        self._progress.update(
            self._task,
            completed=self.done,
            description=f"step {self.step}  {recent['bits_per_byte']:.2f} bits/byte  "
            f"{recent['real_tokens_per_second']:,.0f} real tokens/s  "
            f"{recent['padding']:.0%} padding  {last.bucket}  "
            f"LR {last.learning_rate:.1e}",
        )
        if self._tenths > self._shown:
            self._shown = self._tenths
            before = self.lines[-1]["step"] if self.lines else self._first_step
            line = {
                "step": self.step,
                **averages(self.records[before - self._first_step :]),
                "learning_rate": last.learning_rate,
            }
            self.lines.append(line)
            console.print(
                f"{self.step:6d}{line['bits_per_byte']:12.3f}"
                f"{line['real_tokens_per_second']:16,.0f}{line['padding']:10.1%}"
                f"{line['learning_rate']:10.1e}"
            )

    def summary(self) -> dict[str, Any]:
        """Returns the steps of this process, and every line that was printed."""
        return {
            "steps": self.step,
            "first_step": self._first_step,
            **(averages(self.records) if self.records else {}),
            "lines": self.lines,
            "losses": [record.loss for record in self.records],
        }


class BatchDigest:
    """A hash of all batches of a run, for any number of processes.

    It is the sum of the hashes of all rows and their positions, so that the sums of
    processes can be added.
    """

    def __init__(self, processes: jb.Processes, before: str = "0"):
        self._processes = processes
        # All processes hold the sum of earlier parts of the run, so only process 0 adds
        # it.
        self._sum = int(before, 16) if processes.index == 0 else 0

    def add(self, batch: jb.Batch, step: int) -> None:
        for number, leaf in enumerate(jax.tree.leaves(batch)):
            for shard in leaf.addressable_shards:
                if shard.replica_id == 0:
                    rows = np.ascontiguousarray(shard.data)
                    first = shard.index[0].start or 0
                    for row, values in enumerate(rows, first):
                        self._sum += _hash(f"{step} {number} {row} ", values)

    def total(self) -> str:
        """Returns the hash. All processes must call this."""
        sums = self._processes.gather("batches digest", f"{self._sum:x}")
        return f"{sum(int(part, 16) for part in sums) % 2**128:032x}"


def _hash(position: str, values: np.ndarray) -> int:
    hashed = hashlib.blake2b(position.encode() + values.tobytes(), digest_size=16)
    return int.from_bytes(hashed.digest())


def averages(records: Sequence[StepRecord]) -> dict[str, float]:
    """Returns totals and averages over some steps."""
    seconds = sum(record.seconds for record in records)
    tokens = sum(record.real_tokens for record in records)
    padded = sum(record.bucket.num_tokens for record in records)
    nats = sum(record.loss * record.real_tokens for record in records)
    return {
        "seconds": seconds,
        "real_tokens": tokens,
        "padded_tokens": padded,
        "bits_per_byte": nats / tokens / math.log(2),
        "real_tokens_per_second": tokens / seconds,
        "padding": 1 - tokens / padded,
    }
