"""jax's flags and contexts, as JSON that is the same in every process.

jax names what changes tracing, but not all of it: its PRNG implementation is missing.
So every flag counts that is not known to be immaterial, a flag of a later jax, too.
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

# There is no public way to the contexts that tracing depends on, such as a mesh, or to
# the names of the flags that it depends on.
from jax._src import config as jax_config

from jaxbucket.compile.canonical import canonical

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
        # A later jax without these names.
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
        return {"unknown": _unique()}
    return {
        name: _canonical(value)
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
        return [_unique()]
    names = _trace_names() or range(len(values))
    entered: list[Any] = [_canonical(jax.sharding.get_mesh())]
    for name, value, default in zip(names, values, defaults, strict=True):
        if name == _USER_CONTEXT:
            # Which user context it is cannot be told in another process.
            if value is not default:
                entered.append([name, _unique()])
        # Packages add contexts when they are imported, which nobody may have entered.
        elif value is not None and value is not False:
            entered.append([name, _canonical(value)])
    return entered


def _trace_names() -> tuple[str, ...]:
    try:
        return jax_config.trace_context_names()
    except (AttributeError, NotImplementedError):
        # A later jax: what changes tracing counts for the compiler, too.
        return ()


def _in_new_thread(fn: Callable[..., Any], *args: Any) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(fn, *args).result()


def _canonical(value: Any) -> Any:
    return canonical(value, fallback=_pickle_digest)


def _pickle_digest(value: Any) -> Any:
    # What xla_metadata is kept in has a hash beside it, another one in every process.
    metadata = getattr(value, "val", None)
    if isinstance(metadata, dict):
        return _canonical(metadata)
    try:
        return hashlib.sha256(pickle.dumps(value)).hexdigest()
    # Pickling fails in many ways.
    except Exception:
        return _unique()


def _unique() -> str:
    """For what is unknown: no start is like another one, and all is traced."""
    return uuid.uuid4().hex
