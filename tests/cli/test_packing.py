"""Packed rows, names of units and narrow terminals in the commands."""

import dataclasses
import json
import pathlib
import re

import matplotlib.image
import numpy as np
import pytest
from click.testing import CliRunner

from jaxbucket import BatchSchedule, BucketPlan, plan_packing, report
from jaxbucket.cli import main
from jaxbucket.packing import pack
from jaxbucket.plan import TransformerCost

LENGTHS = np.random.default_rng(0).lognormal(4, 1, 200).astype(np.int32) + 1
LIMITS = ("--max-tokens", 4096, "--num-buckets", 4, "--seq-len-multiple", 8)
WIDE = ("--width", 8, "--depth", 2)
LIMIT_VALUES = {"max_tokens": 4096, "num_buckets": 4, "seq_len_multiple": 8}


@pytest.fixture(autouse=True)
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("lengths.npy", LENGTHS)


def run(*args: object, code: int = 0) -> str:
    result = CliRunner().invoke(main, [str(arg) for arg in args])
    assert result.exit_code == code, result.output
    return result.output


def numbers(*args: object) -> dict:
    return json.loads(run(*args, "--json"))


def one_line(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize(
    ("pack_option", "block_sparse"),
    [
        ("always", True),
        ("auto", False),
        ("never", True),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (("always", False), ("auto", True), ("never", False))
        ),
    ],
)
def test_plan_pack_equals_plan_packing(pack_option, block_sparse):
    if pack_option == "never" and block_sparse:
        return
    options = (*LIMITS, *WIDE, "--pack", pack_option)
    options += ("--block-sparse",) if block_sparse else ()
    result = numbers("plan", "lengths.npy", *options)
    output = run("plan", "lengths.npy", *options, "-o", "plan.json", "--plot", "p.png")
    expected = plan_packing(
        LENGTHS,
        pack=pack_option,
        cost_fn=TransformerCost(8, 2),
        block_sparse=block_sparse,
        **LIMIT_VALUES,
    )
    plan = BucketPlan.from_json(pathlib.Path("plan.json").read_text())
    assert plan == expected.plan
    assert result["report"] == json.loads(json.dumps(expected.report.to_dict()))
    assert result["fingerprint"] == plan.fingerprint
    assert matplotlib.image.imread("p.png").std() > 0.1
    if pack_option == "never":
        assert "packing" not in result and "Rows are" not in output
        return
    packing = result["packing"]
    why = packing.pop("reason")
    assert packing == json.loads(expected.to_json())
    assert why in one_line(output)
    assert why.startswith(f"Rows are {'packed' if expected.is_packed else 'padded'}: ")
    attention = "within examples." if block_sparse else "over whole rows."
    assert f"The cost assumes attention {attention}" in why


def test_the_table_of_a_packed_plan_has_the_numbers_of_the_json():
    options = ("lengths.npy", *LIMITS, "--pack", "always")
    table = run("plan", *options)
    result = numbers("plan", *options)
    epoch = result["report"]
    assert epoch["packed_examples"] == len(LENGTHS)
    assert (
        f"{epoch['steps_per_epoch']:,} steps per epoch, {epoch['real_tokens']:,} real "
        f"tokens in {epoch['padded_tokens']:,}."
    ) in table
    assert (
        f"{len(LENGTHS):,} examples are packed in {epoch['examples']:,} rows" in table
    )
    lines = [line.split() for line in table.splitlines()]
    for bucket in epoch["buckets"]:
        shape = [str(bucket["batch_size"]), str(bucket["seq_len"])]
        (line,) = [line for line in lines if line[:2] == shape]
        assert line[2] == f"{bucket['examples']:,}"
        assert line[6] == f"{bucket['padding']:.1%}"
    costs = result["packing"]["epoch_costs"]
    less = 1 - costs["packed"] / costs["padded"]
    assert (
        f"Rows are packed: an epoch costs {costs['packed']:,.0f} tokens, {less:.1%} "
        f"less than the {costs['padded']:,.0f} tokens with padded rows. This cost does "
        "not include attention."
    ) in one_line(table)


def test_rows_that_cost_more_packed_stay_padded():
    # Neither leaves room for a second example.
    np.save("lengths.npy", np.repeat([96, 128], 64))
    options = ("lengths.npy", "--max-tokens", 1024, *WIDE, "--pack")
    result = numbers("plan", *options, "auto")
    assert not result["packing"]["packed"]
    assert result["packing"]["reason"].startswith("Rows are padded: an epoch costs ")
    assert "packed_examples" in result["report"]
    assert result["report"]["packed_examples"] == 0
    forced = numbers("plan", *options, "always")["packing"]
    assert forced["packed"] and forced["reason"].startswith("Rows are packed: ")


@pytest.mark.parametrize("overlong", ["drop", "truncate", "truncate_left", "split"])
def test_too_long_examples_are_counted_and_the_rest_is_packed(overlong):
    options = ("--max-seq-len", 96, "--overlong", overlong)
    command = ("plan", "lengths.npy", *LIMITS, *options)
    packed = numbers(*command, "--pack", "always")
    padded = numbers(*command)
    names = ["real_tokens", "dropped_examples", "truncated_examples"]
    names += ["truncated_tokens", "split_examples", "chunks"]
    for name in names:
        assert packed["report"][name] == padded["report"][name]
    plan = BucketPlan.from_json(json.dumps(packed["plan"]))
    assert plan.overlong == overlong and plan.max_seq_len <= 96
    assert packed["report"]["packed_examples"] == padded["report"]["examples"]


def test_equal_costs_are_called_equal():
    np.save("equal.npy", np.array([512] * 8))
    options = ("--max-tokens", 1024, "--pack", "always")
    text = one_line(run("plan", "equal.npy", *options))
    assert "costs 4,096 tokens, as much as the 4,096 tokens with padded rows" in text


def test_rows_that_cost_as_much_are_packed_because_they_mix_lengths():
    np.save("two.npy", np.repeat([256, 512], [32, 16]))
    result = numbers("plan", "two.npy", "--max-tokens", 2048, "--pack", "auto")
    costs = result["packing"]["epoch_costs"]
    assert costs["packed"] == costs["padded"] and result["packing"]["packed"]
    assert (
        "tokens with padded rows. Batches of packed rows mix more lengths."
        in (result["packing"]["reason"])
    )


def test_a_job_packs_rows_of_the_plan():
    result = numbers("plan", "lengths.npy", *LIMITS, "--pack", "always")
    plan = BucketPlan.from_json(json.dumps(result["plan"]))
    packing = pack(LENGTHS, plan.boundaries)
    schedule = BatchSchedule(plan, LENGTHS, packing=packing)
    # Rows of the same T may be packed in a second way.
    assert abs(len(schedule) - result["report"]["steps_per_epoch"]) <= 1


def test_a_report_packs_the_lengths_of_a_packed_plan():
    options = ("--max-seq-len", 96, "--overlong", "truncate", "--pack", "always")
    command = ("plan", "lengths.npy", *LIMITS, *options, "-o", "plan.json")
    expected = numbers(*command)["report"]
    command = ("report", "plan.json", "lengths.npy")
    assert numbers(*command)["report"] == expected
    options = ("--remainder", "pad", "--accumulate", 2, "--plot", "r.png")
    result = numbers(*command, *options)["report"]
    plan = BucketPlan.from_json(pathlib.Path("plan.json").read_text())
    assert plan.packed
    plan = plan.unpacked
    rows = pack(np.minimum(LENGTHS, 96), plan.boundaries).row_lengths
    epoch = report(plan, rows, remainder="pad", accumulate=2)
    assert result["padded_tokens"] == epoch.padded_tokens
    assert result["truncated_examples"] == int((LENGTHS > 96).sum())
    assert matplotlib.image.imread("r.png").std() > 0.1


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (("--min-batch-size", 2), "`--min-batch-size`"),
        (("--max-batch-size", 8), "`--max-batch-size`"),
        (("--accumulate", 2), "`--accumulate`"),
        (
            ("--max-batch-size", 8, "--accumulate", 2),
            "`--max-batch-size` and `--accumulate`",
        ),
    ],
)
def test_limits_that_packing_does_not_support_are_named(options, names):
    for pack_option in ("auto", "always"):
        command = (*LIMITS, *options, "--pack", pack_option)
        output = run("plan", "lengths.npy", *command, code=1)
        assert (
            f"Error: `--pack {pack_option}` cannot be combined with {names}." in output
        )
    message = f"cannot be combined with {names}."
    assert message in run("compare", "lengths.npy", *command, code=1)
    result = numbers("compare", "lengths.npy", *LIMITS, *options)
    assert (
        result["note"]
        == f"Packed rows are not compared: packing does not support {names}."
    )
    assert not any(plan["packed"] for plan in result["plans"])
    table = run("compare", "lengths.npy", *LIMITS, *options)
    assert result["note"] in one_line(table)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--shapes", "8x512"), "`--pack auto` cannot be combined with `--shapes`."),
        (
            ("--boundaries", "512"),
            "`--pack auto` cannot be combined with `--boundaries`.",
        ),
        (
            ("--num-buckets", "auto", "--compile-seconds", 1),
            "`--pack auto` cannot be combined with `--num-buckets auto`. Remove one of",
        ),
        (("--max-tokens", "1,2"), "cannot be combined with `--max-tokens 1,2`."),
    ],
)
def test_other_ways_to_choose_shapes_are_not_packed(options, message):
    command = ("plan", "lengths.npy", "--max-tokens", 4096, *options, "--pack", "auto")
    assert message in run(*command, code=1)


@pytest.mark.parametrize("option", ["--block-sparse", "--mixing=0"])
def test_options_of_packed_rows_need_pack(option):
    output = run("plan", "lengths.npy", *LIMITS, option, code=1)
    assert f"`{option.split('=')[0]}` requires `--pack`." in output


def test_mixing_is_that_of_plan_packing():
    options = ("lengths.npy", *LIMITS, *WIDE, "--pack", "always", "--mixing")
    fingerprints = set()
    for mixing in (0, 1):
        expected = plan_packing(
            LENGTHS,
            pack="always",
            cost_fn=TransformerCost(8, 2),
            mixing=mixing,
            **LIMIT_VALUES,
        )
        result = numbers("plan", *options, mixing)
        assert result["fingerprint"] == expected.plan.fingerprint
        fingerprints.add(result["fingerprint"])
    assert len(fingerprints) == 2
    assert "2.0 is not in the range 0<=x<=1" in run("plan", *options, 2, code=2)


@pytest.mark.parametrize(
    "cost",
    [
        (*WIDE, "--block-sparse"),
        *(pytest.param(x, marks=pytest.mark.exhaustive) for x in ((), WIDE)),
    ],
)
def test_packed_rows_are_compared_with_padded_plans(cost):
    command = ("compare", "lengths.npy", *LIMITS, *cost)
    result = numbers(*command)
    table = run(*command, "--plot", "c.png")
    plans = {plan["name"]: plan for plan in result["plans"]}
    costs = [plan["report"]["epoch_cost"] for plan in result["plans"]]
    assert costs == sorted(costs)
    assert {plan["report"]["cost_unit"] for plan in result["plans"]} == {
        "FLOP" if cost else "tokens"
    }
    options = {
        "cost_fn": TransformerCost(8, 2) if cost else None,
        "block_sparse": "--block-sparse" in cost,
    }
    for name, size in (("packed", 4), ("packed, one shape", 1)):
        values = {**LIMIT_VALUES, "num_buckets": size}
        expected = plan_packing(LENGTHS, pack="always", **values, **options)
        if name not in plans:
            # The first has one shape already.
            assert plans["packed"]["shapes"] == 1
            continue
        assert plans[name]["packed"]
        assert plans[name]["plan"] == json.loads(expected.plan.to_json())
        assert plans[name]["report"] == json.loads(
            json.dumps(expected.report.to_dict())
        )
        (line,) = [x for x in table.splitlines() if x.startswith(f"{name}  ")]
        epoch = plans[name]["report"]
        assert f"{epoch['padding']:.1%}" in line and line.rstrip().endswith("x")
        assert f"{epoch['steps_per_epoch']:,}" in line.split()
    assert {plan["report"]["real_tokens"] for plan in plans.values()} == {LENGTHS.sum()}
    assert "attention must use segment ids to stay within each" in result["note"]
    assert result["note"] in one_line(table)
    assert matplotlib.image.imread("c.png").std() > 0.1
    without = numbers(*command, "--pack", "never")
    assert [plan for plan in result["plans"] if not plan["packed"]] == without["plans"]
    assert not without["note"]


def test_packed_rows_have_the_remainder_that_is_asked_for():
    command = ("compare", "lengths.npy", *LIMITS, "--remainder", "pad")
    plans = {plan["name"]: plan for plan in numbers(*command)["plans"]}
    expected = plan_packing(LENGTHS, pack="always", **LIMIT_VALUES)
    assert expected.packing is not None
    rows = expected.packing.row_lengths
    plan = expected.plan.unpacked
    epoch = report(plan, rows, remainder="pad")
    epoch = dataclasses.replace(epoch, packed_examples=len(LENGTHS))
    assert plans["packed"]["report"] == json.loads(epoch.to_json())


def test_a_plan_for_packed_rows_is_not_compared_as_a_padded_plan():
    run("plan", "lengths.npy", *LIMITS, "--pack", "always", "-o", "packed.json")
    command = ("compare", "lengths.npy", *LIMITS, "--plan", "packed.json")
    message = "`--plan packed.json` is for packed rows, which `--pack always` compares."
    assert message in one_line(run(*command, code=1))


def test_rows_that_cannot_be_packed_do_not_stop_a_comparison():
    np.save("lengths.npy", np.array([5, 1 << 27], np.int32))
    command = ("compare", "lengths.npy", "--max-tokens", 1 << 27)
    result = numbers(*command)
    assert result["note"].startswith("Packed rows are not compared: `max_seq_len=")
    assert "Use shorter rows" in run(*command, "--pack", "always", code=1)


# Names of units


def test_tables_and_plots_use_the_given_unit():
    run("plan", "lengths.npy", *LIMITS, "-o", "plan.json")
    for command in (
        ("plan", "lengths.npy", *LIMITS),
        ("plan", "lengths.npy", *LIMITS, "--pack", "auto"),
        ("compare", "lengths.npy", *LIMITS),
        ("report", "plan.json", "lengths.npy"),
    ):
        table = run(*command, "--unit", "bytes")
        # The name of a rule.
        assert "tokens" not in table.replace("equal tokens", "")
        assert "bytes" in table
        result, plain = numbers(*command, "--unit", "bytes"), numbers(*command)
        named = json.dumps(result)
        assert '"unit": "bytes"' in named and '"unit": "tokens"' not in named
        if "--pack" in command:
            # The sentence has the name, too.
            for packing in (result["packing"], plain["packing"]):
                del packing["reason"]
            named = json.dumps(result)
        assert named.replace('"unit": "bytes"', '"unit": "tokens"') == json.dumps(plain)


def test_an_empty_unit_is_refused():
    output = run("plan", "lengths.npy", *LIMITS, "--unit", " ", code=2)
    assert "Pass the name of the unit, for example bytes" in output


# Widths


ANSI = re.compile(r"\x1b\[[0-9;]*m")


@pytest.mark.parametrize(
    "environment",
    [
        {"NO_COLOR": "1"},
        pytest.param({"FORCE_COLOR": "1"}, marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.exhaustive
def test_tables_of_large_numbers_fit_80_columns(environment, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("jaxbucket.cli.show._PAGE", 80)
    lengths = np.random.default_rng(0).lognormal(7, 1, 300_000).clip(1, 8192)
    np.save("many.npy", np.ceil(lengths / 128).astype(np.int32) * 128)
    costs = (*WIDE, "--per-second", 1e9)
    limits = ("--max-tokens", 1 << 20, "--num-buckets", 6)
    run("plan", "many.npy", *limits, *costs, "-o", "plan.json")
    for command in (
        ("plan", "many.npy", *limits, *costs, "--pack", "always"),
        ("compare", "many.npy", *limits, *costs),
        ("compare", "many.npy", *limits),
        ("report", "plan.json", "many.npy", "--remainder", "pad"),
    ):
        output = ANSI.sub("", run(*command))
        assert max(map(len, output.splitlines())) <= 80
        assert "…" not in output
