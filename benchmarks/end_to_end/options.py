"""The options of `run.py`, checked before it starts."""

import argparse
import importlib.util
import math
import os
import pathlib
from collections.abc import Sequence

import policies
from example import documents

from jaxbucket.packing.planner import PACK_CHOICES
from jaxbucket.plan.planner import RULES

SEQ_LEN_MULTIPLE = 32
# Options that may change when a run is resumed. Changes are printed.
TRAINING = ("steps", "seconds", "lr", "dropout", "mode")
# Options that may differ between processes. Data is compared by its contents.
OF_ONE_PROCESS = ("data", "json", "plot", "timeout", "executables", "plan")


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a byte-level language model on documents of every length.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        # `--comp` must not be read as `--compare`, which starts its own command.
        allow_abbrev=False,
    )
    data = parser.add_argument_group("data")
    data.add_argument(
        "--data",
        metavar="PATH",
        help="a .jsonl file, a .txt file with one document per line, or a folder of "
        "documents; defaults to Python's standard library",
    )
    data.add_argument(
        "--field", default="text", help="the field of a .jsonl line with its text"
    )
    data.add_argument(
        "--max-len", type=length, default=1024, help="bytes to truncate documents to"
    )
    plan = parser.add_argument_group("plan")
    plan.add_argument(
        "--max-tokens",
        type=positive,
        help="maximum B * T of a global batch; defaults to --batch-size-multiple times "
        "--max-len",
    )
    plan.add_argument(
        "--num-buckets",
        type=number_or_auto,
        default=8,
        metavar="N",
        help='maximum number of shapes; "auto" takes the compile time into account',
    )
    plan.add_argument(
        "--cost",
        choices=("tokens", "time"),
        help='the cost that a plan minimizes; "time" first measures a few shapes. '
        "Defaults to tokens, or to time with --num-buckets auto",
    )
    plan.add_argument(
        "--boundaries",
        choices=RULES,
        default="optimal",
        help="how the shapes are chosen: optimally, or by a rule of thumb",
    )
    plan.add_argument(
        "--batch-size-multiple",
        type=positive,
        default=4,
        help="B is a multiple of this number, which the number of devices must divide",
    )
    plan.add_argument(
        "--pack",
        choices=PACK_CHOICES,
        default="never",
        help="whether to pack several documents into a row; auto does so if it reduces "
        "the cost of an epoch in operations, or in measured time with --cost time",
    )
    plan.add_argument(
        "--plan",
        metavar="FILE",
        help="use a plan written by `jaxbucket plan -o`",
    )
    compiling = parser.add_argument_group("compiling")
    compiling.add_argument(
        "--executables",
        metavar="FOLDER",
        help="folder in which to store executables; defaults to a folder in "
        "--checkpoint. Loading an executable runs its code, so use only folders that "
        "you trust",
    )
    model = parser.add_argument_group("model and training")
    model.add_argument("--width", type=even, default=128, help="width of the model")
    model.add_argument("--layers", type=positive, default=2, help="layers of the model")
    model.add_argument("--dropout", type=share, default=0.0, help="dropout rate")
    model.add_argument("--steps", type=positive, default=700, help="number of steps")
    model.add_argument(
        "--seconds",
        type=rate,
        help="training time, including compilation, instead of --steps",
    )
    model.add_argument("--lr", type=rate, default=8e-3, help="peak learning rate")
    model.add_argument(
        "--seed", type=seed, default=0, help="seed of the model and of the batches"
    )
    devices = parser.add_argument_group("devices")
    devices.add_argument(
        "--devices", type=positive, help="number of devices to simulate on the CPU"
    )
    devices.add_argument(
        "--mode",
        choices=("jit", "shard_map", "pmap"),
        default="jit",
        help="how a step runs on several devices",
    )
    devices.add_argument(
        "--model-devices",
        type=positive,
        default=1,
        help="number of devices that share rows and split the layers of the model",
    )
    devices.add_argument(
        "--fully-sharded",
        action="store_true",
        help="also shard the state over the devices",
    )
    devices.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=rate,
        default=60.0,
        help="time without a heartbeat after which a process is lost",
    )
    ways = parser.add_argument_group("batching methods")
    ways.add_argument(
        "--policy",
        choices=policies.POLICIES,
        default="bucketed",
        help="batching method",
    )
    ways.add_argument(
        "--compare",
        action="store_true",
        help="train with every method for --seconds each, and compare the results",
    )
    ways.add_argument(
        "--seeds",
        type=positive,
        default=1,
        help="number of seeds per method with --compare, starting from --seed",
    )
    ways.add_argument(
        "--markdown",
        action="store_true",
        help="with --compare, also print the table as Markdown",
    )
    saving = parser.add_argument_group("checkpoints")
    saving.add_argument("--checkpoint", metavar="FOLDER", help="folder for checkpoints")
    saving.add_argument(
        "--save-every",
        metavar="STEPS",
        type=positive,
        default=100,
        help="number of steps between checkpoints",
    )
    saving.add_argument(
        "--keep", type=positive, default=3, help="number of checkpoints to keep"
    )
    resuming = saving.add_mutually_exclusive_group()
    resuming.add_argument(
        "--resume", action="store_true", help="continue from the newest checkpoint"
    )
    resuming.add_argument(
        "--resume-changed",
        action="store_true",
        help="like --resume, but allows different data, a different plan or a "
        "different seed",
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--points",
        type=positive,
        default=1,
        help="number of evaluations during the run",
    )
    output.add_argument(
        "--json", metavar="FILE", type=new_file, help="JSON file for all results"
    )
    output.add_argument(
        "--plot", metavar="FILE", type=new_plot, help="file for a plot of the run"
    )
    args = parser.parse_args(words)
    check_plan(parser, args)
    if args.compare:
        check_compare(parser, args)
    elif args.seeds > 1 or args.markdown:
        parser.error("--seeds and --markdown need --compare")
    if (args.resume or args.resume_changed) and not args.checkpoint:
        parser.error("--resume needs --checkpoint, the folder to continue from")
    check_outputs(parser, args)
    return args


def check_compare(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if not args.seconds:
        parser.error("--compare needs --seconds, the time of each run")
    if os.environ.get("JAX_NUM_PROCESSES", "1") != "1":
        parser.error("--compare runs in one process, and cannot be one of several")
    if args.checkpoint or args.resume or args.resume_changed:
        parser.error(
            "--compare does not support checkpoints. Remove --checkpoint and --resume."
        )
    # Some of the methods have packed rows.
    if taken := without_packing(args):
        parser.error(
            f"--compare includes packed rows, which do not support "
            f"{', '.join(taken)}. Remove them."
        )


def without_packing(args: argparse.Namespace) -> list[str]:
    """Returns the given options that packed rows do not support."""
    options = {
        "--boundaries": args.boundaries != "optimal",
        "--num-buckets auto": args.num_buckets == "auto",
        "--plan": args.plan is not None and (args.compare or args.pack == "auto"),
    }
    return [name for name, is_taken in options.items() if is_taken]


def check_plan(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    auto = args.num_buckets == "auto"
    if auto and args.boundaries != "optimal":
        parser.error(
            "--num-buckets auto chooses among optimal plans. Remove --boundaries "
            f"{args.boundaries}, or pass a number of buckets."
        )
    if auto and args.cost == "tokens":
        parser.error(
            "--num-buckets auto requires --cost time. Remove --cost tokens, or pass a "
            "number of buckets."
        )
    if args.pack != "never":
        taken = ["--policy"] if args.policy != "bucketed" else []
        if taken := taken + without_packing(args):
            parser.error(
                f"--pack {args.pack} does not support {', '.join(taken)}. Remove them."
            )
    args.cost = args.cost or ("time" if auto else "tokens")


def check_outputs(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Rejects an output that would overwrite an input or another output."""
    taken = {}
    for name in ("data", "plan", "json", "plot", "checkpoint", "executables"):
        # A URL is never read as data.
        if getattr(args, name) and "://" not in getattr(args, name):
            path = pathlib.Path(getattr(args, name)).resolve()
            if path in taken:
                parser.error(
                    f"--{name} and --{taken[path]} are both {path}. Choose "
                    "different paths."
                )
            taken[path] = name
    data = pathlib.Path(args.data).resolve() if args.data else None
    for path, name in taken.items():
        if data in path.parents and not documents.is_hidden(path.relative_to(data)):
            parser.error(
                f"--{name} {path} is in the folder of --data, and would be read as a "
                "document. Choose a different path."
            )


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number


def number_or_auto(text: str) -> int | str:
    return text if text == "auto" else positive(text)


def even(text: str) -> int:
    number = positive(text)
    if number % 2:
        raise argparse.ArgumentTypeError(f"{number} is not even")
    return number


def share(text: str) -> float:
    number = float(text)
    if not 0 <= number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not at least 0 and below 1")
    return number


def rate(text: str) -> float:
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number


def new_file(text: str) -> str:
    # Check this now, because the file is written at the end of the run.
    if pathlib.Path(text).is_dir() or not pathlib.Path(text).parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is not a file in an existing folder")
    return text


def new_plot(text: str) -> str:
    if pathlib.Path(text).suffix not in (".png", ".svg", ".pdf"):
        raise argparse.ArgumentTypeError(f"{text} is not a .png, .svg or .pdf file")
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError(
            "drawing needs matplotlib: pip install -e '.[examples]'"
        )
    return new_file(text)


def seed(text: str) -> int:
    number = int(text)
    if not 0 <= number < 2**32:
        raise argparse.ArgumentTypeError(f"{number} is not from 0 to 2**32 - 1")
    return number


def length(text: str) -> int:
    number = positive(text)
    if number % SEQ_LEN_MULTIPLE:
        raise argparse.ArgumentTypeError(
            f"{number} is not a multiple of {SEQ_LEN_MULTIPLE}"
        )
    return number
