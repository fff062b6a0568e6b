"""What is shown while a model trains: a bar, and a line at every tenth of the run."""

import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import optax
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

import jaxbucket as jb

console = Console(highlight=False)

_LINES = 10
_RECENT_STEPS = 20


class StepRecord(NamedTuple):
    """One step, as plain numbers."""

    bucket: jb.Bucket
    seconds: float
    nats: float
    real_tokens: float
    learning_rate: float


class TrainingLog:
    """Records every step and shows the run as it goes; use it as a context."""

    def __init__(self, num_steps: int, learning_rate: optax.Schedule):
        self.records: list[StepRecord] = []
        self.lines: list[dict[str, Any]] = []
        self._num_steps = num_steps
        self._learning_rate = learning_rate
        self._pending: tuple[jb.Bucket, dict[str, Any]] | None = None
        self._progress = Progress(
            BarColumn(12),
            MofNCompleteColumn(),
            TextColumn("{task.description}", markup=False),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._task = self._progress.add_task("", total=num_steps)

    def __enter__(self) -> "TrainingLog":
        self._progress.start()
        self._last_time = time.perf_counter()
        console.print("  step   bits/byte   real tokens/s   padding        LR")
        return self

    def __exit__(self, *error: object) -> None:
        if error == (None, None, None):
            self._record_pending()
        self._progress.stop()

    def add(self, bucket: jb.Bucket, metrics: dict[str, Any]) -> None:
        """Takes note of a step that was dispatched, and records the one before it.

        Reading a step's numbers waits for the step: one behind, the device never
        waits for the reader.
        """
        self._record_pending()
        self._pending = bucket, metrics

    def _record_pending(self) -> None:
        if self._pending is None:
            return
        bucket, metrics = self._pending
        nats, tokens = float(metrics["loss_sum"]), float(metrics["weight"])
        base = np.asarray(self._learning_rate(len(self.records)))
        rate = float(base) * float(metrics["lr_factor"])
        now = time.perf_counter()
        self.records.append(
            StepRecord(bucket, now - self._last_time, nats, tokens, rate)
        )
        self._last_time = now
        self._show()

    def _show(self) -> None:
        done, per_line = len(self.records), max(1, self._num_steps // _LINES)
        recent = averages(self.records[-_RECENT_STEPS:])
        last = self.records[-1]
        self._progress.update(
            self._task,
            completed=done,
            description=f"{recent['bits_per_byte']:.2f} bits/byte  "
            f"{recent['real_tokens_per_second']:,.0f} real tokens/s  "
            f"{recent['padding']:.0%} padding  {last.bucket}  "
            f"LR {last.learning_rate:.1e}",
        )
        if done % per_line == 0:
            line = {"step": done, **averages(self.records[-per_line:])}
            line["learning_rate"] = last.learning_rate
            self.lines.append(line)
            console.print(
                f"{done:6d}{line['bits_per_byte']:12.3f}"
                f"{line['real_tokens_per_second']:16,.0f}{line['padding']:10.1%}"
                f"{line['learning_rate']:10.1e}"
            )

    def summary(self) -> dict[str, Any]:
        """The whole run, and every line that was shown."""
        return {
            "steps": len(self.records),
            **averages(self.records),
            "lines": self.lines,
        }


def averages(records: Sequence[StepRecord]) -> dict[str, float]:
    """Totals over some steps."""
    seconds = sum(record.seconds for record in records)
    tokens = sum(record.real_tokens for record in records)
    padded = sum(record.bucket.num_tokens for record in records)
    return {
        "seconds": seconds,
        "real_tokens": int(tokens),
        "bits_per_byte": sum(r.nats for r in records) / tokens / math.log(2),
        "real_tokens_per_second": tokens / seconds,
        "padding": 1 - tokens / padded,
    }
