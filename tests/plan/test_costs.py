"""Costs of a step in tokens, operations and seconds."""

import dataclasses
import pickle

import numpy as np
import pytest

from jaxbucket import Bucket
from jaxbucket.plan import StepTime, TokenCost, TransformerCost
from jaxbucket.plan.costs import unit_of

# As proposed by `calibration_shapes`: six shapes with equal tokens, and a smaller one.
SHAPES = [Bucket(128, 32), Bucket(64, 64), Bucket(32, 128), Bucket(16, 256)]
SHAPES += [Bucket(8, 512), Bucket(4, 1024), Bucket(32, 32)]


def times_of(cost, shapes=SHAPES):
    return {shape: cost(shape.batch_size, shape.seq_len) for shape in shapes}


def terms_of(cost: StepTime) -> tuple[float, float, float]:
    return cost.per_step, cost.per_token, cost.per_pair


def test_token_cost_counts_padding_and_converts_to_seconds():
    assert TokenCost()(3, 50) == 150
    assert TokenCost(tokens_per_second=100)(3, 50) == pytest.approx(1.5)
    assert TokenCost().unit == "tokens"
    assert TokenCost(tokens_per_second=100).unit == "s"


def matmuls(batch_size, seq_len, width, depth, vocab_size):
    """Yields (rows, inner, columns) of every matrix product of a forward pass."""
    rows = batch_size * seq_len
    for _ in range(depth):
        for columns in (width, width, width, width):
            yield rows, width, columns  # query, key, value and output
        for _ in range(batch_size):
            yield seq_len, width, seq_len  # attention scores
            yield seq_len, seq_len, width  # weighted values
        yield rows, width, 4 * width
        yield rows, 4 * width, width
    yield rows, width, vocab_size


@pytest.mark.parametrize("shape", [(1, 1), (2, 7), (5, 64), (1, 300)])
@pytest.mark.parametrize("model", [(8, 1, 0), (16, 3, 257), (4, 2, 11)])
def test_transformer_cost_counts_all_matrix_products(shape, model):
    width, depth, vocab_size = model
    forward = sum(2 * m * k * n for m, k, n in matmuls(*shape, *model))
    cost = TransformerCost(width, depth, vocab_size)
    # The backward pass has two products for each: for its inputs and for its weights.
    assert cost(*shape) == 3 * forward
    assert cost.unit == "FLOP"
    timed = TransformerCost(width, depth, vocab_size, flops_per_second=1e6)
    assert timed(*shape) == pytest.approx(3e-6 * forward)
    assert timed.unit == "s"


@pytest.mark.parametrize(
    "cost",
    [
        StepTime(0.02, 6e-5, 8e-8),
        StepTime(0.0, 6e-5, 8e-8),
        StepTime(0.5, 0.0, 8e-8),
        StepTime(0.02, 6e-5, 0.0),
        StepTime(0.0, 0.0, 1e-7),
        StepTime(0.0, 1e-12, 1e-12),
        StepTime(3e5, 0.0, 0.0),
    ],
)
def test_fit_recovers_known_terms(cost):
    fitted = StepTime.fit(times_of(cost))
    np.testing.assert_allclose(terms_of(fitted), terms_of(cost), rtol=1e-6)
    assert fitted.error < 1e-9
    assert fitted(20, 200) == pytest.approx(cost(20, 200))


@pytest.mark.parametrize("seed", range(4))
def test_predictions_are_accurate_despite_noise(seed):
    rng = np.random.default_rng(seed)
    true = StepTime(*rng.uniform(0, [0.05, 1e-4, 1e-7]))
    noise = 0.03
    measured = {
        shape: seconds * (1 + noise * rng.uniform(-1, 1))
        for shape, seconds in times_of(true).items()
    }
    fitted = StepTime.fit(measured)
    assert min(terms_of(fitted)) >= 0
    assert 0 < fitted.error < 6 * noise
    for shape in ((60, 64), (20, 192), (7, 512), (4, 768), (4, 96)):
        assert fitted(*shape) == pytest.approx(true(*shape), rel=4 * noise)


def test_a_measured_shape_has_its_measured_time():
    rng = np.random.default_rng(0)
    measured = {shape: float(rng.uniform(0.1, 1)) for shape in SHAPES}
    fitted = StepTime.fit(measured)
    assert times_of(fitted) == measured
    names = ("per_step", "per_token", "per_pair", "error")
    values = (*terms_of(fitted), fitted.error)
    assert fitted.to_dict() == dict(zip(names, values, strict=True))
    assert fitted == pickle.loads(pickle.dumps(fitted))
    assert hash(fitted) == hash(dataclasses.replace(fitted, measured={}))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_error_is_nan_without_more_shapes_than_terms(count):
    fitted = StepTime.fit(dict(list(times_of(StepTime(1, 1, 1)).items())[:count]))
    assert np.isnan(fitted.error)
    assert fitted.to_dict()["error"] is None


@pytest.mark.parametrize(("order", "scale"), [(1, 1), (-1, 1), (-1, 1e-9), (1, 1e9)])
def test_the_order_and_unit_of_times_do_not_matter(order, scale):
    rng = np.random.default_rng(0)
    measured = {shape: float(rng.uniform(0.1, 1)) for shape in SHAPES}
    others = {shape: scale * time for shape, time in [*measured.items()][::order]}
    np.testing.assert_allclose(
        terms_of(StepTime.fit(others)),
        scale * np.array(terms_of(StepTime.fit(measured))),
        rtol=1e-6,
    )


def test_costs_have_a_unit():
    assert unit_of(StepTime(1, 0, 0)) == "s"
    assert unit_of(lambda batch_size, seq_len: 1) == "cost"


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("tokens_per_second", lambda: TokenCost(tokens_per_second=0)),
        ("width", lambda: TransformerCost(0, 1)),
        ("depth", lambda: TransformerCost(8, 1.5)),  # type: ignore
        ("vocab_size", lambda: TransformerCost(8, 1, -2)),
        ("flops_per_second", lambda: TransformerCost(8, 1, flops_per_second=-1.0)),
        ("per_step", lambda: StepTime(-1, 1, 1)),
        ("seconds", lambda: StepTime.fit({})),
        ("seconds", lambda: StepTime.fit({Bucket(1, 8): 0})),
        ("seconds", lambda: StepTime.fit({(1, 8): 0.3})),  # type: ignore
    ],
)
def test_an_invalid_cost_is_refused(name, make):
    with pytest.raises(ValueError, match=f"`{name}"):
        make()


@pytest.mark.parametrize("count", [4, 9, 17])
def test_the_fit_has_the_least_absolute_errors(count):
    # Slightly different terms are never better: the problem is convex.
    rng = np.random.default_rng(count)
    shapes = [*SHAPES, *(Bucket(int(b), 96) for b in rng.integers(1, 99, 20))][:count]
    true = StepTime(0.01, 2e-5, 5e-9)
    exact = times_of(true, shapes)
    measured = {x: time * float(rng.uniform(0.7, 1.6)) for x, time in exact.items()}
    fitted = StepTime.fit(measured)

    def errors(terms):
        cost = StepTime(*terms)
        predicted = times_of(cost, shapes)
        return sum(abs(predicted[x] / time - 1) for x, time in measured.items())

    least = errors(terms_of(fitted))
    for size in (1e-4, 1e-2, 0.3):
        for _ in range(50):
            changed = np.array(terms_of(fitted)) * (1 + size * rng.standard_normal(3))
            changed += size * rng.uniform(0, 1, 3) * np.array(terms_of(true))
            assert errors(np.maximum(changed, 0)) >= least - 1e-6
