"""Names the options of a command in error messages of the library."""

from __future__ import annotations

import ast
import re
from typing import Any

import click

# `name`, `name=value`, `name['key']` or `name['key']=value`.
_ARGUMENT = re.compile(r"`(\w+)(?:\['([^'`]+)'\])?(?:=([^`]+))?`")
# Command -> argument of the library -> the option that sets it, if their names differ.
_OTHER_NAMES = {
    "measure": {"sequences": "--column"},
    "analyze": {"difficulty_fn": "--metric", "sequences": "--metric length"},
    "precompile": {"executables": "--cache"},
}


def with_flags(message: str, command: click.Command) -> str:
    """Returns a message that names options instead of arguments of the library.

    Example:
      >>> plan = click.Command("plan", params=[click.Option(["--max-tokens"])])
      >>> with_flags("`max_tokens={'a': 9, 'b': 8}`", plan)
      '`--max-tokens a=9,b=8`'

    Args:
      message: the message, with arguments as in Python.
      command: the command, whose options are named.
    """
    flags = {
        param.name: param.opts[0]
        for param in command.params
        if isinstance(param, click.Option)
    }
    flags |= _OTHER_NAMES.get(command.name or "", {})

    def translated(match: re.Match[str]) -> str:
        name, key, value = match.groups()
        if name not in flags:
            return match[0]
        parts = [] if value is None else [_shown(value)]
        text = "=".join([*([key] if key else []), *parts])
        # Another name may end with the start of the value, as in `--metric length=x`.
        space = "=" if " " in flags[name] else " "
        return f"`{flags[name]}{space if text else ''}{text}`"

    # What the user's own function raised is left as it is.
    ours, raised, theirs = message.partition(" raised ")
    return _ARGUMENT.sub(translated, ours) + raised + theirs


def _shown(value: str) -> str:
    """Returns a Python value as it is written on the command line."""
    try:
        parsed: Any = ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return value
    if isinstance(parsed, dict):
        return ",".join(f"{name}={x}" for name, x in parsed.items())
    if isinstance(parsed, list | tuple):
        return ",".join(map(str, parsed))
    return str(parsed)
