"""The options of the main job, checked before it begins."""

import argparse
import importlib.util
import math
import os
import pathlib
from collections.abc import Sequence

import policies
from example import documents

from jaxbucket.packing.packed_plan import PACK
from jaxbucket.plan.planner import RULES

SEQ_LEN_MULTIPLE = 32
# What may be another when a run goes on, and is then said.
TRAINING = ("steps", "seconds", "lr", "dropout", "mode")
# What need not be the same in all processes: the data is compared by what it holds.
OF_ONE_PROCESS = ("data", "json", "plot", "timeout", "executables", "plan")


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a byte-level language model on documents of every length.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        # `--comp` must not pass for `--compare`, which starts others like itself.
        allow_abbrev=False,
    )
    data = parser.add_argument_group("data")
    data.add_argument(
        "--data",
        metavar="PATH",
        help="a .jsonl file, a .txt file with a document in every line, or a folder of "
        "documents; by default Python's standard library",
    )
    data.add_argument("--field", default="text", help="of a .jsonl line, its text")
    data.add_argument(
        "--max-len", type=length, default=1024, help="bytes a document is cut to"
    )
    plan = parser.add_argument_group("plan")
    plan.add_argument(
        "--max-tokens",
        type=positive,
        help="B * T of a global batch; by default --batch-size-multiple rows of "
        "--max-len",
    )
    plan.add_argument(
        "--num-buckets",
        type=number_or_auto,
        default=8,
        metavar="N",
        help='shapes at most; "auto" weighs the time that each takes to compile',
    )
    plan.add_argument(
        "--cost",
        choices=("tokens", "time"),
        help="what an epoch has the least of; time is measured first, on a few shapes. "
        "By default tokens, and time where the number of shapes is auto",
    )
    plan.add_argument(
        "--boundaries", choices=RULES, default="optimal", help="or a rule of thumb"
    )
    plan.add_argument(
        "--batch-size-multiple",
        type=positive,
        default=4,
        help="every B is a multiple of it, and the devices must divide it",
    )
    plan.add_argument(
        "--pack",
        choices=PACK,
        default="never",
        help="several documents in a row, where an epoch costs less that way: in "
        "operations of the model, or in time that is measured with --cost time",
    )
    plan.add_argument(
        "--plan",
        metavar="FILE",
        help="the shapes, as `jaxbucket plan -o` wrote them, instead of planning",
    )
    compiling = parser.add_argument_group("compiling")
    compiling.add_argument(
        "--executables",
        metavar="FOLDER",
        help="keep them there, and find them again; by default beside the checkpoints. "
        "They are loaded as code: take none from somebody that you do not trust",
    )
    compiling.add_argument(
        "--verify",
        choices=("all", "one"),
        default="all",
        help="how many are compared with what was compiled",
    )
    compiling.add_argument(
        "--opening",
        type=positive,
        metavar="STEPS",
        help="train on one shape first for so long, while the others are compiled",
    )
    model = parser.add_argument_group("model and training")
    model.add_argument("--width", type=even, default=128, help="of the model")
    model.add_argument("--layers", type=positive, default=2, help="of the model")
    model.add_argument("--dropout", type=share, default=0.0, help="share dropped")
    model.add_argument("--steps", type=positive, default=700, help="updates")
    model.add_argument(
        "--seconds",
        type=rate,
        help="train so long, compiling included, instead of --steps",
    )
    model.add_argument("--lr", type=rate, default=8e-3, help="peak learning rate")
    model.add_argument("--seed", type=seed, default=0, help="of everything random")
    devices = parser.add_argument_group("devices")
    devices.add_argument("--devices", type=positive, help="simulate so many on the CPU")
    devices.add_argument("--mode", choices=("jit", "shard_map", "pmap"), default="jit")
    devices.add_argument(
        "--model-devices",
        type=positive,
        default=1,
        help="devices that share the same rows, and the layers of the model",
    )
    devices.add_argument(
        "--fully-sharded",
        action="store_true",
        help="cut the state over the devices, too",
    )
    devices.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=rate,
        default=60.0,
        help="after which a silent process is lost",
    )
    ways = parser.add_argument_group("ways to make batches")
    ways.add_argument(
        "--policy", choices=policies.POLICIES, default="bucketed", help="one of them"
    )
    ways.add_argument(
        "--compare",
        action="store_true",
        help="train in all ways for --seconds each, and show them side by side",
    )
    saving = parser.add_argument_group("checkpoints")
    saving.add_argument("--checkpoint", metavar="FOLDER", help="save the run there")
    saving.add_argument(
        "--save-every",
        metavar="STEPS",
        type=positive,
        default=100,
        help="save so often",
    )
    saving.add_argument("--keep", type=positive, default=3, help="the last so many")
    going_on = saving.add_mutually_exclusive_group()
    going_on.add_argument(
        "--resume", action="store_true", help="go on where the last checkpoint is"
    )
    going_on.add_argument(
        "--resume-changed",
        action="store_true",
        help="go on there with other data, another plan or another seed",
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--points", type=positive, default=1, help="evaluate so often along the run"
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
    if args.compare and not args.seconds:
        parser.error("--compare needs --seconds, the time that each way has")
    if args.compare and os.environ.get("JAX_NUM_PROCESSES", "1") != "1":
        parser.error("--compare starts one way after another, each in one process")
    if args.compare and (args.checkpoint or args.resume or args.resume_changed):
        parser.error("--compare starts each way anew: leave out checkpoints")
    if (args.resume or args.resume_changed) and not args.checkpoint:
        parser.error("--resume needs --checkpoint, the folder to go on from")
    check_outputs(parser, args)
    return args


def check_plan(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    auto = args.num_buckets == "auto"
    if auto and args.boundaries != "optimal":
        parser.error(
            f"--num-buckets auto chooses among optimal plans: leave out --boundaries "
            f"{args.boundaries}, or give a number"
        )
    if auto and args.cost == "tokens":
        parser.error(
            "--num-buckets auto weighs the time of compiling: leave out --cost tokens, "
            "or give a number"
        )
    if args.pack != "never":
        others = {
            "--policy": args.policy != "bucketed",
            "--boundaries": args.boundaries != "optimal",
            "--num-buckets auto": auto,
            "--opening": args.opening is not None,
            "--plan": args.plan is not None and args.pack == "auto",
        }
        taken = [name for name, is_taken in others.items() if is_taken]
        if taken:
            parser.error(
                f"--pack {args.pack} chooses the rows: leave out {', '.join(taken)}"
            )
    args.cost = args.cost or ("time" if auto else "tokens")


def check_outputs(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Nothing that is written may be what is read, or what else is written."""
    taken = {}
    for name in ("data", "plan", "json", "plot", "checkpoint", "executables"):
        # A URL is nothing that is read as data.
        if getattr(args, name) and "://" not in getattr(args, name):
            path = pathlib.Path(getattr(args, name)).resolve()
            if path in taken:
                parser.error(
                    f"--{name} names what --{taken[path]} names, {path}: give each its "
                    "own"
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
        raise argparse.ArgumentTypeError(f"{number} is not from 0 to below 1")
    return number


def rate(text: str) -> float:
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number


def new_file(text: str) -> str:
    # Now, not when the run is over.
    if pathlib.Path(text).is_dir() or not pathlib.Path(text).parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is no file in an existing folder")
    return text


def new_picture(text: str) -> str:
    if pathlib.Path(text).suffix not in (".png", ".svg", ".pdf"):
        raise argparse.ArgumentTypeError(f"{text} is no .png, .svg or .pdf file")
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
            f"{number} is no multiple of {SEQ_LEN_MULTIPLE}"
        )
    return number
