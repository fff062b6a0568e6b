"""The results of a run as text, as JSON and as a plot."""

import hashlib
import json
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from record_plots import plot_buckets, plot_run
from records import StepRecord


def digest(tree: Any) -> str:
    """Returns a hash of all arrays of a tree. All processes must call this."""
    state = hashlib.blake2b(digest_size=16)
    for leaf in jax.tree.leaves(tree):
        if not (leaf.is_fully_addressable or leaf.is_fully_replicated):
            leaf = process_allgather(leaf, tiled=True)
        state.update(np.asarray(leaf).tobytes())
    return state.hexdigest()


def draw(records: Sequence[StepRecord], path: str) -> None:
    """Draws the steps of the run, and the share of every shape."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure = pyplot.figure(figsize=(8, 9), layout="constrained")
    above, below = figure.subfigures(2, 1, squeeze=False, height_ratios=[2, 1])[:, 0]
    plot_run(records, above)
    plot_buckets(records, below)
    figure.savefig(path, dpi=120)


def to_json(summary: dict[str, Any]) -> str:
    """Returns JSON, with null in place of NaN if the run diverged."""

    def finite(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: finite(part) for name, part in value.items()}
        if isinstance(value, list | tuple):
            return [finite(part) for part in value]
        if isinstance(value, float) and not math.isfinite(value):
            return None
        return value

    return json.dumps(finite(summary), indent=2, allow_nan=False)


def to_text(summary: dict[str, Any]) -> str:
    trained, held_out = summary["train"], summary["held_out"]
    shapes = len(summary["buckets"])
    compiled = [
        f"{name} compiled {c['ahead']} times in {c['seconds']:.1f} s, then {c['later']}"
        for name, c in summary["compile"].items()
    ]
    speed = (
        f": {trained['real_tokens_per_second']:,.0f} real tokens/s, "
        f"{trained['padding']:.1%} padding"
        if "padding" in trained
        else ""
    )
    predicted = [prediction_text(p)] if (p := summary.get("prediction")) else []
    return "\n".join(
        [
            f"\nTrained to step {trained['steps']} in {summary['seconds']:.0f} s"
            f"{speed}.",
            f"{shapes} shapes: {'; '.join(compiled)}.",
            *predicted,
            f"Held out: {held_out['bits_per_byte']:.3f} bits per byte over "
            f"{held_out['bytes']:,} bytes of {held_out['documents']} documents.",
        ]
    )


def prediction_text(numbers: dict[str, Any]) -> str:
    """Compares the predicted time with the measured time."""

    def compared(name: str) -> str:
        predicted, actual = numbers[f"{name}predicted_seconds"], measured(name)
        error = f" ({predicted / actual - 1:+.0%})" if actual else ""
        return f"{predicted:.1f} s predicted, {actual:.1f} s measured{error}"

    def measured(name: str) -> float:
        return numbers[f"{name}measured_seconds"]

    return (
        f"Time for {numbers['steps']} steps: {compared('')}. Time for an epoch of "
        f"{numbers['epoch_steps']} steps at this speed: {compared('epoch_')}."
    )
