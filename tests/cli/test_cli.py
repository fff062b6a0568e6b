"""The commands print the numbers of the library, and refuse what is invalid."""

import dataclasses
import gzip
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
from click.testing import CliRunner

import jaxbucket as jb
from jaxbucket import Bucket, BucketPlan, Limits, plan_buckets, report
from jaxbucket.cli import main
from jaxbucket.cli.output import show
from jaxbucket.compile.report import CompileReport, ProgramReport
from jaxbucket.plan import Comparison, PlanCurve, Report, compare_plans, plan_curve
from jaxbucket.plan.costs import StepTime
from jaxbucket.plan.reports.epoch import BucketReport
from jaxbucket.simulate import Cluster, simulate

RNG = np.random.default_rng(0)
LENGTHS = RNG.integers(1, 500, 1000).astype(np.int32)
PAIRS = {
    "de": np.maximum(LENGTHS[:200] * RNG.uniform(0.5, 1.5, 200), 1).astype(np.int32),
    "en": LENGTHS[:200],
}
BUDGET = ("--max-tokens", 4096)
OPTIONS = (*BUDGET, "--num-buckets", 4, "--seq-len-multiple", 32)
PLAN = plan_buckets(LENGTHS, max_tokens=4096, num_buckets=4, seq_len_multiple=32)
COLUMNS = ("--column", "en", "--column", "de")
AUTO = ("--num-buckets", "auto", "--compile-seconds", 1, "--per-second", 1e4)
MACHINES = ("--num-hosts", 4, "--skew", 0.1, "--hours-between-faults", 0.2)
# Commands that print tables and draw plots.
TABLES = (
    ("measure", "pairs.npz", *COLUMNS),
    ("plan", "lengths.npy", *BUDGET, *AUTO),
    ("plan", "pairs.npz", *COLUMNS, *BUDGET),
    ("compare", "lengths.npy", *OPTIONS),
    ("report", "plan.json", "lengths.npy", "--tokens-per-device", 64),
    ("simulate", "lengths.npy", "plan.json", "--per-second", 1e4, *MACHINES),
)
MODULE = """
import numpy as np

class Source:
    def __len__(self):
        return 40
    def __getitem__(self, index):
        return {"en": np.zeros(1 + index % 7), "de": np.zeros(2 + index % 5)}

def lengths():
    return np.arange(1, 9)

def cost(batch_size, seq_len):
    return batch_size * seq_len**2

def fails():
    raise OSError("no disk")

def frames(seconds):
    return round(100 * seconds)

not_a_function = 3
few = [64, 128, 512]
bins = [{"en": 64, "de": 512}, {"en": 512, "de": 999}]
"""
BINS = [{"en": 64, "de": 512}, {"en": 512, "de": 999}]


@pytest.fixture(autouse=True)
def files(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A current folder with lengths, plans and a module of functions."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    np.save("lengths.npy", LENGTHS)
    np.savez("pairs.npz", **PAIRS)
    rows = (f"{n},{'x' * n}" for n in LENGTHS)
    pathlib.Path("lengths.csv").write_text("\n".join(["n,text", *rows]) + "\n")
    pathlib.Path("plan.json").write_text(PLAN.to_json())
    pathlib.Path("negative.json").write_text('{"128": 7, "-3": 2}')
    pathlib.Path("fraction.json").write_text('{"128": 7.5}')
    pathlib.Path("empty.json").write_text("{}")
    pathlib.Path("counts.json").write_text('{"128": 7}')
    pathlib.Path("times.json").write_text('{"[8, 512]": 0.2}')
    name = f"functions_{tmp_path.name.replace('-', '_')}"
    pathlib.Path(f"{name}.py").write_text(MODULE)
    monkeypatch.setattr(sys.modules[__name__], "FUNCTIONS", name, raising=False)
    return tmp_path


def run(*args: object, code: int = 0, given: bytes | None = None) -> str:
    words = [str(x).replace("FUNCTIONS", globals()["FUNCTIONS"]) for x in args]
    result = CliRunner().invoke(main, words, input=given)
    assert result.exit_code == code, result.output
    return result.output


def numbers(*args: object, given: bytes | None = None) -> dict:
    return json.loads(run(*args, "--json", given=given))


# Plans, reports and comparisons


def test_plan_writes_the_plan_of_the_library(files):
    for source in (["lengths.npy"], ["lengths.csv", "--column", "n"]):
        table = run("plan", *source, *OPTIONS, "-o", "out.json")
        assert BucketPlan.from_json((files / "out.json").read_text()) == PLAN
    result = numbers("plan", "lengths.npy", *OPTIONS)
    epoch = report(PLAN, LENGTHS)
    assert result["report"] == json.loads(epoch.to_json())
    assert result["fingerprint"] == PLAN.fingerprint
    assert f"{epoch.steps_per_epoch} steps per epoch" in table


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("--batch-size-multiple 4 --max-batch-size 16", {"max_batch_size": 16}),
        ("--batch-size-multiple 4 --min-batch-size 8", {"min_batch_size": 8}),
        ("--batch-size-multiple 4 --accumulate 2 --sample", {"accumulate": 2}),
        ("--batch-size-multiple 4 --max-seq-len 256 --overlong truncate", {}),
        ("--batch-size-multiple 4 --boundaries 128,512", {"boundaries": [128, 512]}),
        ("--batch-size-multiple 4 --boundaries quantile", {"boundaries": "quantile"}),
        (
            "--batch-size-multiple 4 --boundaries FUNCTIONS:few",
            {"boundaries": [64, 128, 512]},
        ),
        ("--batch-size-multiple 4 --per-second 100", {}),
        ("--batch-size-multiple 4 --width 64 --depth 2 --vocab-size 99", {}),
    ],
)
def test_options_reach_the_planner(words, options):
    options = {"max_tokens": 4096, "batch_size_multiple": 4, **options}
    if "--sample" in words:
        options["sample"] = True
    if "--overlong" in words:
        options |= {"max_seq_len": 256, "overlong": "truncate"}
    if "--per-second" in words:
        options["cost_fn"] = jb.plan.TokenCost(100)
    if "--width" in words:
        options["cost_fn"] = jb.plan.TransformerCost(64, 2, 99)
    result = numbers("plan", "lengths.npy", *BUDGET, *words.split())["plan"]
    boundaries = options.pop("boundaries", "optimal")
    limits = jb.plan.Limits(**options)
    expected = jb.plan.plan_within(LENGTHS, limits, boundaries=boundaries)
    assert BucketPlan.from_json(json.dumps(result)) == expected


def test_costs_may_be_functions_or_measured():
    result = numbers("plan", "lengths.npy", *BUDGET, "--cost-fn", "FUNCTIONS:cost")
    expected = plan_buckets(
        LENGTHS, max_tokens=4096, cost_fn=lambda b, t: b * t**2
    ).buckets
    assert result["plan"]["buckets"] == [bucket.to_list() for bucket in expected]
    times = {"[8, 512]": 0.21, "[32, 128]": 0.2, "[16, 128]": 0.1, "[8, 128]": 0.06}
    pathlib.Path("times.json").write_text(json.dumps(times))
    result = numbers("plan", "lengths.npy", *BUDGET, "--step-times", "times.json")
    assert result["plan"]["cost_unit"] == "s"


def test_num_buckets_auto_is_that_of_the_curve():
    words = ("plan", "lengths.npy", *BUDGET, *AUTO, "--num-epochs", 3)
    limits = Limits(max_tokens=4096, cost_fn=jb.plan.TokenCost(1e4))
    curve = plan_curve(LENGTHS, limits, compile_seconds=1, num_epochs=3)
    assert numbers(*words)["curve"] == curve.to_dict()
    assert f"{len(curve.chosen.plan)}" in run(*words)


@pytest.mark.parametrize("pack", ["auto", "always"])
def test_packed_plans_are_those_of_plan_packing(pack):
    words = ("--pack", pack, "--block-sparse", "--width", 64, "--depth", 2)
    result = numbers("plan", "lengths.npy", *BUDGET, *words, "-o", "packed.json")
    cost = jb.plan.TransformerCost(64, 2)
    packed = jb.plan_packing(
        LENGTHS, max_tokens=4096, cost_fn=cost, block_sparse=True, pack=pack
    )
    assert result["packing"]["epoch_costs"] == packed.epoch_costs
    assert result["packing"]["reason"] == packed.reason
    assert BucketPlan.from_json(json.dumps(result["plan"])) == packed.plan
    epoch = numbers("report", "packed.json", "lengths.npy")["report"]
    assert epoch["real_tokens"] == LENGTHS.sum()
    assert epoch["packed_examples"] == len(LENGTHS) * packed.is_packed


def test_report_reads_a_plan_and_other_lengths():
    options = ("--remainder", "pad", "--accumulate", 2, "--group", "mixed")
    np.save("other.npy", LENGTHS[::3])
    result = numbers("report", "plan.json", "other.npy", *options)
    expected = report(PLAN, LENGTHS[::3], remainder="pad", accumulate=2, group="mixed")
    assert result["report"] == json.loads(expected.to_json())


def test_compare_has_the_plans_of_the_library_and_packed_rows():
    pathlib.Path("mine.json").write_text(PLAN.to_json())
    result = numbers("compare", "lengths.npy", *OPTIONS, "--plan", "mine.json")
    limits = Limits(max_tokens=4096, seq_len_multiple=32)
    others = {"mine.json": PLAN}
    expected = compare_plans(LENGTHS, limits, num_buckets=4, others=others).to_dict()
    expected = json.loads(json.dumps(expected))
    plans = {plan["name"]: plan for plan in result["plans"]}
    for plan in expected["plans"]:
        assert plans.pop(plan["name"]) == plan
    assert {"packed"} <= set(plans) <= {"packed", "packed, one shape"}
    assert plans["packed"]["report"]["packed_examples"] == len(LENGTHS)
    for words in (["--pack", "never"], ["--max-batch-size", 8]):
        output = run("compare", "lengths.npy", *OPTIONS, *words)
        assert ("not compared" in output) == (words[0] != "--pack")
        assert "packed, one shape" not in output


def test_several_columns_are_planned_reported_and_compared(files):
    words = ("pairs.npz", *COLUMNS, *BUDGET, "--num-buckets", 3)
    result = numbers("plan", *words, "-o", "pairs.json")
    expected = plan_buckets(PAIRS, max_tokens=4096, num_buckets=3)
    assert BucketPlan.from_json(json.dumps(result["plan"])) == expected
    epoch = numbers("report", "pairs.json", "pairs.npz")["report"]
    assert epoch == result["report"]
    compared = numbers("compare", *words)
    assert compared["plans"][-1]["name"] == "one shape"
    run("plan", *words, "--pack", "always", "-o", "packed.json")
    packed = numbers("report", "packed.json", "pairs.npz")["report"]
    assert packed["packed_examples"] == len(PAIRS["en"])


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("--max-tokens en=4k,de=9999", {"max_tokens": {"en": 4096, "de": 9999}}),
        ("--seq-len-multiple en=8,de=16", {"seq_len_multiple": {"en": 8, "de": 16}}),
        (
            "--max-seq-len de=64,en=32 --overlong de=drop,en=truncate_left",
            {
                "max_seq_len": {"en": 32, "de": 64},
                "overlong": {"en": "truncate_left", "de": "drop"},
            },
        ),
        ("--boundaries FUNCTIONS:bins", {"boundaries": BINS}),
    ],
)
def test_options_may_have_a_value_for_each_sequence(words, options):
    budget = () if "max_tokens" in options else BUDGET
    result = numbers("plan", "pairs.npz", *COLUMNS, *budget, *words.split())
    expected = plan_buckets(PAIRS, **{"max_tokens": 4096, **options})
    assert BucketPlan.from_json(json.dumps(result["plan"])) == expected


def test_the_keys_of_the_json_are_documented():
    docs = pathlib.Path(__file__).parents[2] / "docs"
    page = (docs / "reference" / "command_line.md").read_text()
    _, _, section = page.partition("## JSON")
    documented = set(re.findall(r"`(\w+)`", section.partition("\n## ")[0]))
    with_curve = numbers("plan", "lengths.npy", *BUDGET, *AUTO)
    packed = numbers("plan", "lengths.npy", *OPTIONS, "--pack", "auto")
    compared = numbers("compare", "lengths.npy", *OPTIONS)
    keys = with_curve.keys() | packed.keys() | compared.keys()
    assert keys | compared["plans"][0].keys() <= documented
    attributes = {
        Report: with_curve["report"],
        BucketReport: with_curve["report"]["buckets"][0],
        PlanCurve: with_curve["curve"],
        Comparison: compared,
    }
    for kind, values in attributes.items():
        undocumented = {x for x in values if f" {x}: " not in str(kind.__doc__)}
        assert all(x in documented or hasattr(kind, x) for x in undocumented)


# Simulating


def test_simulate_has_the_numbers_of_the_library(files):
    values, counts = np.unique(LENGTHS, return_counts=True)
    histogram = dict(zip(values.tolist(), counts.tolist(), strict=True))
    pathlib.Path("histogram.json").write_text(json.dumps(histogram))
    pathlib.Path("hours.json").write_text("[0.1, 0.3]")
    times = ("--step-times", "times.json")
    pathlib.Path("times.json").write_text('{"[8, 512]": 0.21, "[4, 128]": 0.1}')
    given = pathlib.Path("histogram.json").read_bytes()
    for source in ("lengths.npy", "histogram.json", "-"):
        found = numbers("simulate", source, "plan.json", *times, *MACHINES, given=given)
        cluster = Cluster(
            num_hosts=4,
            step_seconds=StepTime.fit({Bucket(8, 512): 0.21, Bucket(4, 128): 0.1}),
            skew=0.1,
            hours_between_faults=0.2,
        )
        expected = simulate({"plan.json": PLAN}, LENGTHS, cluster)
        assert found == json.loads(expected.to_json())
    run("simulate", "lengths.npy", "plan.json", *times, "--row-seconds", "hours.json")


def test_simulate_has_an_option_for_each_attribute_of_a_cluster():
    numbers_of = {
        "num_hosts": 3,
        "devices_per_host": 2,
        "skew": 0.2,
        "row_seconds": 0.01,
        "compile_seconds": 5.0,
        "hours_between_faults": 0.3,
        "restart_seconds": 60.0,
        "checkpoint_seconds": 0.5,
        "checkpoint_steps": 3,
    }
    words = (x for name, n in numbers_of.items() for x in (f"--{name}", n))
    words = [str(x).replace("_", "-") for x in words]
    costs = jb.plan.TokenCost(1e4)
    cluster = Cluster(step_seconds=costs, **numbers_of)
    fields = {field.name for field in dataclasses.fields(Cluster)}
    assert fields == {*numbers_of, "step_seconds"}
    expected = simulate({"plan.json": PLAN}, LENGTHS, cluster)
    words = ("lengths.npy", "plan.json", "--per-second", 1e4, *words)
    assert numbers("simulate", *words) == json.loads(expected.to_json())


def test_histograms_are_planned_compared_and_reported(files):
    values, counts = np.unique(LENGTHS, return_counts=True)
    histogram = dict(zip(values.tolist(), (counts * 10**10).tolist(), strict=True))
    pathlib.Path("histogram.json").write_text(json.dumps(histogram))
    epoch = numbers("report", "plan.json", "histogram.json")["report"]
    assert epoch["real_tokens"] == int(LENGTHS.sum()) * 10**10
    run("plan", "histogram.json", *OPTIONS, "-o", "out.json", "--plot", "plot.png")
    best = numbers("compare", "histogram.json", *OPTIONS)["plans"][0]["report"]
    planned = numbers("report", "out.json", "histogram.json")["report"]
    assert best == planned


def test_step_times_may_be_those_of_programs_for_absent_devices():
    programs = [
        {"label": str(bucket), "name": name, "flops": flops * bucket.num_tokens}
        for bucket in PLAN.buckets
        for name, flops in (("train", 6000), ("evaluate", 2000))
    ]
    pathlib.Path("programs.json").write_text(json.dumps({"programs": programs}))
    words = ("--programs", "programs.json", "--per-second", 1e6)
    epoch = numbers("simulate", "lengths.npy", "plan.json", *words)["plan.json"]
    padded = report(PLAN, LENGTHS).padded_tokens
    assert epoch["seconds"] == pytest.approx(padded * 6000 / 1e6)


# Measuring


def test_measure_writes_lengths_and_prints_statistics(files):
    words = ["lengths.csv", "--column", "text", "--unit", "bytes"]
    result = numbers("measure", *words, "-o", "out.npy")
    assert np.load("out.npy").tolist() == LENGTHS.tolist()
    ordered = np.sort(LENGTHS)
    assert result == {
        "examples": 1000,
        "total": LENGTHS.sum(),
        "mean": LENGTHS.mean(),
        "min": ordered[0],
        "median": ordered[499],
        "p90": ordered[899],
        "p99": ordered[989],
        "max": ordered[-1],
        "distinct": len(set(LENGTHS.tolist())),
    }
    assert f"{LENGTHS.sum():,}" in run("measure", "lengths.npy")


def test_measure_calls_a_function_for_a_source_or_for_lengths():
    assert numbers("measure", "FUNCTIONS:lengths", "-o", "a.npy")["examples"] == 8
    words = ("measure", "FUNCTIONS:Source")
    numbers(*words, "--column", "en", "-o", "a.npy")
    assert np.load("a.npy").tolist() == [1 + i % 7 for i in range(40)]
    both = numbers(*words, *COLUMNS, "-o", "b.npz", "--num-workers", 1)
    assert list(both) == ["en", "de"]
    with np.load("b.npz") as arrays:
        assert arrays["de"].tolist() == [2 + i % 5 for i in range(40)]
    assert run("plan", "b.npz", *COLUMNS, "--max-tokens", 99)


# Files of every kind, for every command that reads lengths

READERS = ["measure", "plan", "compare", "report"]


def read_by(command: str, source: str, *options: object, given: bytes | None = None):
    """Returns the number of examples and of tokens that a command has read."""
    words = [command, *["plan.json"] * (command == "report"), source, *options]
    words += BUDGET if command in ("plan", "compare") else []
    words += ["--pack", "never"] if command == "compare" else []
    found = numbers(*words, given=given)
    if command == "measure":
        return found["examples"], found["total"]
    epoch = found["plans"][0]["report"] if command == "compare" else found["report"]
    return sum(x["examples"] for x in epoch["buckets"]), epoch["real_tokens"]


@pytest.mark.parametrize("command", READERS)
def test_commands_read_seconds_and_fields_in_fields(command):
    rows = [{"meta": {"seconds": n / 100}} for n in LENGTHS.tolist()]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    pathlib.Path("rows.jsonl").write_text(text)
    expected = (len(LENGTHS), LENGTHS.sum())
    words = ("rows.jsonl", "--column", "meta.seconds")
    assert read_by(command, *words, "--scale", 100) == expected
    assert read_by(command, *words, "--length-fn", "FUNCTIONS:frames") == expected


@pytest.mark.parametrize("command", READERS)
def test_commands_read_standard_input(command):
    expected = (len(LENGTHS), LENGTHS.sum())
    lines = "".join(f'{{"n": {n}}}\n' for n in LENGTHS)
    for data in (
        pathlib.Path("lengths.npy").read_bytes(),
        lines.encode(),
        json.dumps(LENGTHS.tolist()).encode(),
        "\n".join(["n", *map(str, LENGTHS)]).encode(),
    ):
        assert read_by(command, "-", given=data) == expected
    words = ("-", "--column", "n")
    for mark in ",;\t":
        rows = [f"{n}{mark}x" for n in LENGTHS]
        data = "\n".join([f"n{mark}m", *rows]).encode()
        assert read_by(command, *words, given=data) == expected


@pytest.mark.parametrize(("text", "value"), [("4k", 4096), ("4K", 4096), ("1M", 2**20)])
def test_a_k_is_1024(text, value):
    words = ("plan", "lengths.npy", "--max-tokens")
    assert numbers(*words, text) == numbers(*words, value)
    capped = ("--max-batch-size", text, "--max-seq-len", text)
    number = ("--max-batch-size", value, "--max-seq-len", value)
    words = (*words, "2M")
    assert numbers(*words, *capped) == numbers(*words, *number)
    boundaries = numbers(*words, "--boundaries", f"512,{text}")["plan"]["buckets"]
    assert [x[1] for x in boundaries] == [512, value]
    assert "1,024" in " ".join(run("plan", "--help").split())


# Output


def test_plots_are_drawn():
    for command in (("measure", "lengths.npy"), *TABLES):
        run(*command, "--plot", "plot.png")
        assert pathlib.Path("plot.png").stat().st_size > 5000
        pathlib.Path("plot.png").unlink()


def test_no_number_is_cut_off_in_a_narrow_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    assert "steps per epoch" in run("plan", "lengths.npy", *OPTIONS).replace("\n", " ")
    assert "bytes" in run("plan", "lengths.npy", *OPTIONS, "--unit", "bytes")


def test_text_fits_the_terminal_and_explanations_come_once(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    packed = ("plan", "lengths.npy", *OPTIONS, "--pack", "auto")
    for command in (*TABLES, packed):
        output = run(*command)
        explained = [x for x in output.splitlines() if re.search(r"[a-z][.,] [A-Z]", x)]
        assert all(len(line) <= 60 for line in explained)
        # A table may be wider than 60 characters.
        assert all(len(line) <= 80 for line in output.splitlines())
        words = " ".join(output.split())
        explains = command[0] not in ("measure", "simulate")
        assert words.count("Padding: the share") == explains
        quiet = run(*command, "--quiet")
        assert "Padding: the share" not in " ".join(quiet.split())
        assert set(quiet.splitlines()) <= set(output.splitlines())


def test_every_explanation_of_programs_comes_once(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    found = {"count": 2, "bytes": 3_000_000, "is_lower_bound": False}
    program = ProgramReport("step", "[8, 4]", collectives={"all-reduce": found})
    reports = [CompileReport((program,)), CompileReport((program,))]
    show(None, {}, *reports)
    output = capsys.readouterr().out
    assert output.count("trace, XLA: seconds") == output.count("Collectives that") == 1
    assert output.count("2: 3.0") == output.count("step [8, 4]") / 2 == 2
    assert all(len(line) <= 80 for line in output.splitlines())
    show("quiet", {}, *reports)
    assert "Collectives that" not in capsys.readouterr().out


def test_the_command_runs_as_a_script_without_jax(python):
    code = (
        "import runpy, sys\n"
        "try: runpy.run_module('jaxbucket', run_name='__main__', alter_sys=True)\n"
        "finally: assert not {'jax', 'grain', 'flax'} & set(sys.modules)"
    )
    env = {**os.environ, "FORCE_COLOR": "1"}
    done = python("-c", code, "plan", "lengths.npy", *OPTIONS, env=env)
    assert "steps per epoch" in done.stdout
    # No progress bar outside of a terminal.
    assert done.stderr == ""


def test_a_closed_pipe_ends_a_command_silently():
    read, write = os.pipe()
    os.close(read)
    program = [sys.executable, "-m", "jaxbucket"]
    done = subprocess.run(
        [*program, "compare", "lengths.npy", *map(str, BUDGET)],
        stdout=write,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(write)
    assert done.returncode in (1, -signal.SIGPIPE) and done.stderr == b""


def test_an_output_may_be_a_named_pipe(files):
    os.mkfifo("pipe.json")
    received = []
    thread = threading.Thread(
        target=lambda: received.append((files / "pipe.json").read_text())
    )
    thread.start()
    run("plan", "lengths.npy", *OPTIONS, "-o", "pipe.json")
    thread.join(timeout=20)
    assert BucketPlan.from_json(received[0]) == PLAN


def test_a_failed_write_leaves_the_old_file(files, monkeypatch):
    def full(*args):
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    before = set(os.listdir())
    run("plan", "lengths.npy", *BUDGET, "-o", "plan.json", code=1)
    assert (files / "plan.json").read_text() == PLAN.to_json()
    assert set(os.listdir()) == before


# Refusals


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("plan lengths.npy --max-tokens 0", "max_tokens"),
        ("plan lengths.npy --max-tokens 48,000", "max_tokens"),
        ("plan lengths.npy --max-tokens 1.5k", "max_tokens"),
        ("plan lengths.npy --max-tokens FUNCTIONS:x", "FUNCTIONS:x"),
        ("plan lengths.npy --max-tokens FUNCTIONS:not_a_function", "int"),
        ("plan lengths.npy --max-tokens 999 --num-buckets auto", "--per-second"),
        ("plan lengths.npy --max-tokens 999 --boundaries x", "boundaries"),
        ("plan lengths.npy --max-tokens 999 --boundaries FUNCTIONS:cost", "boundaries"),
        ("plan lengths.npy --max-tokens a=9,b=9", "'a'"),
        ("plan lengths.npy --max-tokens 999 --max-seq-len 9", "max_seq_len"),
        ("plan lengths.npy --max-tokens 999 --block-sparse", "block_sparse"),
        ("plan lengths.npy --max-tokens 999 --compile-seconds 9", "num_buckets"),
        ("plan lengths.npy --max-tokens 999 --num-epochs 9", "num_buckets"),
        ("plan lengths.npy --max-tokens 999 --pack auto --boundaries 500", "pack"),
        ("plan lengths.npy --max-tokens 999 --pack auto --accumulate 2", "accumulate"),
        ("plan lengths.npy --max-tokens 999 --width 4", "depth"),
        ("plan lengths.npy --max-tokens 999 --step-times plan.json", "step_times"),
        ("plan lengths.npy --max-tokens 999 --width 4 --cost-fn a:b", "cost_fn"),
        ("plan lengths.npy --max-tokens 999 -o no/plan.json", "output"),
        ("plan lengths.npy --max-tokens 999 -o lengths.npy", "output"),
        ("plan lengths.npy --max-tokens 999 --plot plot.xyz", "plot"),
        ("plan lengths.csv --max-tokens 999", "column"),
        ("plan lengths.csv --column text --max-tokens 999", "unit"),
        ("plan plan.json --max-tokens 999", "plan.json"),
        ("plan negative.json --max-tokens 999", "'-3'"),
        ("plan fraction.json --max-tokens 999", "7.5"),
        ("plan empty.json --max-tokens 999", "empty.json"),
        ("plan counts.json --max-tokens 999 --scale 100", "scale"),
        ("plan counts.json --max-tokens 999 --column n", "column"),
        ("measure counts.json", "counts.json"),
        ("measure counts.json --unit bytes", "unit"),
        ("measure lengths.npy --unit bytes", "unit"),
        (
            "plan lengths.npy --max-tokens 4k --step-times times.json -o times.json",
            "output",
        ),
        ("plan lengths.npy --max-tokens lengths.npy", "jaxbucket fit -o"),
        ("plan lengths.npy --max-tokens 4k --seq-len-multiple a=8", "seq_len_multiple"),
        (
            "plan lengths.npy --max-tokens 4k --boundaries 512 --max-seq-len 256",
            "max_seq_len",
        ),
        (
            "plan lengths.npy --max-tokens 4k --boundaries 64,512 --num-buckets 1",
            "num_buckets",
        ),
        ("report plan.json pairs.npz --column en --column de", "lengths"),
        ("compare lengths.npy --max-tokens 4k --pack never --block-sparse", "pack"),
        ("plan lengths.npy --max-tokens 999 --length-fn no:f", "no:f"),
        ("plan lengths.npy --max-tokens 999 --length-fn FUNCTIONS:cost", "row 0"),
        ("plan lengths.npy --max-tokens 4k --scale 100", "max_tokens"),
        ("report lengths.npy plan.json", "lengths.npy"),
        ("report plan.json plan.json", "plan.json"),
        ("compare lengths.npy --max-tokens 999 --plan lengths.npy", "lengths.npy"),
        ("compare lengths.npy --max-tokens 999 --remainder drop", "remainder"),
        ("simulate lengths.npy plan.json", "step_seconds"),
        ("simulate plan.json plan.json --per-second 9", "plan.json"),
        ("simulate lengths.npy plan.json --per-second 9 --width 4", "depth"),
        ("simulate lengths.npy plan.json --programs plan.json", "per_second"),
        ("simulate lengths.npy plan.json --per-second 9 --skew -1", "skew"),
        ("simulate lengths.npy plan.json --per-second 9 --learning-rate a:b", "a:b"),
        ("measure nothing.npy", "nothing.npy"),
        ("measure lengths.npy -o out.txt", "output"),
        ("measure pairs.npz --column en --column de -o out.npy", "output"),
        ("measure FUNCTIONS:fails", "no disk"),
        ("measure no_such_module:fails", "no_such_module"),
        ("measure FUNCTIONS:Source --unit words", "unit"),
        ("measure FUNCTIONS:Source --scale 2", "scale"),
        ("measure lengths.npy --scale 2 --scale 3", "scale"),
        ("measure FUNCTIONS:Source --length-fn FUNCTIONS:frames", "length_fn"),
        ("measure lengths.csv --unit bytes --length-fn FUNCTIONS:frames", "unit"),
        ("measure FUNCTIONS:Source --column fr", "fr"),
    ],
)
def test_invalid_arguments_are_refused_without_a_traceback(words, shown):
    output = run(*words.split(), code=1)
    assert output.startswith("Error: ") and "Traceback" not in output
    assert len(output) < 600
    assert shown.replace("FUNCTIONS", globals()["FUNCTIONS"]) in output


@pytest.mark.parametrize(
    "words",
    [
        "plan lengths.npy",
        "plan nothing.npy --max-tokens 9",
        "plan lengths.npy --max-tokens 9 --overlong keep",
        "plan lengths.npy --max-tokens 9 --num-buckets x",
        "plan lengths.npy --max-tokens 9 --max-seq-len 4kb",
        "plan pairs.npz --max-tokens 9 --seq-len-multiple en=8,4",
        "plan pairs.npz --max-tokens 9 --seq-len-multiple en=8,en=4",
        "plan pairs.npz --max-tokens en=9,en=4",
        "plan pairs.npz --max-tokens 9 --overlong en=keep,de=drop",
        "plan lengths.npy --max-tokens 9 --scale 0",
        "compare lengths.npy --max-tokens 9 --num-buckets 0",
        "report plan.json",
        "simulate lengths.npy",
        "simulate lengths.npy plan.json --skew no.json",
        "simulate lengths.npy plan.json --order source",
        "measure lengths.npy --unit pages",
        "unknown",
    ],
)
def test_wrong_options_are_usage_errors(words):
    assert "Usage: " in run(*words.split(), code=2)


def test_a_truncated_file_is_named_as_such():
    data = gzip.compress(b"n\n5\n")[:-9]
    output = run("plan", "-", "--max-tokens", 999, given=data, code=1)
    assert output.startswith("Error: Compressed file ended")


def test_a_missing_matplotlib_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    output = run("measure", "lengths.npy", "--plot", "plot.png", code=1)
    assert "jaxbucket[plots]" in output
