"""The command `jaxbucket`: lengths, plans, reports and plots from the shell."""

from __future__ import annotations

import re
from typing import Any

import click

from jaxbucket.base.lazy import naming_the_extra
from jaxbucket.cli.compare import compare
from jaxbucket.cli.measure import measure
from jaxbucket.cli.plan import plan
from jaxbucket.cli.precompile import precompile
from jaxbucket.cli.report import report

# `name` or `name=value`.
_ARGUMENT = re.compile(r"`(\w+)(?:=([^`]+))?`")


class _Group(click.Group):
    """A group whose commands print an error's message instead of its traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with naming_the_extra():
                return super().invoke(ctx)
        except BrokenPipeError:
            # The reader has ended, as after `| head`. click exits without a message.
            raise
        except (ValueError, OSError, ImportError, MemoryError) as error:
            command = self.commands.get(ctx.invoked_subcommand or "", self)
            lines = [str(error) or type(error).__name__]
            message = "\n".join([*lines, *getattr(error, "__notes__", ())])
            raise click.ClickException(_with_options(message, command)) from None


def _with_options(message: str, command: click.Command) -> str:
    """Returns a message that names options instead of arguments of the library.

    Example:
      >>> plan = click.Command("plan", params=[click.Option(["--max-tokens"])])
      >>> _with_options("`max_tokens=0` must be positive.", plan)
      '`--max-tokens 0` must be positive.'
    """
    options = {
        param.name: param.opts[0]
        for param in command.params
        if isinstance(param, click.Option)
    }
    # The library names the folder of `precompile` after what it stores.
    options |= {"executables": options["cache"]} if "cache" in options else {}

    def replaced(match: re.Match[str]) -> str:
        name, value = match.groups()
        if name not in options:
            return match[0]
        given = "" if value is None else f" {value}".replace("'", "")
        return f"`{options[name]}{given}`"

    return _ARGUMENT.sub(replaced, message)


@click.group(
    cls=_Group,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
)
@click.version_option(package_name="jaxbucket")
def main() -> None:
    """Plan batch shapes for training on variable-length data in JAX.

    Measure the lengths of your examples, compare different ways to batch them, and
    write a plan of shapes (B, T) for your job.
    """


for _command in (measure, plan, compare, report, precompile):
    main.add_command(_command)
