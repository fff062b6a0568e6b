"""The options of `run.py`, checked before it starts."""

import argparse
import importlib.util
import math
import os
import pathlib
from collections.abc import Sequence

import policies
from example import documents

from jaxbucket.packing.packed_plan import PACK_CHOICES
from jaxbucket.plan.planner import RULES

SEQ_LEN_MULTIPLE = 32
# Options that may change when a run is resumed. A change is printed.
TRAINING = ("steps", "seconds", "lr", "dropout", "mode")
# Options that may differ between processes. Data is compared by its contents.
OF_ONE_PROCESS = ("data", "json", "plot", "timeout", "executables", "plan")


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a byte-level language model on documents of every length.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        # `--comp` must not be taken for `--compare`, which starts its own command.
        allow_abbrev=False,
    )
    data = parser.add_argument_group("data")
    data.add_argument(
        "--data",
        metavar="PATH",
        help="a .jsonl file, a .txt file with one document per line, or a folder of "
        "documents; by default Python's standard library",
    )
    data.add_argument(
        "--field", default="text", help="the field of a .jsonl line that has its text"
    )
    data.add_argument(
        "--max-len", type=length, default=1024, help="bytes to truncate documents to"
    )
    plan = parser.add_argument_group("plan")
    plan.add_argument(
        "--max-tokens",
        type=positive,
        help="the most tokens, B * T, of a global batch; by default "
        "--batch-size-multiple rows of --max-len",
    )
    plan.add_argument(
        "--num-buckets",
        type=number_or_auto,
        default=8,
        metavar="N",
        help='the most shapes; "auto" weighs the time that each takes to compile',
    )
    plan.add_argument(
        "--cost",
        choices=("tokens", "time"),
        help="what a plan minimizes. Time is measured first, on a few shapes. By "
        "default tokens, or time with --num-buckets auto",
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
        help="a divisor of every B, which the devices must divide",
    )
    plan.add_argument(
        "--pack",
        choices=PACK_CHOICES,
        default="never",
        help="put several documents in a row; auto does so if an epoch costs less that "
        "way, in operations, or in measured time with --cost time",
    )
    plan.add_argument(
        "--plan",
        metavar="FILE",
        help="a plan that `jaxbucket plan -o` wrote, instead of planning",
    )
    compiling = parser.add_argument_group("compiling")
    compiling.add_argument(
        "--executables",
        metavar="FOLDER",
        help="keep executables there, and load them from there; by default in the "
        "folder of the checkpoints. Loading one runs its code, so use only folders "
        "that you trust",
    )
    compiling.add_argument(
        "--verify",
        choices=("all", "one"),
        default="all",
        help="how many programs are traced to check that an executable is up to date",
    )
    compiling.add_argument(
        "--opening",
        type=positive,
        metavar="STEPS",
        help="steps of one shape to begin with, while the others are compiled",
    )
    model = parser.add_argument_group("model and training")
    model.add_argument("--width", type=even, default=128, help="width of the model")
    model.add_argument("--layers", type=positive, default=2, help="layers of the model")
    model.add_argument("--dropout", type=share, default=0.0, help="dropout rate")
    model.add_argument("--steps", type=positive, default=700, help="updates")
    model.add_argument(
        "--seconds",
        type=rate,
        help="train for this long, compiling included, instead of --steps",
    )
    model.add_argument("--lr", type=rate, default=8e-3, help="peak learning rate")
    model.add_argument(
        "--seed", type=seed, default=0, help="seed of the model and of the batches"
    )
    devices = parser.add_argument_group("devices")
    devices.add_argument(
        "--devices", type=positive, help="devices to simulate on the CPU"
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
        help="devices that share the same rows, and divide the layers of the model",
    )
    devices.add_argument(
        "--fully-sharded",
        action="store_true",
        help="shard the state over the devices, too",
    )
    devices.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=rate,
        default=60.0,
        help="time without a heartbeat after which a process is lost",
    )
    ways = parser.add_argument_group("ways to make batches")
    ways.add_argument(
        "--policy",
        choices=policies.POLICIES,
        default="bucketed",
        help="how batches are made",
    )
    ways.add_argument(
        "--compare",
        action="store_true",
        help="train in every way for --seconds each, and compare them",
    )
    ways.add_argument(
        "--seeds",
        type=positive,
        default=1,
        help="with --compare, train in every way with this many seeds, from --seed on",
    )
    ways.add_argument(
        "--markdown",
        action="store_true",
        help="with --compare, print the table as Markdown, too",
    )
    saving = parser.add_argument_group("checkpoints")
    saving.add_argument("--checkpoint", metavar="FOLDER", help="save the run there")
    saving.add_argument(
        "--save-every",
        metavar="STEPS",
        type=positive,
        default=100,
        help="steps between checkpoints",
    )
    saving.add_argument(
        "--keep", type=positive, default=3, help="checkpoints to keep, the newest"
    )
    resuming = saving.add_mutually_exclusive_group()
    resuming.add_argument(
        "--resume", action="store_true", help="continue from the newest checkpoint"
    )
    resuming.add_argument(
        "--resume-changed",
        action="store_true",
        help="continue from it with different data, another plan or another seed",
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--points", type=positive, default=1, help="evaluations during the run"
    )
    output.add_argument(
        "--json", metavar="FILE", type=new_file, help="write every number there"
    )
    output.add_argument(
        "--plot", metavar="FILE", type=new_picture, help="draw the run there"
    )
    args = parser.parse_args(words)
    check_plan(parser, args)
    if args.opening and args.policy not in policies.RESUMABLE:
        parser.error(f"--opening plans batches, and --policy {args.policy} does not")
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
        parser.error("--compare starts every run anew: leave out the checkpoints")
    # Some of the ways have packed rows.
    if taken := without_packing(args):
        parser.error(
            f"--compare also packs rows, which chooses them: leave out "
            f"{', '.join(taken)}"
        )


def without_packing(args: argparse.Namespace) -> list[str]:
    """Returns the options that choose rows, and so do not go with packing."""
    options = {
        "--boundaries": args.boundaries != "optimal",
        "--num-buckets auto": args.num_buckets == "auto",
        "--opening": args.opening is not None,
        "--plan": args.plan is not None and (args.compare or args.pack == "auto"),
    }
    return [name for name, is_taken in options.items() if is_taken]


def check_plan(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    auto = args.num_buckets == "auto"
    if auto and args.boundaries != "optimal":
        parser.error(
            "--num-buckets auto chooses among optimal plans: leave out --boundaries "
            f"{args.boundaries}, or give a number"
        )
    if auto and args.cost == "tokens":
        parser.error(
            "--num-buckets auto weighs the time of compiling: leave out --cost tokens, "
            "or give a number"
        )
    if args.pack != "never":
        taken = ["--policy"] if args.policy != "bucketed" else []
        if taken := taken + without_packing(args):
            parser.error(
                f"--pack {args.pack} chooses the rows: leave out {', '.join(taken)}"
            )
    args.cost = args.cost or ("time" if auto else "tokens")


def check_outputs(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuses an output in the place of an input or of another output."""
    taken = {}
    for name in ("data", "plan", "json", "plot", "checkpoint", "executables"):
        # A URL is never read as data.
        if getattr(args, name) and "://" not in getattr(args, name):
            path = pathlib.Path(getattr(args, name)).resolve()
            if path in taken:
                parser.error(
                    f"--{name} and --{taken[path]} are both {path}: name two places"
                )
            taken[path] = name
    data = pathlib.Path(args.data).resolve() if args.data else None
    for path, name in taken.items():
        if data in path.parents and not documents.is_hidden(path.relative_to(data)):
            parser.error(
                f"--{name} {path} is in the folder of --data, and would be read as a "
                "document: name another place"
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
    # Checked now, because the file is written at the end of the run.
    if pathlib.Path(text).is_dir() or not pathlib.Path(text).parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is not a file in an existing folder")
    return text


def new_picture(text: str) -> str:
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
