"""`zerostd merge`: the model of a checkpoint as ordinary safetensors files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from zerostd.checkpointing.storage import merging
from zerostd.errors import StorageError

From = Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="A directory that zerostd.save wrote.")]
To = Annotated[Path, typer.Argument(metavar="OUT", help="A directory that is not there yet.")]
Dtype = Annotated[str | None, typer.Option(metavar="NAME", help="fp32, bf16 or fp16. Default: that before prepare.")]
Most = Annotated[str, typer.Option(metavar="SIZE", help="Most bytes of a file.")]
Json = Annotated[bool, typer.Option("--json", help="Print what was written as JSON, and nothing else.")]


def merge(checkpoint: From, out: To, dtype: Dtype = None, max_shard_size: Most = "5GB", as_json: Json = False) -> None:
    """Write the model of a checkpoint as safetensors files, which torch, transformers and the Hugging Face hub read.

    On one process, without a GPU or the model, in little memory.
    """
    paths = merging.merge(checkpoint, out, dtype, max_shard_size)
    try:
        sizes = {path: os.path.getsize(path) for path in paths}
    except OSError as error:
        raise StorageError(f"{out} was written and cannot be looked at: {error.strerror}") from error
    if as_json:
        typer.echo(json.dumps({"files": sizes, "bytes": sum(sizes.values())}, indent=2))
        return
    for path, size in sizes.items():
        typer.echo(f"{size:>16,} bytes  {path}")
