"""Variables of a model that its forward pass updates, such as batch statistics.

Gradients do not update these variables. The loss computes their new values: an NNX
model assigns them, and a loss of a Linen module returns them. Each device computes new
values from its own rows, and a rule says how those of all devices are combined.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
from flax import nnx
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT

from jaxbucket.train.global_rows import Rows, WholeBatch, current_rows, in_single

Rule: TypeAlias = Literal["mean", "sum", "max", "first"]
# A Linen collection or a type of NNX variables.
Kind: TypeAlias = str | type[nnx.Variable]
# Path of a variable, in Python syntax -> its value.
Values: TypeAlias = dict[str, jax.Array]

DEFAULT_RULES: Mapping[Kind, Rule] = {"batch_stats": "mean", nnx.BatchStat: "mean"}


def check_rules(rules: Mapping[Kind, Rule] | None) -> dict[Kind, Rule]:
    """Returns the rules, and the default ones.

    Raises:
      ValueError: if a key is neither a collection nor a type of NNX variables, or a
        rule is unknown.
    """
    if not isinstance(rules, Mapping | None):
        raise ValueError(
            f"`variable_rules` is a {type(rules).__name__}. Pass a dict from Linen "
            'collections or NNX variable types to rules, such as {"codebook": "mean"}.'
        )
    for kind, rule in (rules or {}).items():
        is_type = isinstance(kind, type) and issubclass(kind, nnx.Variable)
        if not (is_type or isinstance(kind, str)):
            raise ValueError(
                f"`variable_rules` has the key {kind!r}. Use the name of a Linen "
                "collection, or a type of NNX variables such as `nnx.BatchStat`."
            )
        if is_overwritten(kind):
            raise ValueError(
                f"`variable_rules` has the key {kind!r}, whose new values are their "
                "gradients. They are combined without a rule; leave it out."
            )
        if rule not in get_args(Rule):
            raise ValueError(
                f"`variable_rules` has the rule {rule!r} for {_describe(kind)}. Choose "
                f"from {list(get_args(Rule))}."
            )
    return {**DEFAULT_RULES, **(rules or {})}


def values_after(variables: Any, model: Any, returned: Any) -> Values:
    """Returns the values of all variables after a loss was called.

    Args:
      variables: the variables before it was called.
      model: the model it was called with.
      returned: the collections it returned; None if it did not return any.

    Raises:
      ValueError: if the loss returned something other than collections of the model.
    """
    old_values = by_path(variables)
    if isinstance(model, nnx.Module):
        if returned:
            raise ValueError(
                "`loss_fn` returned variables of an NNX model. Assign them in the "
                "model instead; steps take their new values from there."
            )
        return old_values | by_path(nnx.state(model))
    if returned is None:
        return old_values
    if not isinstance(returned, Mapping):
        raise ValueError(
            f"`loss_fn` returned variables as {type(returned).__name__}. Return a dict "
            'of collections, such as {"batch_stats": ...}.'
        )
    new_values = by_path(dict(returned))
    if unknown := sorted(new_values.keys() - old_values.keys()):
        known = sorted({str(kind) for _, kind, _ in leaves_with_kind(variables)})
        raise ValueError(
            f"`loss_fn` returned the variable {unknown[0]}, which is not among the "
            f"collections of the state, {known}. Return only those that change, such "
            'as `{"batch_stats": new["batch_stats"]}`. To add a collection to the '
            "state, pass `variables=` to `create_state`, or `sample=` with a Linen "
            "module that initializes it."
        )
    return old_values | new_values


def combine_variables(
    rules: Mapping[Kind, Rule],
    variables: Any,
    new_values: Values,
    are_same: Callable[[], Mapping[str, bool]],
) -> Values:
    """Returns the new values of all variables with a rule, equal on all devices.

    Args:
      rules: collection or type -> rule.
      variables: the variables before the loss.
      new_values: their values after it.
      are_same: returns whether each variable is unchanged. It is only called if there
        is a new value of a variable without a rule, which may be equal to the old one.

    Raises:
      ValueError: if a variable without a rule has changed; or if a shape or dtype has
        changed or does not support its rule.
    """
    combined = {}
    for path, kind, old in leaves_with_kind(variables):
        rule, new = _rule(kind, rules), new_values[path]
        if rule is not None:
            _check_like(path, new, old, rule)
            combined[path] = _combine(current_rows(), rule, new, old)
        elif new is not old and not are_same()[path]:
            raise ValueError(
                f"`loss_fn` changes {path}, of {_describe(kind)}, and there is no rule "
                "for combining the values of several devices. Pass "
                f"`variable_rules={{{_literal(kind)}: rule}}` to `make_train_step`, "
                f"with a rule of {list(get_args(Rule))}.{_hint(kind)}"
            )
    return combined


def check_unchanged(
    function: str,
    variables: Any,
    new_values: Values,
    are_same: Callable[[], Mapping[str, bool]],
) -> None:
    """Raises a ValueError if variables are changed in evaluation or prediction.

    Args:
      function: the name of the function that was called.
      variables: the variables before it was called.
      new_values: their values after it.
      are_same: as for `combine_variables`.
    """
    for path, kind, old in leaves_with_kind(variables):
        if new_values[path] is not old and not are_same()[path]:
            raise ValueError(
                f"`{function}` changes {path}, of {_describe(kind)}, but the variables "
                "of the model are fixed in evaluation and prediction. Use the running "
                "averages of batch statistics and no dropout there (in a loss, if "
                "`keys is None`): call `model.eval()` on an NNX model, or "
                "`BatchNorm(use_running_average=True)`."
            )


def warn_if_not_returned(
    rules: Mapping[Kind, Rule], variables: Any, returned: Any
) -> None:
    """Warns if a loss that is trained does not return collections that have a rule."""
    if returned is None and isinstance(variables, dict):
        if updated := sorted(kind for kind in variables if kind in rules):
            warnings.warn(
                f"`loss_fn` does not return the variables {updated}, which therefore "
                "stay as they are. Return `(loss_sum, weight, sums, variables)`, with "
                "{} as variables if this is intended.",
                stacklevel=2,
            )


def with_values(variables: Any, values: Mapping[str, Any]) -> Any:
    """Returns the variables with other values for some of them."""
    return jax.tree.map_with_path(
        lambda path, old: values.get(jax.tree_util.keystr(path), old), variables
    )


def leaves_with_kind(variables: Any) -> Iterator[tuple[str, Kind, Any]]:
    """Yields the path, the kind and the value of every variable."""
    for path, variable in jax.tree.leaves_with_path(
        variables, is_leaf=lambda x: isinstance(x, nnx.Variable)
    ):
        kind = path[0].key
        if isinstance(variable, nnx.Variable):
            kind = type(variable)
        for inner, leaf in jax.tree.leaves_with_path(variable):
            yield jax.tree_util.keystr((*path, *inner)), kind, leaf


def is_overwritten(kind: Kind) -> bool:
    """Returns whether the gradients of a kind of variables are their new values."""
    # A Linen module in an NNX model has a variable type of the same name.
    name = kind if isinstance(kind, str) else kind.__name__
    return name == OVERWRITE_WITH_GRADIENT


def by_path(tree: Any) -> Values:
    """Returns the leaves of a tree by their path."""
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def _rule(kind: Kind, rules: Mapping[Kind, Rule]) -> Rule | None:
    """Returns the rule of a collection, or of a type or the nearest of its bases."""
    bases = kind.__mro__ if isinstance(kind, type) else [kind]
    return next((rules[base] for base in bases if base in rules), None)


def _check_like(path: str, new: Any, old: Any, rule: Rule) -> None:
    if (jnp.shape(new), jnp.result_type(new)) != (old.shape, old.dtype):
        raise ValueError(
            f"`loss_fn` changes {path} from {old.dtype}{list(old.shape)} to "
            f"{jnp.result_type(new)}{list(jnp.shape(new))}. Keep its shape and dtype, "
            "because steps are compiled for them."
        )
    floating = jnp.issubdtype(old.dtype, jnp.inexact)
    number = floating or jnp.issubdtype(old.dtype, jnp.integer)
    if (rule == "mean" and not floating) or (rule != "first" and not number):
        raise ValueError(
            f"`variable_rules` asks for the {rule} of {path}, which is {old.dtype}. "
            "Choose another rule, for instance 'first'."
        )


def _combine(rows: Rows, rule: Rule, new: Any, old: Any) -> Any:
    """Returns one value for the values of all devices."""
    if new is old:
        return new
    if jnp.issubdtype(old.dtype, jax.dtypes.prng_key):
        new, old_data = jax.random.key_data(new), jax.random.key_data(old)
        data = _combine(rows, rule, new, old_data)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(old))
    # Not weakly typed, because steps would be compiled again for the next state.
    new = jnp.asarray(new, old.dtype)
    if isinstance(rows, WholeBatch):
        return new
    add = in_single(rows.sum_over_rows)
    match rule:
        case "mean":
            return (add(new) / add(jnp.ones_like(new))).astype(old.dtype)
        case "sum":
            return old + add(new - old)
        case "max":
            return in_single(rows.max_over_rows)(new)
        case "first":
            is_first = rows.first_row(1) == 0
            # The sum of bools is an integer.
            return add(jnp.where(is_first, new, jnp.zeros_like(new))).astype(old.dtype)


def _describe(kind: Kind) -> str:
    return f"collection {kind!r}" if isinstance(kind, str) else f"type {_literal(kind)}"


def _literal(kind: Kind) -> str:
    return repr(kind) if isinstance(kind, str) else kind.__name__


def _hint(kind: Kind) -> str:
    if isinstance(kind, type) and issubclass(kind, nnx.RngState):
        return (
            " Better, draw dropout from `keys` (`dropout(x, rngs=key)`, row by row) "
            "instead of from the model's `nnx.Rngs`."
        )
    return ""
