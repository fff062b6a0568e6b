"""The command `jaxbucket`: lengths, plans, reports and plots from the shell."""

from __future__ import annotations

from typing import Any

import click

from jaxbucket.base.lazy import naming_the_extra
from jaxbucket.cli.analyze import analyze
from jaxbucket.cli.compare import compare
from jaxbucket.cli.flags import with_flags
from jaxbucket.cli.measure import measure
from jaxbucket.cli.plan import plan
from jaxbucket.cli.precompile import precompile
from jaxbucket.cli.report import report


class _Group(click.Group):
    """A group whose commands print an error's message instead of its traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with naming_the_extra():
                return super().invoke(ctx)
        except BrokenPipeError:
            # The reader has ended, as after `| head`. click exits without a message.
            raise
        except (ValueError, OSError, ModuleNotFoundError) as error:
            command = self.commands.get(ctx.invoked_subcommand or "", self)
            raise click.ClickException(with_flags(str(error), command)) from None
        except MemoryError as error:
            raise click.ClickException(
                f"There is not enough memory: {error or 'none is left'}. Run this on a "
                "machine with more memory, or on fewer examples."
            ) from None


_SETTINGS = {"help_option_names": ["-h", "--help"], "show_default": True}


@click.group(cls=_Group, context_settings=_SETTINGS)
@click.version_option(package_name="jaxbucket")
def main() -> None:
    """Plan batch shapes for training on variable-length data in JAX.

    Measure the lengths of your examples, compare different ways to batch them, and
    write a plan of shapes (B, T) for your job. Sort your examples by difficulty for a
    curriculum.
    """


for _command in (measure, plan, compare, report, precompile, analyze):
    main.add_command(_command)
