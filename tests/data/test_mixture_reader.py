"""The options of a mixture whose components have sources of their own."""

import re

import numpy as np
import pytest

from jaxbucket import BatchSchedule, Bucket, BucketPlan, Mixture, batch_dataset

PLAN = BucketPlan((Bucket(2, 4),), max_tokens=8)
PAIRS = BucketPlan((Bucket(1, {"a": 4, "b": 4}),), max_tokens=8)


def mixture_of(names, schedule=None) -> Mixture:
    schedule = schedule or BatchSchedule(PLAN, [4, 3])
    return Mixture(dict.fromkeys(names, schedule), dict.fromkeys(names, 1))


def sources_of(names, *features) -> dict:
    examples = [{x: np.ones(n, int) for x in features} for n in (4, 3)]
    return dict.fromkeys(names, examples)


def unchanged(example, rng):
    return example


@pytest.mark.parametrize(
    "option",
    [
        {"transform": {"a": unchanged}},
        {"transform": {"a": unchanged, "c": None}},
        {"sequences": {"a": ["x"]}},
        {"pad_value": {"a": 1}},
        {"pad_value": {"a": {"x": 1}}},
    ],
)
def test_an_option_for_some_components_is_refused(option):
    ((label, value),) = option.items()
    message = (
        f"`{label}` has the names {list(value)}, and the mixture has ['a', 'b', 'c']. "
        "Name every component."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        batch_dataset(sources_of("abc", "x"), mixture_of("abc"), **option)


def test_names_of_some_components_may_be_names_of_features():
    dataset = batch_dataset(
        sources_of("abc", "a", "b", "x"), mixture_of("abc"), pad_value={"a": 7, "b": 8}
    )
    features = dataset[0].features
    assert [features[x].max() for x in "abx"] == [7, 8, 1]
    # A transform may add the features.
    dataset = batch_dataset(
        sources_of("ab", "x"),
        mixture_of("ab"),
        pad_value={"a": 7},
        transform=lambda example, rng: {**example, "a": example["x"]},
    )
    assert dataset[0].features["a"].max() == 7


def test_names_of_some_components_may_be_names_of_sequences():
    pairs = BatchSchedule(PAIRS, {"a": [4, 3], "b": [4, 3]})
    dataset = batch_dataset(
        sources_of("abc", "a", "b", "x"),
        mixture_of("abc", pairs),
        sequences={"a": ["x"], "b": []},
    )
    assert dataset[0].features["x"].shape == (1, 4)
    # One of two sequences is not refused as one of three components.
    with pytest.raises(ValueError, match=r"must be a mapping .* each of \['a', 'b'\]"):
        _ = batch_dataset(
            sources_of("abc", "a", "b"),
            mixture_of("abc", pairs),
            sequences={"a": []},
        )[0]


def test_an_example_that_cannot_be_read_is_named_before_its_features():
    sources = sources_of("ab", "x") | {"b": [{"x": 3}, {"x": 3}]}
    with pytest.raises(ValueError, match=r"`source\[0\]`, the template") as error:
        batch_dataset(sources, mixture_of("ab"), pad_value={"a": 1})
    assert "This is the component 'b' of the mixture." in error.value.__notes__
