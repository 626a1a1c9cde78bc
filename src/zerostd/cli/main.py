"""The program `zerostd`. A refused command prints one line on stderr and exits with code 2.

A command's file is imported when the command runs: help and version do not wait for torch.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from zerostd import __version__
from zerostd.errors import ZerostdError

COMMANDS = {  # file and function of this name in this room, and the first sentence of its help
    "plan": "Plan where model state is kept, and predict how long a step takes.",
    "measure": "Measure this machine: its link, CPU, memory, matrix products and disk.",
    "report": "Write an HTML page about one or several runs.",
    "top": "Show a run in the terminal while it trains.",
    "merge": "Write the model of a checkpoint as safetensors files.",
    "doctor": "Check what training needs: versions, kernels, accelerator, memory, disk, process group.",
}


class Commands(TyperGroup):
    """The commands by name."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names, in the order help shows them."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import a command."""
        if cmd_name in self.commands:
            return self.commands[cmd_name]
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"zerostd.cli.{cmd_name}")
        single = typer.Typer(add_completion=False, pretty_exceptions_enable=False, context_settings=SETTINGS)
        single.command(cmd_name)(_in_one_line(getattr(module, cmd_name)))
        return typer.main.get_command(single)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write help with the sentences above, so that no command is imported."""
        self.commands = {name: TyperCommand(name, help=sentence) for name, sentence in COMMANDS.items()}
        super().format_help(ctx, formatter)


SETTINGS = {"help_option_names": ["-h", "--help"]}

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings=SETTINGS,
)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"zerostd {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Train PyTorch models that do not fit: measure a machine, plan where model state is kept, report on runs."""


def _in_one_line(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command without tracebacks for errors of zerostd, which say everything themselves."""

    @functools.wraps(command)
    def run(*args: Any, **options: Any) -> None:
        try:
            command(*args, **options)
        except ZerostdError as error:
            from zerostd.cli.printing import in_options  # it imports torch, as the command has done

            typer.echo(f"zerostd: {in_options(' '.join(str(error).split()))}", err=True)
            raise typer.Exit(2) from None
        except BrokenPipeError:  # the reader, such as head, has seen enough
            sys.stdout = None  # nothing is flushed into it at exit
            raise typer.Exit(0) from None
        except (OSError, MemoryError, UnicodeEncodeError) as error:  # of the system; or a name that cannot be printed
            reason = str(error) or "not enough memory"
            typer.echo(f"zerostd: {type(error).__name__}: {' '.join(reason.split())}", err=True)
            raise typer.Exit(2) from None

    return run
