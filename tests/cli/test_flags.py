"""Options instead of arguments of the library in error messages."""

import click
import pytest

from jaxbucket.cli.flags import with_flags

OPTIONS = [click.Option([x]) for x in ("--max-tokens", "--overlong", "--metric")]
COMMAND = click.Command("plan", params=[click.Argument(["lengths"]), *OPTIONS])


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("`max_tokens=50` is low", "`--max-tokens 50` is low"),
        ("raise `max_tokens`", "raise `--max-tokens`"),
        ("`max_tokens=[9, 8]`", "`--max-tokens 9,8`"),
        ("`max_tokens={'a': 9, 'b': 8}`", "`--max-tokens a=9,b=8`"),
        ("`overlong='drop'` or", "`--overlong drop` or"),
        ("`overlong['a']='split'`: no", "`--overlong a=split`: no"),
        ("raise `max_tokens['a']`", "raise `--max-tokens a`"),
        # These are no options.
        ("`lengths[7]=0`", "`lengths[7]=0`"),
        ("`seq_len=9`", "`seq_len=9`"),
        ("`--max-tokens 9`, max_tokens=9", "`--max-tokens 9`, max_tokens=9"),
        # This is the error of the user's own function.
        ("`f(1)` raised X: `max_tokens=9`", "`f(1)` raised X: `max_tokens=9`"),
    ],
)
def test_arguments_are_shown_as_options(message, shown):
    assert with_flags(message, COMMAND) == shown


def test_metrics_have_another_name_in_the_library():
    analyze = click.Command("analyze", params=OPTIONS)
    message = "fix `difficulty_fn['late']` or `sequences=['nope']` in `sequences`"
    shown = "fix `--metric late` or `--metric length=nope` in `--metric length`"
    assert with_flags(message, analyze) == shown
    assert with_flags(message, COMMAND) == message
