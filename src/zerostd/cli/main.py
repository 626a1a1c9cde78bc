"""The program `zerostd`. A refused command prints one line on stderr and exits with code 2."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import typer

from zerostd.cli.doctor import doctor
from zerostd.cli.measure import measure
from zerostd.cli.merge import merge
from zerostd.cli.plan import plan
from zerostd.cli.report import report
from zerostd.errors import ZerostdError

app = typer.Typer(
    help="Train PyTorch models that do not fit: measure a machine, plan where model state is kept, report on runs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _in_one_line(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command without tracebacks for errors of zerostd, which say everything themselves."""

    @functools.wraps(command)
    def run(*args: Any, **options: Any) -> None:
        try:
            command(*args, **options)
        except ZerostdError as error:
            typer.echo(f"zerostd: {' '.join(str(error).split())}", err=True)
            raise typer.Exit(2) from None
        except (OSError, MemoryError, UnicodeEncodeError) as error:  # of the system; or a name that cannot be printed
            reason = str(error) or "not enough memory"
            typer.echo(f"zerostd: {type(error).__name__}: {' '.join(reason.split())}", err=True)
            raise typer.Exit(2) from None

    return run


for command in (plan, measure, merge, report, doctor):
    app.command()(_in_one_line(command))
