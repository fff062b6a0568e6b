"""jax's flags and contexts, in words that are the same in every process.

jax names what changes tracing, but not all of it: its PRNG implementation is missing.
So every flag counts that is not known to be immaterial, a flag of a later jax, too.
"""

from __future__ import annotations

import enum
import hashlib
import os
import pickle
import re
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import jax

# There is no public way to the contexts that tracing depends on, such as a mesh, or to
# the names of the flags that it depends on.
from jax._src import config as jax_config

# Caches, logs, dumps, error messages, guards, timeouts and connections. Which devices
# there are is seen by the devices themselves.
_IMMATERIAL = re.compile(
    r"jax_("
    r"(enable_)?compilation_cache.*|persistent_cache_.*|raise_persistent_cache_errors"
    r"|share_binary_between_hosts.*|remove_custom_partitioning_ptr_from_cache_key"
    r"|explain_cache_misses|log_.*|logging_level|debug_log_modules|distributed_.*"
    r"|compiler_detailed_logging_min_ops|dump_.*|include_debug_info_in_dumps"
    r"|pprint_use_color|traceback_filtering|tracer_error_num_traceback_frames"
    r"|captured_constants_.*|transfer_guard.*|array_garbage_collection_guard"
    r"|thread_guard|check_tracer_leaks|debug_leaked_clients_on_clear_backends"
    r"|cross_host_.*|mtls_.*|check_proxy_envs|enable_preemption_service"
    r"|cpu_get_.*_timeout_minutes|platforms|platform_name|\w+_visible_devices"
    r"|num_cpu_devices"
    r")"
)
# Flags that change tracing, and what XLA makes of a program as well.
_OF_THE_COMPILER = {
    "jax_enable_pgle",
    "jax_pgle_profiling_runs",
    "jax_xla_profile_version",
    "jax_use_shardy_partitioner",
}
# What jax calls everything that `jax.make_user_context` returns.
_USER_CONTEXT = "user_context"
# The PRNG implementation, for jax's caches of what it has traced and lowered. The one
# that jax starts with is None there: most processes have no other, and what is compiled
# ahead for it is shared with direct calls, those before the first compilation included.
_prng: Any = jax.make_user_context(None)
_PRNG_AT_START = os.environ.get("JAX_DEFAULT_PRNG_IMPL", "threefry2x32")


def following_prng() -> AbstractContextManager[None]:
    """Inside, jax traces anew what it has traced with another PRNG implementation.

    jax's caches, those of jitted functions inside of others too, take any other setting
    into account, but not this one.
    """
    prng = _prng_name()
    return _prng(None if prng == _PRNG_AT_START else prng)


def trace_key() -> tuple[Any, ...]:
    """What tracing in this thread depends on: hashable, and quick enough for a step."""
    return (_prng_name(), *jax_config.trace_context())


def _prng_name() -> str:
    return jax.config.jax_default_prng_impl  # pyright: ignore


def is_traced_alike(call: Callable[..., Any]) -> bool:
    """Whether jax traces in another thread, by `call`, as it does in this one."""
    try:
        return _in_new_thread(call, trace_key) == trace_key()
    except (AttributeError, TypeError):
        # A jax that does not say.
        return False


def trace_settings() -> dict[str, Any]:
    """What tracing in this thread depends on, apart from code and arguments."""
    return {
        "flags": _flags(),
        "contexts": _contexts(),
        "backend": jax.default_backend(),
    }


def compiler_flags() -> dict[str, Any]:
    """The flags that may change what XLA makes of a program."""
    shown_by_the_program = set(_trace_names()) - _OF_THE_COMPILER
    return {name: x for name, x in _flags().items() if name not in shown_by_the_program}


def _flags() -> dict[str, Any]:
    values = getattr(jax.config, "values", None)
    if not isinstance(values, Mapping):
        return {"unknown": _different()}
    return {
        name: _in_words(value)
        for name, value in values.items()
        if not _IMMATERIAL.fullmatch(name)
    }


def _contexts() -> list[Any]:
    """Meshes, metadata and whatever else was entered, as `with` does."""
    try:
        values = tuple(jax_config.trace_context())
        # Those of a thread in which nothing was entered.
        defaults = tuple(_in_new_thread(jax_config.trace_context))
    except (AttributeError, TypeError):
        return [_different()]
    names = _trace_names()
    # Packages add contexts when they are imported, which nobody may have entered.
    entered = [
        # Which user context it is has no words.
        [name, _different() if name == _USER_CONTEXT else _in_words(value)]
        for name, value, default in zip(
            names or range(len(values)), values, defaults, strict=True
        )
        if not _is_unset(name, value, default)
    ]
    return [_in_words(jax.sharding.get_mesh()), *entered]


def _is_unset(name: str | int, value: Any, default: Any) -> bool:
    if name == _USER_CONTEXT:
        return value is default
    return value is None or value is False


def _in_new_thread(fn: Callable[..., Any], *args: Any) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(fn, *args).result()


def _trace_names() -> tuple[str, ...]:
    try:
        return jax_config.trace_context_names()
    except (AttributeError, NotImplementedError):
        # A jax that does not name them: what changes tracing counts for the compiler.
        return ()


def _in_words(value: Any) -> Any:
    """A value as JSON, the same in every process for the same value.

    What has no such words differs from everything else.
    """
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return repr(value)
    if isinstance(value, enum.Enum):
        return str(value)
    if isinstance(value, tuple | list):
        return [type(value).__name__, *map(_in_words, value)]
    if isinstance(value, set | frozenset):
        return [type(value).__name__, *sorted(str(_in_words(x)) for x in value)]
    if isinstance(value, Mapping):
        return sorted(str([_in_words(key), _in_words(value[key])]) for key in value)
    if isinstance(value, jax.Device):
        return f"{value.platform} {value.id}"
    if isinstance(value, jax.sharding.Mesh):
        devices = [_in_words(device) for device in value.devices.flat]
        return [f"{dict(value.shape)} {value.axis_types}", devices]
    if isinstance(value, jax.sharding.AbstractMesh):
        return str(value)
    return _pickled(value)


def _pickled(value: Any) -> str:
    # What xla_metadata is kept in has a hash beside it, another one in every process.
    metadata = getattr(value, "val", None)
    if isinstance(metadata, dict):
        return str(_in_words(metadata))
    try:
        return hashlib.sha256(pickle.dumps(value)).hexdigest()
    # What cannot be pickled says so in many ways.
    except Exception:
        return _different()


def _different() -> str:
    """For what is not known: no start is like another one, and all is traced."""
    return uuid.uuid4().hex
