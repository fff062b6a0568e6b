"""The command `jaxbucket`: lengths, plans, reports and plots from the shell."""

from __future__ import annotations

from typing import Any

import click

from jaxbucket.base.lazy import naming_the_extra
from jaxbucket.cli.compare import compare
from jaxbucket.cli.fit import fit
from jaxbucket.cli.measure import measure
from jaxbucket.cli.plan import plan
from jaxbucket.cli.precompile import precompile
from jaxbucket.cli.report import report
from jaxbucket.cli.simulate import simulate


class _Group(click.Group):
    """A group whose commands print an error's message instead of its traceback.

    The message names arguments of the library: `max_tokens` is `--max-tokens`.
    """

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with naming_the_extra():
                return super().invoke(ctx)
        except BrokenPipeError:
            # The reader has ended, as after `| head`. click exits without a message.
            raise
        except Exception as error:
            notes = getattr(error, "__notes__", ())
            kinds = (ValueError, OSError, ImportError, MemoryError, EOFError)
            if not notes and not isinstance(error, kinds):
                raise
            # A note names what a user's function was given.
            kind = "" if isinstance(error, kinds) else f"{type(error).__name__}: "
            message = str(error) or type(error).__name__
            raise click.ClickException("\n".join([kind + message, *notes])) from None


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


for _command in (measure, plan, compare, report, simulate, fit, precompile):
    main.add_command(_command)
