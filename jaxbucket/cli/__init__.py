"""The command `jaxbucket`: lengths, plans, reports and pictures, without Python."""

from __future__ import annotations

from typing import Any

import click

from jaxbucket.cli.compare import compare
from jaxbucket.cli.measure import measure
from jaxbucket.cli.plan import plan
from jaxbucket.cli.precompile import precompile
from jaxbucket.cli.report import report


class _Group(click.Group):
    """Ends with the sentence of an error instead of its traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            # Nobody reads on, as after `| head`; click ends without a word.
            raise
        except (ValueError, OSError) as error:
            raise click.ClickException(str(error)) from None
        except MemoryError as error:
            raise click.ClickException(
                f"There is not enough memory: {error or 'nothing is left'}. Run this "
                "where there is more, or on fewer examples."
            ) from None


_SETTINGS = {"help_option_names": ["-h", "--help"], "show_default": True}


@click.group(cls=_Group, context_settings=_SETTINGS)
@click.version_option(package_name="jaxbucket")
def main() -> None:
    """Shape buckets for training on variable-length data in JAX."""


for _command in (measure, plan, compare, report, precompile):
    main.add_command(_command)
