"""The training state: step, parameters, other variables and optimizer state."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx
from flax.core import unfreeze
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxbucket.base.checks import check_function, check_type
from jaxbucket.sharding.mesh import check_mesh, has_shapes, put, replicate
from jaxbucket.train.linen_variables import init_linen

_PARAMETERS = (
    *(jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.number, float, int),
    nnx.Param,
)
# The number of paths that a message lists.
_NUM_PATHS = 3


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["step", "params", "frozen", "variables", "opt_state"],
    meta_fields=["graphdef"],
)
@dataclasses.dataclass(frozen=True)
class TrainState:
    """The state of training, which a train step updates.

    Attributes:
      step: `[]` int32, the number of steps done, including skipped updates.
      params: the parameters that are trained. With `wrt`, a plain tree has None in the
        place of all others.
      frozen: the parameters that `wrt` does not select; () if all are trained.
      variables: the other variables of the model, which only its forward pass updates:
        a dict of collections for a Linen module, or the rest of an NNX model; () for
        plain parameters.
      opt_state: the state of the optimizer.
      graphdef: the structure of an NNX model; None for others.
    """

    step: jax.Array
    params: Any
    frozen: Any
    variables: Any
    opt_state: Any
    graphdef: Any = None

    @property
    def model(self) -> Any:
        """The model with the current parameters, as losses receive it.

        It is an NNX module, or the plain parameters; or, if there are collections of
        variables, a dict `{"params": ..., "batch_stats": ...}` for `module.apply`.
        """
        if self.graphdef is not None:
            # Copied, because a loss may assign variables of the model.
            states = (self.params, self.frozen, self.variables)
            return nnx.merge(self.graphdef, *states, copy=True)
        params = _joined(self.params, self.frozen)
        if isinstance(self.variables, tuple):
            return params
        return {"params": params, **self.variables}

    @property
    def has_optimizer(self) -> bool:
        """Whether the state was made with an optimizer, to be trained."""
        # Empty states of optax are instances of subclasses.
        return type(self.opt_state) is not tuple or bool(self.opt_state)


def create_state(
    model: Any,
    tx: optax.GradientTransformation | None = None,
    mesh: Mesh | None = None,
    *,
    sample: Any = None,
    rngs: Any = None,
    variables: Mapping[str, Any] | None = None,
    wrt: Any = None,
    sharding: Callable[[tuple[Any, ...], Any], PartitionSpec] | None = None,
) -> TrainState:
    """Returns the state before the first step.

    Example:
      >>> import jaxbucket as jb
      >>> mesh = jb.data_mesh(jax.devices()[:1])
      >>> state = create_state({"w": jnp.ones(3)}, optax.sgd(0.1, momentum=0.9), mesh)
      >>> print(state.step, state.params["w"], state.params["w"].sharding.mesh == mesh)
      0 [1. 1. 1.] True

      A Linen module is initialized on the mesh. Losses receive its variables as a dict,
      for `module.apply`:

      >>> module = linen.Sequential([linen.Embed(256, 8), linen.Dense(256)])
      >>> tokens = jax.ShapeDtypeStruct((1, 1), jnp.uint8)
      >>> state = create_state(module, optax.adam(1e-3), mesh, sample=tokens)
      >>> sorted(state.model), state.model["params"]["layers_1"]["kernel"].shape
      (['params'], (8, 256))

      A second phase of training continues with the model of a state, here with another
      optimizer and a part of the parameters:

      >>> state = create_state(
      ...     state, optax.sgd(1e-4), mesh, wrt=nnx.PathContains("layers_1")
      ... )
      >>> sorted(state.model["params"]), state.params["layers_0"]
      (['layers_0', 'layers_1'], {'embedding': None})

    Args:
      model: a Flax NNX module; a Flax Linen module, with `sample`; any pytree of
        parameters; or a `TrainState`, whose model is taken. Instead of arrays it may
        have their shapes, as those of `nnx.eval_shape`: then so does the state.
      tx: the optimizer; None if the state is only used for evaluation and prediction.
      mesh: the mesh on which the state is replicated; by default it stays on the
        devices of the parameters. Parameters that are already sharded over the mesh, or
        by `linen.with_partitioning`, stay sharded; pass `state_sharding=` to the step.
        On a mesh of `jb.compile.absent_devices`, the state consists of shapes.
      sample: for a Linen module, the argument to initialize it with, or a tuple of its
        positional arguments. Of arrays, only the shape and the dtype are used. Python
        values, such as True, are passed on.
      rngs: for a Linen module, the key or dict of keys to initialize it with; by
        default `jax.random.key(0)`.
      variables: for plain parameters, further collections that losses update. Losses
        then receive `{"params": model, **variables}`.
      wrt: selects the parameters to train, by default all: a filter of `nnx`, such as
        `nnx.PathContains("head")`, or a function `(path, value) -> bool` of the path,
        a tuple of names. Gradients and optimizer states are only computed for these.
      sharding: `(path, leaf)` -> the `PartitionSpec` of an array of the state on the
        mesh, whatever sharding it has, such as `jb.sharding.fully_sharded(mesh)`. The
        path is a tuple of names. Then pass `state_sharding=jax.tree.map(lambda x:
        x.sharding, state)` to the step.

    Raises:
      ValueError: if `model` is neither a module nor parameters; if it is a Linen module
        and there is no `sample`; if an argument does not apply to this kind of model;
        if parameters contain variables that are not parameters; if `wrt` selects no
        parameters; or if the model differs between processes.
    """
    if tx is not None:
        check_optimizer(tx)
    if mesh is not None:
        check_mesh(mesh)
    if sharding is not None:
        check_function("sharding", sharding, "(path, leaf)")
        if mesh is None:
            raise ValueError("`sharding` requires `mesh`. Pass `mesh=data_mesh()`.")
    state = _untrained(model, mesh, sample, rngs, variables, wrt)
    _check_variables(state.variables)
    if wrt is not None and not jax.tree.leaves(state.params):
        raise _nothing_selected(wrt, state.frozen)
    if tx is not None:
        _check_differentiable(state.params)
        state = dataclasses.replace(state, opt_state=_init(tx, state.params))
    if has_shapes(state):
        step = jax.ShapeDtypeStruct((), jnp.int32)
        state = dataclasses.replace(state, step=step)
    if mesh is None:
        # Copied, because steps donate the state.
        return jax.tree.map(
            lambda x: x if has_shapes(x) else jnp.array(x, copy=True), state
        )
    # With several processes, jax checks that all of them replicate the same values.
    return _on_mesh(state, mesh, sharding)


def _untrained(
    model: Any, mesh: Mesh | None, sample: Any, rngs: Any, variables: Any, wrt: Any
) -> TrainState:
    """Returns the state of a model of any kind without an optimizer.

    The arguments are those of `create_state`.
    """
    step = jnp.zeros((), jnp.int32)
    if isinstance(model, TrainState):
        _check_unused("a state", sample=sample, rngs=rngs, variables=variables)
        state, model = model, model.model
        if isinstance(state.variables, dict):
            model, variables = model["params"], state.variables
    if isinstance(model, nnx.Module):
        _check_unused("an NNX module", sample=sample, rngs=rngs, variables=variables)
        # A filter of a path also selects variables that are not parameters.
        trained = nnx.Param if wrt is None else nnx.All(nnx.Param, wrt)
        graphdef, *states = nnx.split(model, trained, nnx.Param, ...)
        params, frozen, others = map(_as_arrays, states)
        return TrainState(step, params, frozen, others, (), graphdef)
    if isinstance(model, linen.Module):
        _check_unused("a Linen module", variables=variables)
        others = init_linen(model, sample, rngs, mesh)
        params = others.pop("params")
    else:
        _check_unused("plain parameters", sample=sample, rngs=rngs)
        _check_plain(model, variables)
        others = () if variables is None else _as_arrays(unfreeze(dict(variables)))
        params = _as_arrays(model)
    return TrainState(step, *_split(params, wrt), others, ())


def checked_state(state: Any) -> TrainState:
    """Returns the state of a step, after checking that it is one of this package."""
    remedy = "Pass a state of `create_state`. For your own state, jit your own step."
    check_type("state", state, TrainState, remedy)
    return state


def _init(tx: optax.GradientTransformation, params: Any) -> Any:
    """Returns the initial state of an optimizer, of shapes if `params` has shapes."""
    if not has_shapes(params):
        return tx.init(params)
    shardings = {
        (path, leaf.shape): leaf.sharding
        for path, leaf in jax.tree.leaves_with_path(params)
        if getattr(leaf, "sharding", None) is not None
    }

    def sharded(path: Any, leaf: Any) -> Any:
        # What ends in the path of a parameter and has its shape is sharded like it, as
        # the result of `jnp.zeros_like` is.
        keys = [(path[start:], leaf.shape) for start in range(len(path))]
        found = next((shardings[key] for key in keys if key in shardings), None)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=found)

    return jax.tree.map_with_path(sharded, jax.eval_shape(tx.init, params))


def _on_mesh(
    state: TrainState,
    mesh: Mesh,
    spec_of: Callable[[tuple[Any, ...], Any], PartitionSpec] | None,
) -> TrainState:
    """Returns a copy on the mesh, replicated unless it is sharded over the mesh."""

    def on_mesh(path: Any, leaf: Any) -> Any:
        if spec_of is not None:
            spec = spec_of(tuple(map(_key_name, path)), leaf)
            return put(leaf, NamedSharding(mesh, spec))
        sharding: Any = getattr(leaf, "sharding", None)
        if getattr(sharding, "mesh", None) == mesh and not sharding.is_fully_replicated:
            return put(leaf, sharding)
        return replicate(leaf, mesh)

    return jax.tree.map_with_path(on_mesh, state)


def _split(params: Any, wrt: Any) -> tuple[Any, Any]:
    """Returns the parameters to train and the others, each with None for the rest."""
    if wrt is None:
        return params, ()
    selects = nnx.filterlib.to_predicate(wrt)
    trained = jax.tree.map_with_path(
        lambda path, x: bool(selects(tuple(map(_key_name, path)), x)), params
    )
    return (
        jax.tree.map(lambda x, is_trained: x if is_trained else None, params, trained),
        jax.tree.map(lambda x, is_trained: None if is_trained else x, params, trained),
    )


def _nothing_selected(wrt: Any, frozen: Any) -> ValueError:
    leaves = jax.tree.leaves_with_path(
        frozen, is_leaf=lambda x: isinstance(x, nnx.Variable)
    )
    paths = [tuple(map(_key_name, path)) for path, _ in leaves[:_NUM_PATHS]]
    return ValueError(
        f"`wrt={wrt!r}` selects no parameters. Pass a filter such as "
        '`nnx.PathContains("head")`, or a function of the path and the value. The '
        f"first paths are {', '.join(map(str, paths))}."
    )


def _joined(params: Any, frozen: Any) -> Any:
    """Returns the parameters that `_split` has split."""
    if isinstance(frozen, tuple) and not frozen:
        return params
    return jax.tree.map(
        lambda x, y: y if x is None else x,
        params,
        frozen,
        is_leaf=lambda x: x is None,
    )


def _key_name(key: Any) -> Any:
    """Returns the name or the index of an entry of a path."""
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return getattr(key, attribute)
    return str(key)


def _as_arrays(tree: Any) -> Any:
    """Returns a tree of arrays of strong dtypes."""
    # The weak dtype of a Python number would become a strong one in the first step, and
    # the second step would be compiled again.
    return jax.tree.map(
        lambda x: x if has_shapes(x) else jnp.asarray(x, jnp.result_type(x)), tree
    )


def check_optimizer(tx: Any) -> None:
    """Raises a ValueError if `tx` is not an optimizer."""
    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        raise ValueError(
            f"`tx` is a {type(tx).__name__}. Pass an optimizer of optax, such as "
            "`optax.adam(1e-3)`, or for evaluation `create_state(model, mesh=mesh)`."
        )


def _check_plain(params: Any, variables: Mapping[str, Any] | None) -> None:
    """Raises a ValueError unless a model is a tree of parameters and nothing else."""
    if "params" in (variables or ()):
        raise ValueError(
            '`variables` has the collection "params". Pass only the others.'
        )
    leaves = jax.tree.leaves(
        params, is_leaf=lambda x: isinstance(x, nnx.Module | nnx.Variable)
    )
    others = {type(x).__name__ for x in leaves if not isinstance(x, _PARAMETERS)}
    if others or not leaves:
        raise ValueError(
            f"`model` is a {type(params).__name__}, not one of parameters: it has "
            f"{sorted(others) or 'nothing'}. Pass arrays, an NNX module (put several "
            "into `nnx.Dict(...)` or `nnx.List([...])`), or a Linen module with "
            "`sample=`."
        )
    names = [*params] if isinstance(params, Mapping) else []
    others = [name for name in names if name != "params"]
    if "batch_stats" in names or ("params" in names and others):
        collections = ", ".join(f'"{name}": variables["{name}"]' for name in others)
        raise ValueError(
            f"`model` has the collections {others}, which would be trained. Pass the "
            'module and `sample=`, or `create_state(variables["params"], tx, mesh, '
            f"variables={{{collections}}})`."
        )


def _check_differentiable(params: Any) -> None:
    """Raises a ValueError if a parameter that is trained is not a float."""
    for path, leaf in jax.tree.leaves_with_path(params):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(
                f"`model` has the parameter {jax.tree_util.keystr(path)} of dtype "
                f"{leaf.dtype}, which cannot be trained. Pass the parameters of a "
                "state, convert them to floats, or leave them out by `wrt`."
            )


def _check_variables(variables: Any) -> None:
    """Raises a ValueError if a model has variables that no step can update."""
    # A Linen module in an NNX model has a variable type of the same name.
    leaves = jax.tree.leaves_with_path(
        variables, is_leaf=lambda x: isinstance(x, nnx.Variable)
    )
    for path, leaf in leaves:
        if OVERWRITE_WITH_GRADIENT in (path[0].key, type(leaf).__name__):
            raise ValueError(
                f"`model` has the variable {jax.tree_util.keystr(path)}, the scale of "
                "a layer in fp8, which its gradient replaces. Write your own step."
            )


def _check_unused(kind: str, **arguments: Any) -> None:
    """Raises a ValueError if one of the arguments was passed."""
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(
                f"`{name}` was passed for {kind}, which does not use it. Leave it out."
            )
