"""jax's flags and contexts, as JSON that is equal in all processes.

jax lists the settings that change tracing, but not completely: the PRNG implementation
is missing. Therefore every flag is included unless it is known to be irrelevant. This
covers the flags of later versions of jax, too.
"""

from __future__ import annotations

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

# jax has no public access to the contexts on which tracing depends, such as a mesh, or
# to the names of the flags on which it depends.
from jax._src import config as jax_config

from jaxbucket.compile.canonical import canonical

# Flags on caches, logs, dumps, error messages, guards, timeouts and connections. Flags
# that select devices are here because the keys contain the devices themselves.
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
# Flags that change tracing, but also the result of compiling a given program.
_COMPILER_FLAGS = {
    "jax_enable_pgle",
    "jax_pgle_profiling_runs",
    "jax_xla_profile_version",
    "jax_use_shardy_partitioner",
}
# The name in jax of every context that `jax.make_user_context` returns.
_USER_CONTEXT = "user_context"
# Adds the PRNG implementation to the keys of jax's caches of traced and lowered
# functions. The initial implementation is None there, so that programs that are
# compiled ahead of time are shared with direct calls in most processes.
_prng: Any = jax.make_user_context(None)
_PRNG_AT_START = os.environ.get("JAX_DEFAULT_PRNG_IMPL", "threefry2x32")


def with_prng_in_cache_keys() -> AbstractContextManager[None]:
    """Makes jax's caches depend on the PRNG implementation inside a `with` block.

    By themselves, jax's caches of traced functions, including nested ones, depend on
    all other settings, but not on this one.
    """
    prng = _prng_name()
    return _prng(None if prng == _PRNG_AT_START else prng)


def trace_key() -> tuple[Any, ...]:
    """Returns a hashable key of the settings of tracing, fast enough for every step."""
    return (_prng_name(), *jax_config.trace_context())


def _prng_name() -> str:
    return jax.config.jax_default_prng_impl  # pyright: ignore


def is_traced_alike(call: Callable[..., Any]) -> bool:
    """Returns whether another thread traces like this one if called through `call`."""
    try:
        return _in_new_thread(call, trace_key) == trace_key()
    except (AttributeError, TypeError):
        # A later version of jax may not have these names.
        return False


def trace_settings() -> dict[str, Any]:
    """Returns what tracing in this thread depends on, besides code and arguments."""
    return {
        "flags": _flags(),
        "contexts": _contexts(),
        "backend": jax.default_backend(),
    }


def compiler_flags() -> dict[str, Any]:
    """Returns the flags that may change the result of compiling a given program."""
    only_tracing = set(_trace_names()) - _COMPILER_FLAGS
    return {name: x for name, x in _flags().items() if name not in only_tracing}


def _flags() -> dict[str, Any]:
    values = getattr(jax.config, "values", None)
    if not isinstance(values, Mapping):
        return {"unknown": _unique()}
    return {
        name: _canonical(value)
        for name, value in values.items()
        if not _IMMATERIAL.fullmatch(name)
    }


def _contexts() -> list[Any]:
    """Returns the contexts that were entered, such as meshes and metadata."""
    try:
        values = tuple(jax_config.trace_context())
        # The values in a thread that has entered no context.
        defaults = tuple(_in_new_thread(jax_config.trace_context))
    except (AttributeError, TypeError):
        return [_unique()]
    # Before version 0.10.1, jax does not name them, so that any may be the user's.
    names = _trace_names() or [_USER_CONTEXT] * len(values)
    entered: list[Any] = [_canonical(jax.sharding.get_mesh())]
    for name, value, default in zip(names, values, defaults, strict=True):
        if name == _USER_CONTEXT:
            # A user context cannot be identified in another process.
            if value is not default:
                entered.append([name, _unique()])
        # Imported packages may add contexts that have not been entered.
        elif value is not None and value is not False:
            entered.append([name, _canonical(value)])
    return entered


def _trace_names() -> tuple[str, ...]:
    try:
        return jax_config.trace_context_names()
    except (AttributeError, NotImplementedError):
        # Without names, all flags count as flags of the compiler.
        return ()


def _in_new_thread(fn: Callable[..., Any], *args: Any) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(fn, *args).result()


def _canonical(value: Any) -> Any:
    return canonical(value, fallback=_pickle_digest)


def _pickle_digest(value: Any) -> Any:
    # xla_metadata is stored with a hash, which differs between processes.
    metadata = getattr(value, "val", None)
    if isinstance(metadata, dict):
        return _canonical(metadata)
    try:
        return hashlib.sha256(pickle.dumps(value)).hexdigest()
    # Pickling raises many types of errors.
    except Exception:
        return _unique()


def _unique() -> str:
    """Returns a unique value for unknown settings, so that no two runs match."""
    return uuid.uuid4().hex
