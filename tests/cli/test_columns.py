"""Several columns in `jaxbucket plan` and `jaxbucket report`."""

import json
import pathlib
import re

import matplotlib.image
import numpy as np
import pytest
from click.testing import CliRunner

import jaxbucket as jb
from jaxbucket.cli import main

RNG = np.random.default_rng(0)
SOURCE = RNG.integers(1, 200, 60).astype(np.int32)
PAIRS = {"source": SOURCE, "target": (SOURCE // 2 + RNG.integers(1, 30, 60))}
TRIPLES = {**PAIRS, "other": RNG.integers(1, 20, 60)}
BOTH = ("--column", "source", "--column", "target")
OPTIONS = (*BOTH, "--max-tokens", 4096, "--num-buckets", 3)
LIMITS = jb.plan.SequenceLimits(sequences=("source", "target"), max_tokens=4096)
JOINT = jb.plan_buckets(PAIRS, max_tokens=4096, num_buckets=3)


@pytest.fixture(autouse=True)
def files(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.chdir(tmp_path)
    np.savez("pairs.npz", **TRIPLES)
    rows = zip(*PAIRS.values(), strict=True)
    lines = ["source,target", *(f"{s},{t}" for s, t in rows)]
    pathlib.Path("pairs.csv").write_text("\n".join(lines) + "\n")
    pathlib.Path("joint.json").write_text(JOINT.to_json())
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


@pytest.mark.parametrize("file", ["pairs.npz", "pairs.csv"])
def test_several_columns_are_planned_at_once(files, file):
    output = run("plan", file, *OPTIONS, "-o", "plan.json")
    plan = jb.BucketPlan.from_json((files / "plan.json").read_text())
    assert plan == JOINT
    epoch = jb.report(plan, PAIRS)
    assert epoch.summary.splitlines()[2] in output
    for number in plan.seq_lens.ravel():
        assert str(number) in output


def test_the_json_has_the_numbers_of_the_joint_plan():
    numbers = json.loads(run("plan", "pairs.npz", *OPTIONS, "--json"))
    assert numbers["report"] == json.loads(jb.report(JOINT, PAIRS).to_json())
    assert numbers["fingerprint"] == JOINT.fingerprint
    assert "unused_budget" not in numbers
    page = (pathlib.Path(__file__).parents[2] / "docs" / "planning.md").read_text()
    assert numbers.keys() <= set(re.findall(r"`(\w+)`", page))


@pytest.mark.parametrize(
    "words, options",
    [
        (
            ["--seq-len-multiple", 16, "--max-seq-len", 256, "--min-batch-size", 8],
            {"seq_len_multiple": 16, "max_seq_len": 256, "min_batch_size": 8},
        ),
        (
            ["--seq-len-multiple", "source=16, target=8", "--max-batch-size", 12]
            + ["--max-seq-len", "target=64,source=128", "--overlong", "drop"],
            {
                "seq_len_multiple": {"source": 16, "target": 8},
                "max_batch_size": 12,
                "max_seq_len": {"source": 128, "target": 64},
                "overlong": "drop",
            },
        ),
        (
            ["--max-tokens", "target=1_000, source=4000", "--max-seq-len", 100]
            + ["--overlong", "source=drop, target=truncate_left"],
            {
                "max_tokens": {"source": 4000, "target": 1000},
                "max_seq_len": 100,
                "overlong": {"source": "drop", "target": "truncate_left"},
            },
        ),
        (
            ["--batch-size-multiple", 4, "--accumulate", 2],
            {"batch_size_multiple": 4, "accumulate": 2},
        ),
    ],
)
def test_every_limit_reaches_the_planner(files, words, options):
    run("plan", "pairs.npz", *OPTIONS, *words, "-o", "plan.json")
    made = jb.BucketPlan.from_json((files / "plan.json").read_text())
    options = {"max_tokens": 4096, "num_buckets": 3, **options}
    assert made == jb.plan_buckets(PAIRS, **options)


@pytest.mark.exhaustive
def test_functions_receive_the_length_of_each_column(files, monkeypatch):
    monkeypatch.syspath_prepend(files)
    (files / "pair_functions.py").write_text(
        "def cost(b, t): return b * (t['source'] + t['target'] ** 2)\n"
        "def budget(t): return 2000 if t['target'] > 50 else 3000\n"
    )
    functions = (
        "--cost-fn",
        "pair_functions:cost",
        "--max-tokens",
        "pair_functions:budget",
    )
    run("plan", "pairs.npz", *BOTH, *functions, "-o", "plan.json")
    plan = jb.BucketPlan.from_json((files / "plan.json").read_text())
    bucket = plan.buckets[-1]
    assert isinstance(bucket.seq_len, jb.base.sizes.Sizes)
    s, t = bucket.seq_len.values()
    assert plan.costs[-1] == bucket.batch_size * (s + t**2)
    assert bucket.num_tokens <= 2000


@pytest.mark.parametrize("columns", [(), BOTH, (*BOTH[2:], *BOTH[:2])])
def test_report_reads_the_columns_of_the_plan(columns):
    options = ("--remainder", "pad", "--json")
    numbers = json.loads(run("report", "joint.json", "pairs.npz", *columns, *options))
    epoch = jb.report(JOINT, PAIRS, remainder="pad")
    assert numbers["report"] == json.loads(epoch.to_json())


@pytest.mark.exhaustive
@pytest.mark.parametrize("columns", [BOTH, (*BOTH, "--column", "other")])
def test_plans_of_several_columns_are_drawn(files, columns):
    words = (*columns, "--max-tokens", 4096, "--num-buckets", 3)
    run("plan", "pairs.npz", *words, "-o", "plan.json", "--plot", "plan.png")
    run("report", "plan.json", "pairs.npz", "--plot", "report.png")
    for name in ("plan.png", "report.png"):
        image = matplotlib.image.imread(files / name)
        assert image.shape[0] > 400 and image.std() > 0.1


@pytest.mark.parametrize(
    "words, message",
    [
        (["--num-buckets", "auto"], "counts tokens, but compile time is measured in "),
        (["--boundaries", "quantile"], "`--boundaries quantile` requires examples wi"),
        (["--boundaries", "quantile"], "Call `jb.plan_buckets` with a list of mappin"),
        (["--shapes", "8x64"], "Call `jb.BucketPlan.from_shapes` with a mapping from"),
        (
            ["--max-ratio", "source/x=3"],
            "`--max-ratio` has the key 'source/x'. Pass",
        ),
        (["--width", 8], "Use `--cost-fn` with a function of B and a mapping from co"),
        (["--depth", 8], "`--depth` requires examples with one length, but `--column"),
        (["--vocab-size", 8], "`--vocab-size` requires examples with one length, but"),
        (["--step-times", "pairs.csv"], "names ['source', 'target']. Use `--cost-fn`"),
        (["--block-sparse"], "`--block-sparse` requires `--pack`. Remove it, or add "),
        (["--max-tokens", "10,20"], "`--max-tokens 10,20` is a list of budgets, one "),
        (["--max-tokens", 20], "'target': 122}`. Raise `--max-tokens` to 318, or"),
        (["--max-tokens", "source=9,target=4000"], "Pass `--max-tokens source="),
        (["--overlong", "split"], "`--overlong split`: choose 'error', 'drop', 'tru"),
        (["--overlong", "source=split,target=drop"], "`--overlong source=split`: "),
        (["--max-seq-len", "source=9"], "but the lengths have ['source', 'target']: '"),
        (["--max-tokens", "source=9"], "'target' is missing. Use the same sequences."),
        (["--overlong", "target=drop"], "'source' is missing. Use the same sequences."),
        (
            ["--max-seq-len", "a=9,b=9"],
            "`--max-seq-len` has the sequences ['a', 'b'],",
        ),
        (["--max-seq-len", 20], "is beyond all buckets, `seq_len['source']=20`"),
        (["--column", "x"], "there is no column 'x' among ['source', 'target', 'othe"),
    ],
)
def test_what_several_columns_do_not_allow_is_refused(words, message):
    budget = () if "--max-tokens" in words else ("--max-tokens", 4096)
    assert message in refused("plan", "pairs.npz", *BOTH, *budget, *words)


def test_a_missing_budget_is_refused():
    assert "`--max-tokens` is missing." in refused("plan", "pairs.npz", *BOTH)


@pytest.mark.parametrize("command", ["plan", "compare"])
@pytest.mark.parametrize(
    "option", ["--max-tokens", "--max-seq-len", "--seq-len-multiple", "--overlong"]
)
def test_a_value_for_each_column_requires_several(command, option):
    values = "source=9,target=8"
    if option == "--overlong":
        values = "source=drop,target=drop"
    words = ("--column", "source", "--max-tokens", 4096, option, values)
    message = refused(command, "pairs.npz", *words)
    assert f"`{option}` has a value for each of several columns. Pass one" in message


@pytest.mark.parametrize(
    "value, message",
    [
        ("source=9,target=x", "'x' is not a valid integer"),
        ("source=9,target=0", "0 is not in the range"),
        ("source=9,source=8", "'source=9,source=8' names a column twice."),
    ],
)
def test_a_size_that_is_not_a_positive_integer_is_refused(value, message):
    for option in ("--max-seq-len", "--max-tokens"):
        assert message in run("plan", "pairs.npz", option, value, code=2)


def test_an_unknown_policy_of_a_column_is_refused():
    policies = ("--overlong", "source=drop,target=cut")
    message = "'cut' is not one of 'error', 'drop', 'truncate', 'truncate_left'"
    assert message in run("plan", "pairs.npz", *BOTH, *policies, code=2)


def test_packed_rows_follow_the_budget_and_the_policy_of_each_column(files):
    words = ("--max-tokens", "source=4000,target=1000", "--max-seq-len", 100)
    words += ("--overlong", "source=drop,target=truncate", "--pack", "always")
    run("plan", "pairs.npz", *BOTH, *words, "--num-buckets", 2, "-o", "packed.json")
    plan = jb.BucketPlan.from_json((files / "packed.json").read_text())
    assert plan.packed and plan.max_tokens == {"source": 4000, "target": 1000}
    assert plan.overlong == {"source": "drop", "target": "truncate"}


def test_a_column_given_twice_is_refused():
    twice = ("--column", "source", "--column", "source")
    assert "'source' is given twice." in run("plan", "pairs.npz", *twice, code=2)


@pytest.mark.parametrize(
    "value, message", [(0, "`lengths[7]=0`"), (2.5, "`lengths[7]=2.5`")]
)
def test_an_invalid_length_is_reported_with_its_column(value, message):
    lengths = PAIRS["target"].astype(float if value else int)
    lengths[7] = value
    np.savez("bad.npz", source=SOURCE, target=lengths)
    message = f"`bad.npz`, column 'target': {message}"
    assert message in refused("plan", "bad.npz", *OPTIONS)


def test_columns_with_different_numbers_of_examples_are_refused():
    np.savez("uneven.npz", source=[1, 2], target=[1])
    message = refused("plan", "uneven.npz", *OPTIONS)
    assert "different numbers of examples" in message


@pytest.mark.exhaustive
def test_several_columns_are_compared(files):
    words = (*OPTIONS, "--plan", "joint.json", "--plot", "compare.png")
    output = run("compare", "pairs.npz", *words)
    for name in ("optimal", "by the sum", "by the longest", "one shape", "joint.json"):
        assert name in output
    assert matplotlib.image.imread(files / "compare.png").std() > 0.1
    numbers = json.loads(run("compare", "pairs.npz", *OPTIONS, "--json"))
    costs = {x["name"]: x["report"]["epoch_cost"] for x in numbers["plans"]}
    assert list(costs.values()) == sorted(costs.values()) and "packed" in costs
    assert costs["optimal"] == jb.report(JOINT, PAIRS).epoch_cost
    assert numbers["least_cost"] is None and not numbers["exact"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("policy", ["drop", "truncate_left"])
def test_only_examples_that_are_kept_are_drawn(files, policy):
    limits = ("--max-seq-len", "source=150,target=150", "--overlong", policy)
    run("compare", "pairs.npz", *OPTIONS, *limits, "--plot", "compare.png")
    assert matplotlib.image.imread(files / "compare.png").std() > 0.1


def test_plans_of_other_columns_are_not_compared():
    one = ("--column", "source", "--max-tokens", 4096, "--plan", "joint.json")
    message = refused("compare", "pairs.npz", *one)
    assert "`--plan joint.json` has the sequences ['source', 'target'], but " in message


def test_packed_rows_of_several_columns_are_planned_reported_and_compared(files):
    words = ("--pack", "always", "--max-ratio", 4, "-o", "packed.json", "--json")
    planned = json.loads(run("plan", "pairs.npz", *OPTIONS, *words))
    plan = jb.BucketPlan.from_json((files / "packed.json").read_text())
    assert plan.packed and plan.sequences == ("source", "target")
    assert plan.max_ratio == 4
    reported = json.loads(run("report", "packed.json", "pairs.npz", "--json"))
    names = ("filtered_examples", "packed_examples", "real_tokens", "epoch_cost")
    assert all(reported["report"][x] == planned["report"][x] for x in names)
    assert planned["report"]["filtered_examples"] > 0
    table = run("compare", "pairs.npz", *OPTIONS, "--pack", "always")
    assert "packed" in table and "Add --cost-fn to include it." in table
    message = refused("plan", "pairs.npz", "--column", "source", "--max-ratio", 2)
    assert "`--max-ratio` requires several columns" in message


@pytest.mark.exhaustive
def test_the_number_of_shapes_of_several_columns_may_be_chosen(files):
    auto = ("--num-buckets", "auto", "--compile-seconds", 0.5, "--per-second", 4000)
    words = (*BOTH, "--max-tokens", 4096, *auto)
    output = run("plan", "pairs.npz", *words, "--plot", "curve.png")
    assert "compiling takes" in output
    assert matplotlib.image.imread(files / "curve.png").std() > 0.1
    curve = json.loads(run("plan", "pairs.npz", *words, "--json"))["curve"]
    sizes = [point["num_buckets"] for point in curve["points"]]
    assert 1 < curve["chosen_num_buckets"] < sizes[-1]


def test_report_refuses_columns_that_the_plan_does_not_have(files):
    message = refused("report", "joint.json", "pairs.npz", "--column", "source")
    assert "but the plan has the sequences ['source', 'target']. Name the" in message
    one = jb.plan_buckets(SOURCE, max_tokens=4096)
    (files / "one.json").write_text(one.to_json())
    message = refused("report", "one.json", "pairs.npz", *BOTH)
    assert "The plan is for examples with one length, but `--column` names" in message


def test_several_columns_are_measured(files):
    words = ("--column", "source", "--column", "file", "--unit", "words")
    lines = [{"source": "a b c", "file": "x"}, {"source": "d", "file": "y z"}]
    (files / "text.jsonl").write_text("\n".join(map(json.dumps, lines)))
    plot = ("--plot", "lengths.png")
    output = run("measure", "text.jsonl", *words, "-o", "lengths.npz", *plot)
    assert "source" in output.splitlines()[1] and output.count("in words") == 2
    measured = np.load("lengths.npz")
    assert measured["source"].tolist() == [3, 1] and measured["file"].tolist() == [1, 2]
    assert matplotlib.image.imread(files / "lengths.png").std() > 0.1
    numbers = json.loads(run("measure", "text.jsonl", *words, "--json"))
    assert numbers["source"]["total"] == 4 and numbers["file"]["max"] == 2
    columns = ("--column", "source", "--column", "file", "--max-tokens", 20)
    assert "steps per epoch" in run("plan", "lengths.npz", *columns)


def test_a_function_is_called_once_for_several_columns(files, monkeypatch):
    lines = [
        "def pairs():",
        "    with open('calls', 'a') as file: file.write('pairs ')",
        "    return iter([{'a': [1], 'b': [2, 3]}])",
    ]
    (files / "given_pairs.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(files)
    columns = ("--column", "b", "--column", "a")
    numbers = json.loads(run("measure", "given_pairs:pairs", *columns, "--json"))
    assert numbers["a"]["total"] == 1 and numbers["b"]["total"] == 2
    assert (files / "calls").read_text() == "pairs "


def test_several_measured_columns_are_written_as_npz():
    message = refused("measure", "pairs.npz", *BOTH, "-o", "lengths.npy")
    assert "several columns are written as .npz. Name the file lengths.npz." in message
