import dataclasses
import json
import re

import numpy as np
import pytest

from jaxbucket import BatchSchedule, Bucket, BucketPlan, plan_buckets, report
from jaxbucket.base.sizes import Sizes

PLAN = BucketPlan((Bucket(8, 128), Bucket(2, 512)), max_tokens=1024)
PAIRS = BucketPlan((Bucket(8, {"a": 4, "b": 8}),), max_tokens=128)

# Name -> lengths and the error message.
BAD_LENGTHS = {
    "empty": ([], "`lengths` is empty: there are no examples"),
    "zero": ([3, 0], "`lengths[1]=0`: a length must be between 1"),
    "negative": ([3, 4, -7], "`lengths[2]=-7`: a length must be between 1"),
    "nan": ([3.0, np.nan], "`lengths[1]=nan` is not an integer. Measure the"),
    "ragged": ([[1], [2, 3]], "`lengths` is ragged. Pass one length per example"),
    "infinite": ([np.inf], "`lengths[0]=inf` is not an integer. Measure"),
    "fraction": ([2.0, 2.5], "`lengths[1]=2.5` is not an integer. Convert the"),
    "float": (np.ones(2), "dtype float64, not an integer dtype. Pass `lengths.astype"),
    "floats": ([2.0, 3.0], "Pass `np.asarray(lengths, np.int32)`"),
    "text": (["u0"], "`lengths[0]='u0'` is a string, but lengths must be integers."),
    "bool": ([True, False], "`lengths` has dtype bool"),
    "object": ([None, 3], "`lengths` has dtype object"),
    "scalar": (5, "`lengths` has shape (). Pass one length per example"),
    "table": ([[1, 2]], "`lengths` has shape (1, 2)"),
    "huge": ([2**31], "`lengths[0]=2147483648`: a length must be between 1"),
    "uint64": (np.array([2**63], np.uint64), "`lengths[0]=9223372036854775808`"),
}
FUNCTIONS = {
    "plan_buckets": lambda lengths: plan_buckets(lengths, max_tokens=4096),
    "assign": PLAN.assign,
    "BatchSchedule": lambda lengths: BatchSchedule(PLAN, lengths),
    "report": lambda lengths: report(PLAN, lengths),
}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("bad", BAD_LENGTHS)
def test_every_function_refuses_bad_lengths(function, bad):
    lengths, message = BAD_LENGTHS[bad]
    with pytest.raises(ValueError, match=re.escape(message)):
        FUNCTIONS[function](lengths)


@pytest.mark.parametrize("dtype", ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8"])
def test_every_integer_dtype_is_accepted(dtype):
    lengths = np.array([1, 127, 100], dtype)
    assert PLAN.assign(lengths).tolist() == [0, 0, 0]
    plan = BucketPlan((Bucket(1, 120), Bucket(1, 40_000)), max_tokens=40_000)
    assert plan.assign(lengths).tolist() == [0, 1, 0]


# Bucket


def test_buckets_compare_and_sort_by_value():
    assert Bucket(8, 128) == Bucket(batch_size=np.int64(8), seq_len=128)
    assert hash(Bucket(8, 128)) == hash(Bucket(8, 128))
    assert sorted([Bucket(8, 2), Bucket(2, 9)]) == [Bucket(2, 9), Bucket(8, 2)]
    assert (str(Bucket(8, 128)), Bucket(8, 128).num_tokens) == ("[8, 128]", 1024)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Bucket(8, 128).seq_len = 3


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0, "`seq_len=0` must be a positive integer"),
        (-3, "`seq_len=-3` must be a positive integer"),
        (True, "`seq_len=True` must be a positive integer"),
        (2.0, "`seq_len=2.0` is not an integer"),
        ("8", "`seq_len='8'` is not an integer"),
        (None, "`seq_len=None` is not an integer"),
    ],
)
def test_an_invalid_bucket_is_refused(value, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Bucket(8, value)


# BucketPlan


def test_assign_returns_the_shortest_bucket_that_holds_an_example(problem):
    plan, lengths = problem
    for length, index in zip(lengths, plan.assign(lengths), strict=True):
        holds = [k for k, bucket in enumerate(plan.buckets) if length <= bucket.seq_len]
        too_long = {"drop": -1, "truncate": len(plan) - 1}.get(plan.overlong)
        assert index == (holds[0] if holds else too_long)


def test_assign_returns_int16_for_long_arrays():
    lengths = np.random.default_rng(0).integers(1, 513, 600_000).astype(np.int32)
    index = PLAN.assign(lengths)
    assert index.dtype == np.int16
    np.testing.assert_array_equal(index, lengths > 128)


def test_assign_refuses_lengths_beyond_the_last_bucket():
    message = "`lengths[1]=513` is beyond the last bucket, `seq_len=512`. Plan with a"
    with pytest.raises(ValueError, match=re.escape(message)):
        PLAN.assign([512, 513])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"buckets": ()}, "`buckets` is empty. A plan needs at least one shape"),
        ({"max_tokens": 1023}, "Bucket [8, 128] holds 1024 tokens, more than `max_t"),
        ({"max_tokens": 0}, "`max_tokens=0` must be a positive integer"),
        ({"max_tokens": 1e6}, "`max_tokens=1000000.0` is not an integer"),
        ({"batch_size_multiple": 4}, "`batch_size=2` is not a multiple of `batch_siz"),
        ({"seq_len_multiple": 256}, "`seq_len=128` is not a multiple of `seq_len_mul"),
        (
            {"overlong": "cut"},
            "`overlong='cut'`: choose 'error', 'drop', 'truncate'",
        ),
        ({"buckets": PLAN.buckets[::-1]}, "seq_lens [512, 128]. Sort the buckets by"),
        ({"buckets": (Bucket(1, 8), Bucket(2, 8))}, "seq_lens [8, 8]. Sort the"),
    ],
)
def test_an_invalid_plan_is_refused(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        dataclasses.replace(PLAN, **changes)


@pytest.mark.parametrize(
    "changes",
    [{"max_tokens": {"a": 9, "b": 9}}, {"overlong": {"a": "drop", "b": "drop"}}],
)
def test_a_plan_of_one_sequence_takes_no_mappings(changes):
    message = r"`\w+=\{'a': .*\}` is a mapping, but the buckets have one sequence. Pass"
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(PLAN, **changes)


def test_a_plan_with_too_many_shapes_for_int16_is_refused():
    buckets = [Bucket(1, length) for length in range(1, 2**15 + 1)]
    plan = BucketPlan(buckets[:-1], max_tokens=2**15)
    assert plan.assign([2**15 - 1]).tolist() == [2**15 - 2]
    with pytest.raises(ValueError, match="`buckets` has 32768 shapes, more than 32767"):
        BucketPlan(buckets, max_tokens=2**15)


def test_the_remedy_for_a_bucket_over_budget_works():
    with pytest.raises(ValueError, match="Lower its `batch_size` to 7"):
        BucketPlan((Bucket(8, 128),), max_tokens=1000)
    BucketPlan((Bucket(7, 128),), max_tokens=1000)


def test_a_budget_below_the_smallest_batch_size_has_another_remedy():
    message = "than `max_tokens=500`. Lower its `seq_len`, or raise `max_tokens`."
    with pytest.raises(ValueError, match=re.escape(message)):
        BucketPlan((Bucket(8, 128),), max_tokens=500, batch_size_multiple=4)
    message = "`max_tokens['b']=1`. Lower its `seq_len`, or raise `max_tokens['b']`."
    with pytest.raises(ValueError, match=re.escape(message)):
        BucketPlan(PAIRS.buckets, max_tokens=Sizes({"a": 99, "b": 1}))


def test_from_json_inverts_to_json(problem):
    plan, _ = problem
    again = BucketPlan.from_json(plan.to_json())
    assert again == plan
    assert hash(again) == hash(plan)
    assert again.fingerprint == plan.fingerprint
    # The JSON uses the names of the attributes.
    assert json.loads(plan.to_json())["max_tokens"] == plan.max_tokens


def test_numpy_integers_do_not_change_the_fingerprint():
    plan = BucketPlan([Bucket(np.int32(8), np.int64(128))], max_tokens=np.int64(1024))
    assert plan.fingerprint == BucketPlan((Bucket(8, 128),), 1024).fingerprint


def test_the_fingerprint_changes_with_every_field():
    changed = [
        {"max_tokens": 1025},
        {"batch_size_multiple": 2},
        {"seq_len_multiple": 2},
        {"overlong": "drop"},
        {"overlong": "truncate"},
        {"overlong": "truncate_left"},
        {"overlong": "split"},
        {"buckets": (Bucket(7, 128), Bucket(2, 512))},
        {"buckets": (Bucket(8, 127), Bucket(2, 512))},
    ]
    plans = [PLAN, *(dataclasses.replace(PLAN, **change) for change in changed)]
    assert len({plan.fingerprint for plan in plans}) == len(plans)


def test_equal_policies_of_all_sequences_are_one_policy():
    plans = [
        BucketPlan((Bucket(8, {"a": 4, "b": 8}),), 1024, overlong=overlong)
        for overlong in ("drop", {"a": "drop", "b": "drop"})
    ]
    assert plans[0] == plans[1] and plans[0].fingerprint == plans[1].fingerprint
    assert BucketPlan.from_json(plans[1].to_json()) == plans[0]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": {"a": 99}}, "`max_tokens` has the sequences ['a'], but the fi"),
        ({"seq_len_multiple": {"b": 1}}, "bucket has ['a', 'b']: 'a' is missing. Use "),
        ({"overlong": {"a": "drop"}}, "`overlong` has the sequences ['a'], but the fi"),
        ({"overlong": "cut"}, "'error', 'drop', 'truncate' or 'truncate_left'."),
        ({"overlong": {"a": "cut", "b": "drop"}}, "'truncate' or 'truncate_left'."),
        ({"overlong": "split"}, "`overlong='split'` requires examples with one seque"),
    ],
)
def test_fields_that_do_not_fit_several_sequences_are_refused(fields, message):
    text = json.dumps({**json.loads(PAIRS.to_json()), **fields})
    with pytest.raises(ValueError, match=re.escape(message)):
        BucketPlan.from_json(text)


@pytest.mark.parametrize(
    ("lengths", "gap"),
    [({"a": [1]}, "'b' is missing"), ({}, "'a' and 'b' are missing")],
)
def test_forgotten_sequences_are_named(lengths, gap):
    message = f"`lengths` has the sequences {list(lengths)}, but the plan has ['a', 'b"
    with pytest.raises(ValueError, match=f"{re.escape(message)}'.*: {gap}"):
        PAIRS.assign(lengths)


def test_every_truncated_json_is_refused():
    text = PLAN.to_json()
    for size in range(len(text)):
        with pytest.raises(ValueError, match=r"not valid JSON.*Write the plan again"):
            BucketPlan.from_json(text[:size])


@pytest.mark.parametrize("text", ["[]", "3", "null", "{}", '{"format": "other"}'])
def test_foreign_json_is_refused(text):
    with pytest.raises(ValueError, match='no "format": "jaxbucket.BucketPlan"'):
        BucketPlan.from_json(text)


def edited(**changes) -> str:
    fields = {**json.loads(PLAN.to_json()), **changes}
    return json.dumps({k: v for k, v in fields.items() if v is not ...})


def test_json_of_an_unknown_version_is_refused():
    with pytest.raises(ValueError, match="version 4"):
        BucketPlan.from_json(edited(version=4))


def test_json_with_an_unknown_field_is_refused():
    message = r"unknown fields \['max_ratios'\]. Correct .* 'packed'\]"
    with pytest.raises(ValueError, match=message):
        BucketPlan.from_json(edited(max_ratios=2))
    noted = BucketPlan.from_json(edited(notes={"by": "seconds"}))
    assert noted == BucketPlan.from_json(edited())


@pytest.mark.parametrize("name", ["buckets", "max_tokens", "seq_len_multiple"])
def test_json_without_a_field_is_refused(name):
    with pytest.raises(ValueError, match=f"The plan has no field '{name}'"):
        BucketPlan.from_json(edited(**{name: ...}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"buckets": [[8]]}, "The plan's buckets are [[8]], not a list of [B, T]"),
        ({"buckets": [[8, 128, 1]]}, "not a list of [B, T]"),
        ({"buckets": 5}, "The plan's buckets are 5, not a list of [B, T]"),
        ({"buckets": [[8, "128"]]}, "`seq_len='128'` is not an integer"),
        ({"buckets": [[9, 128]]}, "holds 1152 tokens, more than `max_tokens=1024`"),
        ({"max_tokens": None}, "`max_tokens=None` is not an integer"),
        ({"overlong": []}, "`overlong=[]`: choose 'error', 'drop', 'truncate'"),
    ],
)
def test_json_of_an_invalid_plan_is_refused(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        BucketPlan.from_json(edited(**changes))


def test_buckets_must_have_the_type_bucket():
    with pytest.raises(ValueError, match=r"`buckets` contains \(8, 4\). Use `Bucket"):
        BucketPlan(((8, 4),), max_tokens=32)
