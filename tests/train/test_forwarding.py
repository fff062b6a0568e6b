"""Results that are arguments, passed on unchanged."""

import jax
import jax.numpy as jnp
import pytest

from jaxbucket.train.forwarding import are_forwarded


def scanned(body):
    def function(values):
        x, y, zs = values
        (x, y), zs = jax.lax.scan(body, (x, y), zs)
        return x, y, zs

    return function


CASES = {
    "computed": (lambda v: (v[0] + 0, v[1] * 2, v[2]), [False, False, True]),
    "exchanged": (lambda v: (v[1], v[0], v[2]), [False, False, True]),
    "constant": (lambda v: (1.0, v[1], jnp.ones(3)), [False, True, False]),
    "jit": (jax.jit(lambda v: (v[0], v[1] + 1, v[2])), [True, False, True]),
    "checkpoint": (
        jax.checkpoint(lambda v: (v[0], jnp.sin(v[1]), v[2])),
        [True, False, True],
    ),
    "nested": (
        lambda v: jax.jit(jax.checkpoint(lambda x, y, z: (y + 1, x, z)))(
            v[1], v[0], v[2]
        ),
        [False, True, True],
    ),
    "scan": (scanned(lambda xy, z: ((xy[0], xy[1] + z), z)), [True, False, True]),
    "scan that exchanges": (
        scanned(lambda xy, z: ((xy[1], xy[0]), z)),
        [False, False, True],
    ),
    "scans that exchange twice": (
        lambda v: scanned(lambda xy, z: ((xy[1], xy[0]), z))(
            scanned(lambda xy, z: ((xy[1], xy[0]), z))(v)
        ),
        [False, False, True],
    ),
    "scan that stacks": (
        lambda v: (
            v[0],
            v[1],
            jax.lax.scan(lambda c, _: (c, c), v[0], None, length=3)[1],
        ),
        [True, True, False],
    ),
    "branch": (
        lambda v: jax.lax.cond(v[0] > 0, lambda: (*v,), lambda: (v[1], v[0], v[2])),
        [False, False, True],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_which_results_are_arguments(case):
    function, expected = CASES[case]
    assert are_forwarded(function, [1.0, 2.0, jnp.arange(3.0)]) == expected
