"""`penstock audit`: how close policies stay to full attention on a model and a text."""

import typer

from penstock.cli.console import plain_output

AUDIT = "How close policies stay to full attention on a text."
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def audit_command(context: typer.Context) -> None:
    """How close policies stay to full attention on a text (--help lists the options)."""
    from penstock.evaluate.audit import program

    with plain_output():
        program.run(context.args)
