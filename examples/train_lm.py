"""Trains a byte-level language model on documents of every length.

    python examples/train_lm.py --data my.jsonl --field text --json summary.json
    python examples/train_lm.py --checkpoint runs/a  # run it again to continue
    python scripts/launch_local.py -n 2 -d 2 -- python examples/train_lm.py --steps 100

No option is required. The last command runs two processes with two devices each.
"""

import argparse
import contextlib
import dataclasses
import json
import pathlib
import sys
import time
from collections.abc import Sequence

import documents
import recipe
from rich.console import Console
from rich.progress import track
from transformer import VOCABULARY

import jaxbucket as jb


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_arguments(argv)
    with contextlib.ExitStack() as stack:
        # All processes run this code, but only process 0 prints.
        processes = stack.enter_context(jb.Processes())
        compiles = stack.enter_context(jb.compile.count_compiles())
        console = Console(quiet=processes.index > 0, highlight=False, markup=False)
        mesh = jb.data_mesh()

        # Choose a few shapes (B, T), and assign documents to steps.
        splits = documents.load(args.data, args.field, args.max_len)
        lengths = jb.measure_lengths(splits.train)
        fitting = max(1, min(8, args.max_tokens // args.max_len))
        rows = jb.plan_packing(
            lengths,
            max_tokens=args.max_tokens,
            num_buckets=args.num_buckets,
            batch_size_multiple=args.batch_size_multiple or fitting,
            seq_len_multiple=32,
            pack=args.pack,
            cost_fn=jb.plan.TransformerCost(args.width, args.layers, VOCABULARY),
            block_sparse=True,  # `jb.segment_attention` skips other segments.
        )
        plan, packing = rows.plan, rows.packing
        schedule = jb.BatchSchedule(plan, lengths, packing=packing, seed=args.seed)
        console.print(schedule, rows.reason, schedule.report().summary, sep="\n")
        batches = jb.MeshLoader(splits.train, schedule, mesh, num_steps=args.steps)
        processes.check_agreement(batches.position(0), mesh, vars(args))

        # Batch the held-out documents in the same shapes, one in each row.
        plan = dataclasses.replace(plan.unpacked, overlong="truncate")
        lengths = jb.measure_lengths(splits.held_out)
        schedule = jb.BatchSchedule(plan, lengths, order="source")
        held_out = jb.MeshLoader(splits.held_out, schedule, mesh)

        # Continue from the newest checkpoint, if there is one.
        state, train_fn, eval_fn = recipe.make_steps(args, mesh)
        checkpoints = None
        if args.checkpoint:
            manager = jb.Checkpoints(args.checkpoint, processes=processes)
            checkpoints = stack.enter_context(manager)
            if checkpoints.latest_step is not None:
                state, position, _ = checkpoints.restore(state)
                batches = batches.resume(position)
                console.print(f"Continuing after step {batches.start_step}.")

        # Compile both steps for every shape, before the first batch.
        console.print(f"Compiling {len(plan)} shapes, for training and evaluation.")
        cache = args.executables
        train_step = jb.compile_steps(train_fn, state, batches.specs, executables=cache)
        eval_step = jb.compile_steps(eval_fn, state, held_out.specs, executables=cache)

        # Train. Ctrl-C and SIGTERM stop all processes before the same step.
        stop = stack.enter_context(jb.StopRequest(processes))
        step, loss, speed = batches.start_step, None, None
        recent, start = [], time.perf_counter()
        for batch in track(batches, "Training", console=console, transient=True):
            if stop.before(step):
                break
            state, metrics = train_step(state, batch)
            step += 1
            recent.append(metrics)
            # Do not read metrics after every step, because that waits for the device.
            if step % max(1, args.steps // 20) == 0:
                loss, size = recipe.bits_per_byte(recent)
                speed = size / (time.perf_counter() - start)
                console.print(
                    f"{step:6d}  {loss:.3f} bits/byte  {speed:,.0f} bytes/s  "
                    f"at most {batches.data_wait:.1%} waiting for data"
                )
                recent, start = [], time.perf_counter()
            if checkpoints and step % args.save_every == 0:
                checkpoints.save(state, batches.position(step))
        if checkpoints:
            checkpoints.save(state, batches.position(step))
            checkpoints.wait()
        if stop.signal:
            how = "Run the same command again to continue." if checkpoints else ""
            console.print(f"Stopped by {stop.signal.name} after step {step}. {how}")
            return 128 + stop.signal

        # Evaluate on every held-out document, and count the compiled programs.
        metrics = [eval_step(state, batch) for batch in held_out]
        held_out_loss, _ = recipe.bits_per_byte(metrics)
        ahead = train_step.report.num_compiled + eval_step.report.num_compiled
        summary = {
            "step": step,
            "bits_per_byte": loss,
            "held_out_bits_per_byte": held_out_loss,
            "bytes_per_second": speed,
            "data_wait": batches.data_wait,
            "compiled_ahead": ahead,
            "compiled_later": compiles["train_step"] + compiles["eval_step"] - ahead,
        }
        console.print_json(data=summary)
        if args.json and processes.index == 0:
            pathlib.Path(args.json).write_text(json.dumps(summary))
    return 0


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a byte-level language model on documents of every length.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    option = parser.add_argument
    option("--data", help=".jsonl or .txt file, or folder; default: Python's library")
    option("--field", default="text", help="the field of a .jsonl line with its text")
    option("--max-len", type=int, default=1024, help="bytes to truncate documents to")
    option("--max-tokens", type=int, default=8192, help="maximum tokens per batch")
    option("--num-buckets", type=int, default=8, help="maximum number of shapes")
    option("--batch-size-multiple", type=int, help="of every B; default: up to 8")
    option("--pack", default="never", help="pack documents: auto, always or never")
    recipe.add_options(parser)
    option("--checkpoint", help="a folder to save to, and to continue from")
    option("--save-every", type=int, default=100, help="steps between checkpoints")
    option("--executables", help="a folder in which to store compiled steps")
    option("--json", help="a file to write the results to")
    return parser.parse_args(argv)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (OSError, ValueError) as error:
        sys.exit(f"train_lm.py: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
