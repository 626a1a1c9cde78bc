"""The program `zerostd`. A refused command prints one line on stderr and exits with code 2."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from zerostd.cli.doctor import doctor
from zerostd.cli.measure import measure
from zerostd.cli.merge import merge
from zerostd.cli.plan import plan
from zerostd.cli.report import report
from zerostd.errors import ZerostdError


class _Verbs(TyperGroup):
    """Run a command; errors of zerostd say everything, so they come without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ZerostdError as error:
            typer.echo(f"zerostd: {' '.join(str(error).split())}", err=True)
            raise typer.Exit(2) from None


app = typer.Typer(
    cls=_Verbs,
    help="Train PyTorch models that do not fit: what a machine can do, what should rest where, and what came of it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(plan)
app.command()(measure)
app.command()(merge)
app.command()(report)
app.command()(doctor)
