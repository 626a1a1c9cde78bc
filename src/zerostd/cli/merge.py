"""`zerostd merge`: the model of a checkpoint as ordinary safetensors files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from zerostd.checkpointing.storage import merging

DTYPE = "fp32, bf16 or fp16. Default: the dtype before prepare."


def merge(
    checkpoint: Annotated[str, typer.Argument(metavar="CHECKPOINT", help="Directory or URL that zerostd.save wrote.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The directory to create.")],
    dtype: Annotated[str | None, typer.Option(metavar="NAME", help=DTYPE)] = None,
    max_shard_size: Annotated[str, typer.Option(metavar="SIZE", help="The largest size of a file.")] = "5GB",
    as_json: Annotated[bool, typer.Option("--json", help="Print the files as JSON and nothing else.")] = False,
) -> None:
    """Write the model of a checkpoint as safetensors files.

    Torch, transformers and the Hugging Face Hub can read them. One process
    does it, with little memory and without a GPU or the model.
    """
    paths = merging.merge(checkpoint, out, dtype, max_shard_size)
    sizes = {path: os.path.getsize(path) for path in paths}
    if as_json:
        typer.echo(json.dumps({"files": sizes, "bytes": sum(sizes.values())}, indent=2))
        return
    for path, size in sizes.items():
        typer.echo(f"{size:>16,} bytes  {path}")
