"""Messages for invalid counts, tokens and sizes of accumulated metrics."""

import math
import re

import pytest

from jaxbucket.data import AccumulatedMetric, measure_difficulty, token_rarity


def count_of(value):
    return AccumulatedMetric(lambda x: value, lambda x, total: 0.0, 3)


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (count_of((1, 2, 3)), "returned a tuple of 3. Return (ids, counts)."),
        (count_of([1, 2]), "counts of int64[2]. Return integers [3], or a tuple (ids"),
        (count_of([0.5] * 3), "`count_fn` returned counts of float64[3]. Return integ"),
        (count_of([0, -1, 2]), "returned counts from -1 to 2. Return integers from 0"),
        (count_of([0, 0, 2**31]), "counts from 0 to 2147483648. Return integers from"),
        (count_of(([3], [1])), "id 3, which is not from 0 to 2. Fix the function, or "),
        (count_of(([-1], [1])), "id -1, which is not from 0 to 2. Fix the function, o"),
        (count_of(([0.5], [1])), "returned ids of float64[1]. Return integers [n]."),
        (count_of(([[1]], [1])), "returned ids of int64[1, 1]. Return integers [n]."),
        (count_of(([1, 2], [1])), "counts of int64[1]. Return integers [2], or a tup"),
        (
            AccumulatedMetric(lambda x: x["words"], lambda x, total: 0.0, 3),
            "`source[0]`, metric 'm' cannot be measured: KeyError: 'words'",
        ),
        (
            AccumulatedMetric(lambda x: [1] * 3, lambda x, total: math.nan, 3),
            "`source[0]`, metric 'm', has difficulty nan, which is not a finite 32-bit",
        ),
        (
            AccumulatedMetric(lambda x: [1] * 3, lambda x, total: total.fill(0), 3),
            "`source[0]`, metric 'm': assignment destination is read-only",
        ),
        (
            token_rarity("words", vocab_size=3),
            "`source[0]`, metric 'm': the example has features ['empty', 'real', "
            "'tokens'], but no 'words'. Name one of them as `feature`.",
        ),
        (token_rarity("empty", vocab_size=3), "'empty' has no tokens. Remove empty ex"),
        (token_rarity("real", vocab_size=3), "'real' is float64[1]. Name a feature of"),
        (
            token_rarity(vocab_size=7),
            "'tokens' has tokens from 3 to 7, but `vocab_size=7`. Pass a larger `voc",
        ),
    ],
)
def test_invalid_counts_and_tokens_are_refused(metric, message):
    source = [{"tokens": [3, 7], "real": [0.5], "empty": []}]
    with pytest.raises(ValueError, match=re.escape(message)):
        measure_difficulty(source, {"m": metric}, progress=False)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: token_rarity(vocab_size=0), "`vocab_size=0` must be a positive inte"),
        (lambda: AccumulatedMetric(len, max, 1.5), "`size=1.5` is not an integer."),
        (
            lambda: AccumulatedMetric(5, max, 3),
            "`count_fn=5` is not a function. Pass a function of an example",
        ),
        (
            lambda: AccumulatedMetric(len, 6, 3),
            "`score_fn=6` is not a function. Pass a function of an example",
        ),
    ],
)
def test_invalid_arguments_are_refused(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()
