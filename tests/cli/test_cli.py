"""The command `jaxbucket`, run as a user runs it."""

import contextlib
import fcntl
import json
import os
import pathlib
import pty
import re
import struct
import subprocess
import sys
import termios

import click
import matplotlib.image
import numpy as np
import pytest
from click.testing import CliRunner

from jaxbucket import Bucket, BucketPlan, Limits, plan_buckets, report
from jaxbucket.cli import main
from jaxbucket.plan import (
    Comparison,
    PlanCurve,
    Report,
    StepTime,
    TokenCost,
    TransformerCost,
    compare_plans,
    plan_curve,
)
from jaxbucket.plan.planner import RULES, plan_within
from jaxbucket.plan.reports.epoch import BucketReport

LENGTHS = np.random.default_rng(0).integers(1, 500, 1000).astype(np.int32)


@pytest.fixture
def files(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A current folder that has the same lengths in several kinds of files."""
    monkeypatch.chdir(tmp_path)
    np.save("lengths.npy", LENGTHS)
    np.savez("one.npz", lengths=LENGTHS)
    np.savez("two.npz", lengths=LENGTHS, others=LENGTHS[:10])
    pathlib.Path("lengths.txt").write_text("\n".join(map(str, LENGTHS)) + "\n")
    return tmp_path


def run(*args: object, code: int = 0) -> str:
    result = CliRunner().invoke(main, [str(arg) for arg in args])
    assert result.exit_code == code, result.output
    return result.output


def refused(*args: object) -> str:
    """Runs a command that must fail and returns its one line of output."""
    output = run(*args, code=1)
    assert output.startswith("Error: ")
    assert output.count("\n") == 1
    return output


PLAN = plan_buckets(LENGTHS, max_tokens=4096, num_buckets=4, seq_len_multiple=32)
BUDGET = ("--max-tokens", 4096)
OPTIONS = ("--max-tokens", 4096, "--num-buckets", 4, "--seq-len-multiple", 32)


@pytest.mark.parametrize(
    "arguments",
    [
        ["lengths.npy"],
        ["one.npz"],
        ["two.npz", "--column", "lengths"],
        ["lengths.txt"],
    ],
)
def test_plan_reads_every_kind_of_length_file(files, arguments):
    run("plan", *arguments, *OPTIONS, "-o", "plan.json")
    assert BucketPlan.from_json((files / "plan.json").read_text()) == PLAN


def test_json_has_every_number_of_the_table(files):
    table = run("plan", "lengths.npy", *OPTIONS)
    result = json.loads(run("plan", "lengths.npy", *OPTIONS, "--json"))
    epoch = report(PLAN, LENGTHS)
    assert result["report"] == json.loads(epoch.to_json())
    assert BucketPlan.from_json(json.dumps(result["plan"])) == PLAN
    assert result["fingerprint"] == PLAN.fingerprint
    assert f"{epoch.steps_per_epoch} steps per epoch" in table
    for bucket in PLAN.buckets:
        assert str(bucket.batch_size) in table and str(bucket.seq_len) in table


def test_the_keys_of_the_json_are_documented(files):
    page = (pathlib.Path(__file__).parents[2] / "docs" / "planning.md").read_text()
    _, _, section = page.partition("### JSON")
    documented = set(re.findall(r"`(\w+)`", section.partition("\n## ")[0]))
    auto = ("--num-buckets", "auto", "--compile-seconds", 1, "--per-second", 1e4)
    with_curve = json.loads(run("plan", "lengths.npy", *BUDGET, *auto, "--json"))
    packed = ("plan", "lengths.npy", *OPTIONS, "--pack", "auto", "--json")
    compared = json.loads(run("compare", "lengths.npy", *OPTIONS, "--json"))
    keys = with_curve.keys() | json.loads(run(*packed)).keys() | compared.keys()
    assert keys | compared["plans"][0].keys() <= documented
    attributes = {
        Report: with_curve["report"],
        BucketReport: with_curve["report"]["buckets"][0],
        PlanCurve: with_curve["curve"],
        Comparison: compared,
    }
    for kind, numbers in attributes.items():
        undocumented = {x for x in numbers if f" {x}: " not in str(kind.__doc__)}
        assert all(x in documented or hasattr(kind, x) for x in undocumented)


def test_every_option_reaches_the_planner(files):
    options = {
        "max_tokens": 2048,
        "num_buckets": 3,
        "batch_size_multiple": 4,
        "seq_len_multiple": 16,
        "max_seq_len": 256,
        "boundaries": "geometric",
        "overlong": "truncate",
    }
    words = [
        word
        for name, value in options.items()
        for word in ("--" + name.replace("_", "-"), value)
    ]
    run("plan", "lengths.npy", *words, "-o", "plan.json")
    made = BucketPlan.from_json((files / "plan.json").read_text())
    assert made == plan_buckets(LENGTHS, **options)
    run(
        *("plan", "lengths.npy", "--max-tokens", 1024),
        *("--boundaries", "128,512", "-o", "plan.json"),
    )
    made = BucketPlan.from_json((files / "plan.json").read_text())
    assert made.boundaries.tolist() == [128, 512]


def test_report_reads_a_plan_and_other_lengths(files):
    run("plan", "lengths.npy", *OPTIONS, "-o", "plan.json")
    others = run("report", "plan.json", "two.npz", "--column", "others", "--json")
    epoch = report(PLAN, LENGTHS[:10])
    assert json.loads(others)["report"] == json.loads(epoch.to_json())


def test_report_passes_on_remainder_accumulate_and_group(files):
    run("plan", "lengths.npy", *OPTIONS, "-o", "plan.json")
    options = {"remainder": "drop", "accumulate": 2, "group": "mixed"}
    words = [word for name in options for word in (f"--{name}", str(options[name]))]
    result = run("report", "plan.json", "lengths.npy", *words, "--json")
    epoch = report(PLAN, LENGTHS, **options)
    assert epoch != report(PLAN, LENGTHS)
    assert json.loads(result)["report"] == json.loads(epoch.to_json())


def test_pictures_are_drawn(files):
    run("plan", "lengths.npy", *OPTIONS, "--plot", "plan.png", "-o", "plan.json")
    run("report", "plan.json", "lengths.npy", "--plot", "report.png")
    for name in ("plan.png", "report.png"):
        image = matplotlib.image.imread(files / name)
        assert image.shape[0] > 400 and image.std() > 0.1


def test_the_command_runs_as_a_script_and_as_a_module(files):
    for command in ([sys.executable, "-m", "jaxbucket"], ["jaxbucket"]):
        if command == ["jaxbucket"]:
            command = [str(pathlib.Path(sys.executable).parent / "jaxbucket")]
        done = subprocess.run(
            [*command, "plan", "lengths.npy", "--max-tokens", "500"],
            capture_output=True,
            text=True,
            check=True,
        )
        assert "steps per epoch" in done.stdout


def test_planning_does_not_import_jax(files):
    code = (
        "import sys; from jaxbucket.cli import main; "
        "main(['plan', 'lengths.npy', '--max-tokens', '500'], standalone_mode=False); "
        "print(sorted({'jax', 'grain', 'flax', 'matplotlib', 'pyarrow'} & "
        "sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        (b"", "x.npy", "`x.npy` is empty. Pass a file with at"),
        (b"", "x.npz", "`x.npz` is empty. Pass a file with at"),
        (b"\x93NUMPY", "x.npy", "is not a complete numpy file"),
        (b"3\n4.5\n", "x.txt", "`x.txt`, line 2: '4.5' is not an integer"),
        (b"three\n", "x.txt", "`x.txt`, line 1: 'three' is not an integer"),
        (b"\xff\xfe", "x.txt", "`x.txt`, line 1 is not UTF-8 text"),
        (b"", "x.txt", "`x.txt` is empty. Pass a file with at"),
        (b"3\n0\n", "x.txt", "`x.txt`, line 2: the length is 0, but it must be from"),
        (b"9\n500\n", "x.txt", "`--max-tokens 64` holds 0 rows of `seq_len=500`"),
    ],
)
def test_invalid_lengths_are_refused(files, content, name, message):
    (files / name).write_bytes(content)
    assert message in refused("plan", name, "--max-tokens", 64)


def test_every_truncated_numpy_file_is_refused(files):
    whole = {name: (files / name).read_bytes() for name in ("lengths.npy", "one.npz")}
    for name, data in whole.items():
        for size in range(1, len(data), 97):
            (files / name).write_bytes(data[:size])
            assert "is not a complete numpy file" in refused(
                "plan", name, "--max-tokens", 4096
            )


def test_a_missing_column_lists_the_columns_of_the_file(files):
    message = "has columns ['lengths', 'others']. Choose one with `--column`."
    assert message in refused("plan", "two.npz", "--max-tokens", 500)
    message = (
        "there is no column 'length' among ['lengths', 'others']. Pass `--column l"
    )
    output = refused("plan", "two.npz", "--max-tokens", 500, "--column", "length")
    assert message in output


def test_a_column_of_a_text_file_is_refused(files):
    output = refused("plan", "lengths.txt", "--max-tokens", 500, "--column", "x")
    assert "has no columns. Remove `--column x`" in output


def test_a_column_of_an_npy_file_is_refused(files):
    output = refused("plan", "lengths.npy", "--max-tokens", 500, "--column", "x")
    assert "has one array without a name" in output


def test_npy_and_npz_files_may_have_swapped_suffixes(files):
    (files / "swapped.npy").write_bytes((files / "one.npz").read_bytes())
    (files / "swapped.npz").write_bytes((files / "lengths.npy").read_bytes())
    for name in ("swapped.npy", "swapped.npz"):
        run("plan", name, *OPTIONS, "-o", "plan.json")
        assert BucketPlan.from_json((files / "plan.json").read_text()) == PLAN


def test_an_output_in_a_missing_folder_is_refused(files):
    for option in ("-o", "--plot"):
        output = refused("plan", "lengths.npy", *OPTIONS, option, "nowhere/x.png")
        assert "nowhere/x.png`: the folder nowhere does not exist. Create it" in output


def test_inputs_are_not_overwritten(files):
    before = (files / "lengths.npy").read_bytes()
    for options in (
        ("-o", "lengths.npy"),
        ("-o", files / "lengths.npy"),
        ("--plot", "lengths.npy"),
        ("-o", "same.png", "--plot", "same.png"),
    ):
        output = refused("plan", "lengths.npy", *OPTIONS, *options)
        assert "would overwrite a file that this command reads or" in output
    assert (files / "lengths.npy").read_bytes() == before


def test_a_file_that_is_not_a_plan_is_refused(files):
    (files / "cut.json").write_text(PLAN.to_json()[:-5])
    assert "The plan is not valid JSON" in refused("report", "cut.json", "lengths.npy")
    (files / "other.json").write_text("{}")
    assert "jaxbucket.BucketPlan" in refused("report", "other.json", "lengths.npy")


def test_swapped_arguments_of_report_are_named(files):
    (files / "plan.json").write_text(PLAN.to_json())
    for name in ("lengths.npy", "lengths.txt"):
        message = (
            f"`{name}` is not a plan. The plan comes first: `jaxbucket report "
            f"plan.json {name}`."
        )
        assert message in refused("report", name, "plan.json")
    assert "`lengths.npy` is not a plan. Pass a file that `jaxbucket plan -o` w" in (
        refused("report", "lengths.npy", "lengths.npy")
    )


def test_plan_reports_the_bucket_that_leaves_most_of_its_budget_unused(files):
    np.save("long.npy", np.r_[np.full(64, 100), np.full(64, 3000)])
    limits = ("--batch-size-multiple", 8, "--seq-len-multiple", 16)
    command = ("plan", "long.npy", *limits, "--unit", "frames", "--max-tokens")
    sentence = (
        "[8, 3008] uses 50% of `--max-tokens 48000`, because B is a multiple of 8. "
        "48,128 frames would fit 16 rows."
    )
    assert sentence in " ".join(run(*command, 48_000).split())
    unused = json.loads(run(*command, 48_000, "--json"))["unused_budget"]
    assert unused == {
        "bucket": [8, 3008],
        "max_tokens": 48_000,
        "used": 24_064 / 48_000,
        "rows": 16,
        "enough_tokens": 48_128,
        "note": sentence,
    }
    budgets = ("6000,48000", "--boundaries", "112,3008")
    assert "[8, 3008] uses 50% of its budget of 48,000 frames, " in run(
        *command, *budgets
    )
    # The budget is used, or the user's limit or the number of examples is the reason.
    for options in ((48_128,), (48_000, "--max-batch-size", 8), (800_000,)):
        assert json.loads(run(*command, *options, "--json"))["unused_budget"] is None


def test_a_picture_with_an_unknown_suffix_is_refused(files):
    output = refused("plan", "lengths.npy", *OPTIONS, "--plot", "plan.docx")
    assert "`--plot plan.docx`" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.npy", "--max-tokens", 8], "'nowhere.npy' does not exist"),
        (
            ["lengths.npy", "--max-tokens", 8, "--overlong", "cut"],
            "'cut' is not one of",
        ),
    ],
)
def test_invalid_arguments_are_refused(files, arguments, message):
    assert message in run("plan", *arguments, code=2)


def budget(seq_len: int) -> int:
    return 2048 if seq_len <= 256 else 4096


def steps(batch_size: int, seq_len: int) -> float:
    return 1.0


def zero(batch_size: int, seq_len: int) -> float:
    return 0.0


def planned(*options: object) -> BucketPlan:
    run("plan", "lengths.npy", *options, "-o", "made.json")
    return BucketPlan.from_json(pathlib.Path("made.json").read_text())


@pytest.fixture
def functions(files, monkeypatch) -> str:
    """The name of an importable module with the functions above."""
    (files / "mine.py").write_text(
        f"from {__name__} import budget, steps, zero\n"
        "def three(candidates, num_buckets):\n"
        "    return [9, 99, len(candidates) - 1]\n"
    )
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    return "mine"


def test_options_for_shapes_give_the_same_plan_as_python(files, functions):
    common = ("--max-tokens", 4096, "--num-buckets", 4)
    options = {"max_tokens": 4096, "num_buckets": 4}
    for rule in RULES:
        made = planned(*common, "--boundaries", rule)
        assert made == plan_buckets(LENGTHS, boundaries=rule, **options)
    limits = {"min_batch_size": 2, "max_batch_size": 64, "batch_size_multiple": 2}
    arguments = [x for k, v in limits.items() for x in (f"--{k.replace('_', '-')}", v)]
    assert planned(*common, *arguments) == plan_buckets(LENGTHS, **options, **limits)
    made = planned("--max-tokens", f"{functions}:budget", "--num-buckets", 4)
    assert made == plan_buckets(LENGTHS, max_tokens=budget, num_buckets=4)
    made = planned("--max-tokens", "2048,4096", "--boundaries", "100,512")
    ends = [100, 512]
    assert made == plan_buckets(LENGTHS, max_tokens=[2048, 4096], boundaries=ends)
    assert planned("--max-tokens", "4_096", "--num-buckets", 4) == plan_buckets(
        LENGTHS, max_tokens=4096, num_buckets=4
    )
    made = planned("--shapes", "8x512, 40X100")
    assert made == BucketPlan.from_shapes([(40, 100), (8, 512)])
    made = planned(*common, "--boundaries", f"{functions}:three")
    assert made.boundaries.tolist() == [10, 100, 499]


def test_options_for_costs_give_the_same_plan_as_python(files, functions):
    common = ("--max-tokens", 4096, "--num-buckets", 3)
    measured = {"[8, 512]": 0.5, "[32, 128]": 0.2, "[4, 128]": 0.03}
    pathlib.Path("times.json").write_text(json.dumps(measured))
    shapes = {Bucket(8, 512): 0.5, Bucket(32, 128): 0.2, Bucket(4, 128): 0.03}
    for arguments, cost in (
        (("--per-second", 1e5), TokenCost(1e5)),
        (("--width", 64, "--depth", 2), TransformerCost(64, 2)),
        (
            ("--width", 64, "--depth", 2, "--vocab-size", 9, "--per-second", 1e9),
            TransformerCost(64, 2, 9, 1e9),
        ),
        (("--step-times", "times.json"), StepTime.fit(shapes)),
        (("--cost-fn", f"{functions}:steps"), steps),
    ):
        made = planned(*common, *arguments)
        expected = plan_buckets(LENGTHS, max_tokens=4096, num_buckets=3, cost_fn=cost)
        assert made == expected
        output = run("plan", "lengths.npy", *common, *arguments)
        assert ("Predicted epoch: " in output) == (made.cost_unit != "tokens")


AUTO = ("--max-tokens", 4096, "--num-buckets", "auto", "--per-second", 1e5)


def test_num_buckets_auto_prints_the_curve_and_the_reason(files):
    options = (*AUTO, "--compile-seconds", 0.2, "--num-epochs", 3)
    output = run("plan", "lengths.npy", *options, "-o", "made.json", "--plot", "a.png")
    made = BucketPlan.from_json(pathlib.Path("made.json").read_text())
    limits = Limits(max_tokens=4096, cost_fn=TokenCost(1e5))
    curve = plan_curve(LENGTHS, limits, compile_seconds=0.2, num_epochs=3)
    assert made == curve.chosen.plan
    assert made == plan_buckets(
        LENGTHS,
        max_tokens=4096,
        num_buckets="auto",
        cost_fn=TokenCost(1e5),
        compile_seconds=0.2,
        num_epochs=3,
    )
    assert f"With {len(made)} shapes, " in output
    assert "of `--max-tokens" not in output
    assert curve.reason in " ".join(output.split())
    numbers = json.loads(run("plan", "lengths.npy", *options, "--json"))
    assert numbers["curve"] == json.loads(curve.to_json())
    assert matplotlib.image.imread("a.png").shape[2] == 4


def test_compare_has_the_numbers_of_compare_plans(files):
    run("plan", "lengths.npy", *OPTIONS, "-o", "mine.json")
    options = ("--max-tokens", 4096, "--num-buckets", 4, "--per-second", 1e5)
    others = ("--plan", "mine.json", "--boundaries", "100,499", "--shapes", "8x499")
    others = (*others, "--pack", "never")
    output = run("compare", "lengths.npy", *options, *others, "--plot", "c.png")
    assert max(map(len, output.splitlines())) <= 100
    result = json.loads(run("compare", "lengths.npy", *options, *others, "--json"))
    limits = Limits(max_tokens=4096, cost_fn=TokenCost(1e5))
    custom_plans = {
        "mine.json": PLAN,
        "given boundaries": plan_within(LENGTHS, limits, 1, [100, 499]),
        "given shapes": BucketPlan.from_shapes([(8, 499)], max_tokens=4096),
    }
    expected = compare_plans(LENGTHS, limits, num_buckets=4, others=custom_plans)
    assert result == json.loads(expected.to_json())
    for name in (
        "optimal",
        "equal tokens",
        "one shape",
        *custom_plans,
    ):
        assert name in output
    assert " ".join(expected.summary.split()) in " ".join(output.split())
    assert matplotlib.image.imread("c.png").shape[2] == 4
    remainder = ("--pack", "never", "--remainder", "pad", "--json")
    padded = run("compare", "lengths.npy", *options, *remainder)
    policies = compare_plans(LENGTHS, limits, num_buckets=4, remainder="pad")
    assert json.loads(padded) == json.loads(policies.to_json())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "`--max-tokens` is missing"),
        (("--max-tokens", 0), "`--max-tokens 0` must be a positive integer"),
        (
            ("--max-tokens", "many"),
            "`--max-tokens many` is neither an integer nor a function",
        ),
        (("--max-tokens", "9,8"), "`--max-tokens` has 2 budgets, one for each bucket"),
        (
            ("--max-tokens", "8192,8192", "--boundaries", "512"),
            "`--max-tokens` has 2 budgets for 1 boundaries. Pass one for each",
        ),
        (
            ("--max-tokens", "48,000"),
            "`--max-tokens 48,000` is a list of budgets, 48 and 0. Write 48000 without",
        ),
        (
            ("--max-tokens", "9,8,0", "--boundaries", "99,100,512"),
            "is a list of budgets, 9, 8 and 0. Pass positive numbers.",
        ),
        (("--max-tokens", "48e3"), "`--max-tokens 48e3` is neither an integer nor a"),
        (
            ("--max-tokens", 600, "--seq-len-multiple", 16, "--min-batch-size", 2),
            "`--max-tokens 600` holds 1 row of `seq_len=512` (the longest length, 499, "
            "rounded up to a multiple of 16), fewer than `--min-batch-size 2`. Raise",
        ),
        (("--max-tokens", "m:f"), "`m:f`: "),
        ((*OPTIONS, "--boundaries", "even"), "`--boundaries even`: choose one of"),
        ((*BUDGET, "--boundaries", "512,64"), "`--boundaries` has 64 after 512."),
        ((*BUDGET, "--boundaries", "64,64,512"), "`--boundaries` has 64 after 64."),
        (
            ("--shapes", "8*512"),
            "`--shapes 8*512` is not a list of B x T. Pass shapes such as 32x",
        ),
        (("--shapes", "8x512x2"), "`--shapes 8x512x2` is not a list of B x T"),
        (("--shapes", "8x512,16x512"), "by strictly increasing `seq_len`"),
        (("--shapes", "8x100"), "is beyond the last bucket, `seq_len=100`"),
        (
            ("--shapes", "8x512", "--max-tokens", 1024),
            "Bucket [8, 512] holds 4096 tokens, more than `--max-tokens 1024`",
        ),
        ((*OPTIONS, "--num-buckets", "few"), "`--num-buckets few` is not a positive"),
        ((*OPTIONS, "--num-buckets", "0"), "`--num-buckets 0` is not a positive int"),
        (AUTO, "`--compile-seconds` is missing. Pass the time to compile one shape"),
        (
            (*OPTIONS, "--num-buckets", "auto", "--compile-seconds", 3),
            "counts tokens, but compile time is measured in seconds",
        ),
        (
            (*AUTO, "--compile-seconds", -1),
            "`--compile-seconds -1.0` must be a pos",
        ),
        (
            (*AUTO, "--compile-seconds", 1, "--num-epochs", "nan"),
            "`--num-epochs nan` must be a positive, finite number",
        ),
        (
            (*AUTO, "--boundaries", "quantile"),
            "`--boundaries` and `--num-buckets` both define the shapes. Remove",
        ),
        (
            ("--shapes", "8x512", "--boundaries", "512"),
            "`--shapes` and `--boundaries` both define the shapes. Remove one of",
        ),
        (
            (*OPTIONS, "--boundaries", "100,512"),
            "`--boundaries` and `--num-buckets` both define the shapes. Remove",
        ),
        (
            ("--shapes", "8x512", "--max-batch-size", 4),
            "`--max-batch-size` has no effect with `--shapes`. Remove it.",
        ),
        ((*OPTIONS, "--step-times", "twice.json"), "a shape is repeated"),
        (
            (*OPTIONS, "--compile-seconds", 3),
            "`--compile-seconds` requires `--num-buckets auto`. Add it, or remove",
        ),
        (
            ("--shapes", "8x512", "--max-tokens", "4096,4096"),
            "`--shapes` already defines B, so `--max-tokens` must be a single",
        ),
        ((*OPTIONS, "--cost-fn", "math:sqrt"), "raised TypeError: "),
        ((*OPTIONS, "--boundaries", "math:sqrt"), "raised TypeError: "),
        (
            (*OPTIONS, "--step-times", "no.json", "-o", "no.json"),
            "`--output no.json` would overwrite a file that this command reads",
        ),
        (
            (*OPTIONS, "--plot", "plan.xyz"),
            "`--plot plan.xyz` has an unknown suffix. Use",
        ),
        ((*OPTIONS, "--width", 8), "requires `--width` and `--depth`"),
        (
            (*OPTIONS, "--width", 8, "--depth", 8, "--cost-fn", "mine:steps"),
            "`--width` and `--cost-fn` each define the cost of a step. Pass only",
        ),
        (
            (*OPTIONS, "--cost-fn", "mine:steps", "--per-second", 3),
            "`--per-second` has no effect with `--cost-fn`. Remove it.",
        ),
        ((*OPTIONS, "--cost-fn", "mine:zero"), "=0.0` must be a positive"),
        ((*OPTIONS, "--cost-fn", "steps"), "`--cost-fn steps` is not a function. Pass"),
        ((*OPTIONS, "--step-times", "lengths.txt"), "is not a JSON object of shapes"),
        ((*OPTIONS, "--step-times", "no.json"), "`seconds[[8, 512]]=-1` must be a pos"),
        ((*OPTIONS, "--step-times", "none.json"), "`seconds` is empty"),
        (
            ("--max-tokens", 4096, "--min-batch-size", 9),
            "`--max-tokens 4096` holds 8 rows of `seq_len=499`, fewer than "
            "`--min-batch-size 9`. Raise `--max-tokens` to 4491",
        ),
        (
            (*OPTIONS, "--batch-size-multiple", 4, "--max-batch-size", 3),
            "`--max-batch-size 3` is less than `--batch-size-multiple 4`",
        ),
    ],
)
def test_contradicting_or_invalid_options_are_refused(
    files, functions, options, message
):
    pathlib.Path("no.json").write_text('{"[8, 512]": -1}')
    pathlib.Path("none.json").write_text("{}")
    pathlib.Path("twice.json").write_text('{"[8, 512]": 1, "[8,512]": 2}')
    assert message in refused("plan", "lengths.npy", *options)


def test_compare_refuses_invalid_plans_and_options(files):
    (files / "other.json").write_text("[]")
    options = ("lengths.npy", *OPTIONS[:4])
    assert "jaxbucket.BucketPlan" in refused(
        "compare", *options, "--plan", "other.json"
    )
    output = refused("compare", *options, "--boundaries", "quantile")
    assert (
        "`--boundaries quantile` is not a list of lengths. Pass values of T such"
        in output
    )
    assert "`--max-tokens` is missing" in refused("compare", "lengths.npy")
    output = refused("compare", *options, "--remainder", "drop")
    assert "`--remainder drop` leaves out different examples" in output
    (files / "optimal").write_text(PLAN.to_json())
    output = refused("compare", *options, "--plan", "optimal")
    assert "`others` has a plan 'optimal', which is the name of a rule." in output
    output = refused("compare", "two.npz", *OPTIONS[:4], "--column", "words")
    assert "lengths" in output and "others" in output


TEXTS = [f"{'é' * n} and more" for n in range(1, 300)]
BYTES = [len(text.encode()) for text in TEXTS]


@pytest.fixture
def corpus(files: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A current folder with texts in files and a module that returns them."""
    rows = [json.dumps({"text": text, "id": 1}) for text in TEXTS]
    pathlib.Path("corpus.jsonl").write_text("\n".join(rows))
    pathlib.Path("texts.txt").write_text("\n".join(TEXTS), encoding="utf-8")
    code = (
        f"TEXTS = {TEXTS}\ndef texts(): return TEXTS\ndef size(row): return row['id']\n"
    )
    pathlib.Path(f"own_{files.name}.py").write_text(code)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return files


def test_measured_lengths_are_written_as_int32(corpus):
    column = ("--column", "text", "--unit", "bytes")
    own = f"own_{corpus.name}"
    np.save("wide.npy", LENGTHS.astype(np.int64))
    for arguments, lengths in (
        (("corpus.jsonl", *column), BYTES),
        (("texts.txt", "--unit", "bytes"), BYTES),
        (("texts.txt", "--unit", "characters"), [len(text) for text in TEXTS]),
        (("texts.txt", "--unit", "words"), [3] * len(TEXTS)),
        (("texts.txt", "--length-fn", "builtins:len"), [len(text) for text in TEXTS]),
        (("corpus.jsonl", "--length-fn", f"{own}:size"), [1] * len(TEXTS)),
        ((f"{own}:texts", "--unit", "bytes"), BYTES),
        ((f"{own}:texts", "--unit", "bytes", "--num-workers", 2), BYTES),
        (("lengths.npy",), LENGTHS),
        (("wide.npy",), LENGTHS),
        (("two.npz", "--column", "others"), LENGTHS[:10]),
    ):
        run("measure", *arguments, "-o", "measured.npy")
        written = np.load("measured.npy")
        assert written.dtype == np.int32
        assert written.tolist() == list(lengths)
    run("measure", "texts.txt", "--unit", "bytes", "-o", "measured.npy")
    run("plan", "measured.npy", *OPTIONS, "-o", "plan.json")
    made = BucketPlan.from_json(pathlib.Path("plan.json").read_text())
    assert made == plan_buckets(
        BYTES, max_tokens=4096, num_buckets=4, seq_len_multiple=32
    )


def test_plan_and_report_read_the_files_of_measure(corpus):
    run("plan", "corpus.jsonl", "--column", "id", "--max-tokens", 8, "-o", "plan.json")
    result = run("report", "plan.json", "corpus.jsonl", "--column", "id", "--json")
    assert json.loads(result)["report"]["examples"] == len(TEXTS)
    output = refused("plan", "texts.txt", "--max-tokens", 500)
    assert "Measure texts with `jaxbucket measure --unit`" in output


def test_the_summary_of_lengths_has_every_number(corpus):
    arguments = ("measure", "texts.txt", "--unit", "bytes")
    result = json.loads(run(*arguments, "--json"))
    assert result == {
        "examples": len(BYTES),
        "unit": "bytes",
        "total": sum(BYTES),
        "min": 11,
        "median": 309,
        "mean": sum(BYTES) / len(BYTES),
        "p90": 549,
        "p99": 603,
        "max": 607,
        "distinct": 299,
    }
    table = run(*arguments)
    assert "in bytes" in table
    assert all(f"{n:,}" in table for n in (299, sum(BYTES), 11, 309, 549, 603, 607))
    assert max(map(len, table.splitlines())) <= 100


@pytest.mark.parametrize("name", ["h.png", "h.pdf", "h.svg"])
def test_a_histogram_is_drawn(corpus, name):
    run("measure", "texts.txt", "--unit", "bytes", "--plot", name)
    assert (corpus / name).stat().st_size > 2000
    if name == "h.png":
        image = matplotlib.image.imread(corpus / name)
        assert image.shape[0] > 400 and image.std() > 0.1
    assert not list(corpus.glob("*.partial"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.txt"], "`nowhere.txt` does not exist. Pass a file, or a function"),
        (["."], "`.` is a folder. Pass the path of a file"),
        (["nowhere:f"], "`nowhere:f`: nowhere cannot be imported: ModuleNotFoundError"),
        (["json:nothing"], "`json:nothing`: json has no 'nothing'. Choose one"),
        (["texts.txt"], "is not an integer. Measure texts with"),
        (["corpus.jsonl"], "`corpus.jsonl` has columns ['text', 'id']. Choose one wi"),
        (
            ["corpus.jsonl", "--column", "x"],
            "there is no column 'x' among ['text', 'id']. Choose one with",
        ),
        (["texts.txt", "--length-fn", "len"], "`len` must be `module:function`"),
        (
            ["texts.txt", "--unit", "bytes", "--length-fn", "builtins:len"],
            "`--unit bytes` and `--length-fn` both define",
        ),
        (
            ["texts.txt", "--num-workers", 2],
            "`--num-workers 2` has no effect on a file",
        ),
        (["lengths.npy", "-o", "lengths.npy"], "would overwrite a file that"),
        (["lengths.npy", "-o", "./x/../lengths.npy"], "would overwrite a file"),
        (["lengths.npy", "-o", "x.txt"], "lengths are written as .npy. Name the file"),
        (
            ["lengths.npy", "-o", "nowhere/x.npy"],
            "the folder nowhere does not exist. Cre",
        ),
        (["lengths.npy", "-o", "lengths.txt/x.npy"], "the folder lengths.txt does"),
        (["lengths.npy", "-o", "."], "`--output .` is a folder. Choose a file"),
        (["lengths.npy", "--plot", "x.docx"], "`--plot x.docx` has an unknown suffix"),
        (["lengths.npy", "--plot", "x"], "`--plot x` has an unknown suffix"),
        (["lengths.npy", "-o", "/proc/x.npy"], "`--output /proc/x.npy` cannot be writ"),
    ],
)
def test_measure_refuses_invalid_sources_and_options(corpus, arguments, message):
    before = (corpus / "lengths.npy").read_bytes()
    assert message in refused("measure", *arguments)
    assert (corpus / "lengths.npy").read_bytes() == before


@pytest.mark.parametrize("option", [["--unit", "tokens"], ["--num-workers", "-1"]])
def test_measure_refuses_unknown_units_and_negative_workers(corpus, option):
    run("measure", "texts.txt", *option, code=2)


def test_outputs_are_checked_before_measuring(corpus):
    slow = "raise AssertionError('measured')"
    (corpus / f"slow_{corpus.name}.py").write_text(slow)
    for option in (("-o", "nowhere/x.npy"), ("-o", "x.txt"), ("--plot", "x.docx")):
        output = refused("measure", f"slow_{corpus.name}:f", *option)
        assert "AssertionError" not in output and option[1] in output


KILLED = """
import os, signal, pathlib
from jaxbucket.cli.outputs import atomic_write
with atomic_write("--output", pathlib.Path("lengths.npy")) as file:
    file.write(b"half")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_command_leaves_the_old_file(files):
    before = (files / "lengths.npy").read_bytes()
    done = subprocess.run([sys.executable, "-c", KILLED], check=False)
    assert done.returncode == -9
    assert (files / "lengths.npy").read_bytes() == before


def test_a_failed_write_leaves_no_file(files, monkeypatch):
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("numpy.save", full)
    output = refused("measure", "lengths.npy", "-o", "new.npy")
    assert "new.npy` cannot be written: No space left on device. Choose a" in output
    assert not list(files.glob("*new*")) + list(files.glob(".*"))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
def test_an_output_may_be_a_named_pipe(files):
    os.mkfifo("pipe.json")
    with subprocess.Popen(["cat", "pipe.json"], stdout=subprocess.PIPE) as reader:
        run("plan", "lengths.npy", *OPTIONS, "-o", "pipe.json")
        read, _ = reader.communicate(timeout=20)
    assert BucketPlan.from_json(read.decode()) == PLAN
    assert (files / "pipe.json").is_fifo()


def test_files_with_similar_names_are_left_alone(files):
    # Names that a command might use for its incomplete output.
    for name in ("plan.json.partial", ".plan.json.partial"):
        (files / name).write_text("1\n2\n")
    run("plan", "plan.json.partial", "--max-tokens", 100, "-o", "plan.json")
    for name in ("plan.json.partial", ".plan.json.partial"):
        assert (files / name).read_text() == "1\n2\n"


def test_a_replaced_output_keeps_its_permissions(files):
    (files / "plan.json").write_text("")
    (files / "plan.json").chmod(0o600)
    run("plan", "lengths.npy", *OPTIONS, "-o", "plan.json")
    assert (files / "plan.json").stat().st_mode & 0o777 == 0o600


def test_a_plan_that_drops_examples_comes_last(files):
    options = ("--max-seq-len", 64, "--overlong", "drop")
    run("plan", "lengths.npy", *BUDGET, *options, "-o", "[red]short.json")
    compared = ("compare", "lengths.npy", *BUDGET, "--plan", "[red]short.json")
    table = run(*compared)
    # The name is not interpreted as markup.
    last = [line for line in table.splitlines() if "[red]short.json" in line][0]
    assert last.split()[-1] == "-"
    plans = json.loads(run(*compared, "--json"))["plans"]
    assert plans[0]["name"] == "packed" and plans[-1]["name"] == "[red]short.json"
    kept = int(LENGTHS[LENGTHS <= 64].sum())
    recorded = (
        f"[red]short.json trains on {kept:,} tokens instead of {int(LENGTHS.sum()):,}, "
        "so its cost is not comparable."
    )
    assert recorded in " ".join(table.split())


def test_long_names_leave_room_for_the_numbers(files):
    name = "a_plan_of_a_very_long_name_that_nobody_wants_to_read.json"
    run("plan", "lengths.npy", *OPTIONS, "-o", name)
    table = run("compare", "lengths.npy", *BUDGET, "--plan", name)
    assert max(map(len, table.splitlines())) <= 100
    (line,) = [line for line in table.splitlines() if line.strip().startswith("a_plan")]
    assert re.fullmatch(r"\d\.\d\dx", line.split()[-1])


@pytest.mark.parametrize("option", ["--boundaries", "--num-buckets"])
def test_an_empty_option_is_refused(files, option):
    result = CliRunner().invoke(
        main, ["plan", "lengths.npy", *map(str, BUDGET), option, ""]
    )
    assert result.exit_code
    assert option[2:5] in result.output


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "is not a JSON object of shapes and seconds"),
        ('{"[8]": 1}', "each shape must be two integers."),
        ('{"[8, true]": 1}', "each shape must be two integers."),
        ('{"[8, 512]": 0.1, "[8, 512]": 5}', "a shape is repeated."),
        ('{"[8, 512]": 0.1, "[8,512]": 5}', "a shape is repeated."),
        ('{"[8, 512]": 1e-310}', "which is too small."),
        ('{"[8, 512]": "x"}', "`seconds[[8, 512]]='x'` must be a positive"),
    ],
)
def test_invalid_step_times_are_refused(files, text, message):
    (files / "times.json").write_text(text)
    recorded = refused("plan", "lengths.npy", *BUDGET, "--step-times", "times.json")
    assert message in recorded


def test_forced_colors_print_no_progress_bar_to_a_file(files, monkeypatch):
    environment = os.environ | {"FORCE_COLOR": "1", "COLUMNS": "60"}
    command = [sys.executable, "-m", "jaxbucket", "compare", "lengths.npy"]
    done = subprocess.run(
        [*command, *map(str, BUDGET)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert not done.stderr
    assert "equal tokens" in done.stdout and "…" not in done.stdout


def measured_with_errors_to(stderr: int) -> str:
    command = [sys.executable, "-m", "jaxbucket", "measure", "lengths.txt", "--json"]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=stderr, text=True, check=True
    )
    return done.stdout


def test_a_progress_bar_is_shown_only_on_a_terminal(files):
    ours, theirs = pty.openpty()
    on_terminal = measured_with_errors_to(theirs)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # Linux raises it at the end.
        while read := os.read(ours, 4096):
            shown += read
    os.close(ours)
    assert b"Measuring lengths" in shown and b"%" in shown
    with open("errors", "wb") as file:
        assert measured_with_errors_to(file.fileno()) == on_terminal
    assert (files / "errors").read_bytes() == b""
    assert json.loads(on_terminal)["examples"] == len(LENGTHS)


def test_a_missing_matplotlib_names_the_command_to_install_it(files, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    output = refused("measure", "lengths.npy", "--plot", "x.png")
    assert "`--plot` needs matplotlib: pip install 'jaxbucket[plots]'" in output


# Invalid input of every kind ends in one sentence, never in a traceback.


def ends_well(*args: object) -> str:
    """Returns the output of a command that succeeds or ends in one sentence."""
    result = CliRunner().invoke(main, [str(arg) for arg in args])
    assert isinstance(result.exception, SystemExit | None), (args, result.exception)
    assert "Traceback" not in result.output
    if result.exit_code:
        *usage, sentence = result.stderr.splitlines()
        assert sentence.startswith("Error: "), (args, result.output)
        assert result.exit_code == (2 if usage else 1)
    return result.output


NONSENSE = ("", "0", "-1", "nan", "9" * 30, "1,²", "nowhere:f")
READS = {
    "measure": ["few.npy"],
    "plan": ["few.npy", *BUDGET],
    "compare": ["few.npy", *BUDGET, "--num-buckets", 2],
    "report": ["plan.json", "few.npy"],
    "precompile": ["--plan", "plan.json", "--recipe", "nowhere:f"],
}


@pytest.mark.parametrize("command", READS)
def test_invalid_option_values_never_print_a_traceback(files, command):
    np.save("few.npy", LENGTHS[:5])
    pathlib.Path("plan.json").write_text(PLAN.to_json())
    for option in main.commands[command].params:
        if isinstance(option, click.Option) and not option.is_flag:
            for value in NONSENSE:
                ends_well(command, *READS[command], max(option.opts, key=len), value)


FOREIGN = {
    "folder.npy": None,
    "binary.npy": bytes(range(256)),
    "binary.npz": bytes(range(256)),
    "binary.jsonl": bytes(range(256)),
    "binary.parquet": bytes(range(256)),
    "binary.array_record": bytes(range(256)) * 300,
    "empty.jsonl.gz": b"",
    "empty.npz": b"PK\x05\x06" + bytes(18),
    "ragged.csv": b"a,b\n1,2\n3\n",
    "null.csv": b"b\n1\0\n",
    "huge.jsonl": b"1" * 5000,
    "nan.jsonl": b"NaN",
    "deep.jsonl": b"[" * 100_000,
    "surrogate.jsonl": b'"\\ud800"',
    "mixed.jsonl": b'{"a": 1}\n[1]\n',
    "huge.json": b'{"[8, 512]": ' + b"1" * 5000 + b"}",
}


@pytest.mark.parametrize("name", FOREIGN)
def test_invalid_files_never_print_a_traceback(files, name):
    content = FOREIGN[name]
    if content is None:
        pathlib.Path(name).mkdir()
    else:
        pathlib.Path(name).write_bytes(content)
    pathlib.Path("plan.json").write_text(PLAN.to_json())
    for output in (
        ends_well("measure", name),
        ends_well("measure", name, "--unit", "bytes", "--column", "a"),
        ends_well("plan", name, *BUDGET),
        ends_well("report", "plan.json", name),
        ends_well("report", name, "lengths.npy"),
        ends_well("compare", "lengths.npy", *OPTIONS[:4], "--plan", name),
        ends_well("plan", "lengths.npy", *BUDGET, "--step-times", name),
        ends_well("precompile", "--plan", name, "--recipe", "nowhere:f"),
    ):
        assert output.startswith(("Error: ", "Usage: "))
        assert "pickle" not in output


def test_a_link_to_itself_is_refused(files):
    pathlib.Path("loop").symlink_to("loop")
    assert "`loop` does not exist. Pass a file" in refused("measure", "loop")
    refused("measure", "lengths.npy", "-o", "loop/x.npy")


@pytest.mark.parametrize("name", ["x.npy", "x.npz"])
def test_arrays_of_python_objects_are_refused(files, name):
    objects = np.array([[1], [2, 3]], dtype=object)
    (np.save if name == "x.npy" else np.savez)(name, objects)
    output = refused("measure", name)
    assert f"`{name}` contains Python objects instead of numbers. Save" in output
    assert "pickle" not in output


def test_compare_refuses_invalid_boundaries(files):
    output = refused("compare", "lengths.npy", *OPTIONS[:4], "--boundaries", "0,512")
    assert "`--boundaries` has 0 after 0. Pass increasing multiples" in output


def test_too_many_chunks_for_the_memory_end_in_a_message(files):
    np.save("long.npy", np.full(10_000, 2**31 - 1, np.int32))
    split = ("--max-tokens", 64, "--max-seq-len", 1, "--overlong", "split")
    assert f"{10_000 * (2**31 - 1):,} chunks" in run("plan", "long.npy", *split)
    output = refused("plan", "long.npy", *split, "--plot", "x.png")
    assert "whose lengths need 80000.0 GiB: more memory than this machine" in output


SIZES = """
class Source:
    def __init__(self, size):
        self.size = size

    def __len__(self):
        if isinstance(self.size, Exception):
            raise self.size
        return self.size

    def __getitem__(self, index):
        return {"x": [1, 2]}

class Odd:
    def __getattr__(self, name):
        raise RuntimeError(name)

class Ending(Source):
    def __getitem__(self, index):
        raise SystemExit(4)

def huge(): return Source(10**19)
def much(): return Source(10**18)
def negative(): return Source(-1)
def broken(): return Source(2.5)
def none(): return Source(None)
def lost(): return Source(KeyError("size"))
def empty(): return Source(0)
def kind(): return Source
def odd(): return Odd()
def ending(): return Ending(3)
"""


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("huge", "`len(source)` raised OverflowError: cannot fit 'int' into an index"),
        ("much", "MemoryError: Unable to allocate"),
        ("negative", "`len(source)` raised ValueError: __len__() should return >= 0"),
        ("broken", "`len(source)` raised TypeError: 'float' object cannot be inter"),
        ("none", "`len(source)` raised TypeError: 'NoneType' object cannot be inter"),
        (
            "lost",
            "`len(source)` raised KeyError: 'size'. Pass a source whose `__len__`",
        ),
        ("empty", "`source` is empty. Pass a source with at least"),
        ("kind", "returned <class 'sizes.Source'>. Return a random-access source"),
        ("odd", "Return a random-access source, an"),
        ("ending", "SystemExit: 4"),
    ],
)
def test_sources_without_a_valid_length_are_refused(
    files, monkeypatch, function, message
):
    (files / "sizes.py").write_text(SIZES)
    monkeypatch.setattr(sys, "path", [str(files), *sys.path])
    monkeypatch.delitem(sys.modules, "sizes", raising=False)
    output = refused("measure", f"sizes:{function}")
    assert f"`sizes:{function}`: " in output and message in output


def in_terminal(columns: int, *args: str) -> str:
    """Returns what a command prints to a terminal of this many columns."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {**os.environ, "TERM": "xterm"}
    environment.pop("COLUMNS", None)
    with subprocess.Popen(
        [sys.executable, "-m", "jaxbucket", *args],
        **{"stdin": follower, "stdout": follower, "stderr": follower},
        env=environment,
    ) as command:
        os.close(follower)
        printed = b""
        # Linux raises an error after the last writer has closed.
        with contextlib.suppress(OSError):
            while part := os.read(leader, 2**16):
                printed += part
    os.close(leader)
    assert command.returncode == 0
    return printed.decode()


def test_no_number_is_truncated_in_a_narrow_terminal(files):
    command = ("compare", "lengths.npy", *map(str, OPTIONS[:4]))
    plans = json.loads(run(*command, "--json"))["plans"]
    printed = in_terminal(20, *command)
    assert "…" not in printed
    for plan in plans:
        assert f"{plan['report']['padded_tokens']:,}" in printed


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_closed_pipe_ends_a_command_silently(files, form):
    reader, writer = os.pipe()
    os.close(reader)
    command = ("plan", "lengths.npy", *map(str, BUDGET), *form)
    done = subprocess.run(
        [sys.executable, "-m", "jaxbucket", *command],
        stdout=writer,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.parametrize(
    "ascii_only",
    [
        {"PYTHONIOENCODING": "ascii"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    ],
)
def test_an_ascii_locale_prints_escaped_characters(files, ascii_only):
    pathlib.Path("é.txt").write_text("é €\n", encoding="utf-8")
    for command, code in ((("measure", "lengths.npy"), 0), (("measure", "é.txt"), 1)):
        done = subprocess.run(
            [sys.executable, "-m", "jaxbucket", *command],
            env={**os.environ, **ascii_only},
            capture_output=True,
            check=False,
        )
        assert done.returncode == code
        assert len(done.stderr.splitlines()) == code
