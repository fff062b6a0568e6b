"""Draws the README's picture: the plan of the standard library's functions.

python scripts/draw_plan.py docs/plan.png
"""

import argparse
import dataclasses
import pathlib
import sys

import matplotlib

import jaxbucket as jb
from jaxbucket.plan.reports.plots import plot_plan

sys.path.append(str(pathlib.Path(__file__).parents[1] / "examples"))
import documents


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the README's picture.")
    parser.add_argument("output", type=pathlib.Path)
    args = parser.parse_args()
    matplotlib.use("agg")
    lengths = jb.measure_lengths(documents.load().train)
    plan = jb.plan_buckets(
        lengths,
        max_tokens=65_536,
        num_buckets=6,
        batch_size_multiple=8,
        seq_len_multiple=64,
        max_seq_len=4096,
        overlong="truncate",
    )
    # The documents are bytes, and each byte is a token.
    epoch = dataclasses.replace(jb.report(plan, lengths), unit="bytes")
    ax = plot_plan(plan, lengths, epoch=epoch)
    args.output.parent.mkdir(exist_ok=True)
    ax.figure.savefig(args.output, dpi=120)


if __name__ == "__main__":
    main()
