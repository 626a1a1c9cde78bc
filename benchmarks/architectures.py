"""The architectures of transformers, made small, trained by plain torch and by zerostd: are the results the same?

    python benchmarks/architectures.py --write architectures-cpu

For every configuration class of the installed transformers `AutoModel` makes a model, as small as its options allow. It
takes two steps of AdamW on a batch of its main input. Forms of one rank must give the bits of plain torch; two gloo
ranks at stage 3, which see the same batch, its values within the order of summation. An architecture is left out if no
small configuration is valid, if it needs inputs of another kind, or if plain torch gives other losses a second time.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import logging
import os
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers
from gpt import RESULTS, machine
from torch import Tensor, nn
from torch.multiprocessing import spawn

import zerostd
from zerostd import Placement

ON_HOST: dict[str, Any] = {"parameters": "host", "gradients": "host", "optimizer_states": "host"}
FORMS: dict[str, dict[str, Any]] = {
    "all on the host": {"placement": Placement(**ON_HOST)},
    "all on the host, recomputed": {"placement": Placement(**ON_HOST, activations="recompute")},
    "updated inside backward": {"placement": Placement(optimizer_states="host"), "accumulate": 1},
    "states and gradients on disk": {"placement": Placement(gradients="disk", optimizer_states="disk")},
}
TWO_RANKS = "stage 3, two ranks"
LIMIT = 1e-5  # relative, on two ranks
STEPS = 2
MOST_PARAMETERS = 32_000_000  # some configurations cannot be made small by these names
LIMIT_S = 120  # of one architecture
AT_ONCE = 40  # architectures that two processes try: each imports modules that stay

# What configurations call their sizes; those that a configuration has are set.
SIZES = {
    32: "hidden_size d_model n_embd dim hidden_dim embed_dim embedding_size image_size moe_intermediate_size",
    2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers expand "
    "num_key_value_heads num_experts_per_tok eos_token_id",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads num_experts "
    "num_local_experts n_routed_experts time_step_rank conv_kernel",
    8: "head_dim d_kv patch_size state_size chunk_size q_lora_rank kv_lora_rank qk_rope_head_dim qk_nope_head_dim "
    "v_head_dim",
    64: "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff n_inner max_position_embeddings n_positions",
    16: "sliding_window",
    3: "num_channels",
    99: "vocab_size",
    1: "bos_token_id decoder_start_token_id n_groups first_k_dense_replace n_group topk_group",
    0: "pad_token_id use_cache attention_dropout hidden_dropout_prob attention_probs_dropout_prob dropout resid_pdrop "
    "embd_pdrop attn_pdrop dropout_rate hidden_dropout activation_dropout layerdrop encoder_layerdrop "
    "decoder_layerdrop drop_path_rate",
}


class LeftOutError(Exception):
    """An architecture that is not tried, and why."""


@contextmanager
def limited() -> Iterator[None]:
    """Raise TimeoutError where an architecture takes too long."""

    def ring(*_: object) -> None:
        raise TimeoutError(f"longer than {LIMIT_S} s")

    signal.signal(signal.SIGALRM, ring)
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)


def small(kind: str, only: str = "") -> nn.Module:
    """Build a small model of one architecture, the same each time; only sizes with `only` in their names change."""
    configuration = transformers.CONFIG_MAPPING[kind]
    standard = configuration()
    sizes = {}
    for size, names in SIZES.items():
        for name in names.split():
            kept = getattr(standard, name, None)
            if isinstance(kept, bool):
                sizes[name] = bool(size)
            elif isinstance(kept, int | float) and (only in name or not size):
                sizes[name] = type(kept)(size)
    with torch.device("meta"):
        number = sum(p.numel() for p in transformers.AutoModel.from_config(configuration(**sizes)).parameters())
    if number > MOST_PARAMETERS:
        raise LeftOutError("it stays large")
    torch.manual_seed(0)
    return transformers.AutoModel.from_config(configuration(**sizes)).train()


def batch_of(model: Any) -> dict[str, Tensor]:
    """Return its main input, drawn."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(3, 90, (2, 12), generator=generator)
    if model.main_input_name == "input_ids":
        return {"input_ids": tokens} | (
            {"decoder_input_ids": tokens[:, :6].clone()} if model.config.is_encoder_decoder else {}
        )
    if model.main_input_name == "pixel_values":
        size = getattr(model.config, "image_size", 32)
        size = size if isinstance(size, int) else size[0]
        channels = getattr(model.config, "num_channels", 3)
        return {"pixel_values": torch.randn(2, channels, size, size, generator=generator)}
    if model.main_input_name == "input_values":
        return {"input_values": torch.randn(2, 4000, generator=generator)}
    if model.main_input_name == "input_features" and hasattr(model.config, "max_source_positions"):
        shape = (2, model.config.num_mel_bins, 2 * model.config.max_source_positions)
        decoded = {"decoder_input_ids": tokens[:, :6].clone()} if model.config.is_encoder_decoder else {}
        return {"input_features": torch.randn(shape, generator=generator)} | decoded
    raise LeftOutError(f"it needs {model.main_input_name}")


def train(model: nn.Module, batch: dict[str, Tensor], form: dict[str, Any] | None) -> dict[str, Tensor]:
    """Return the losses of some steps and the weights after them; `form` is None for plain torch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if form is not None:
        model, optimizer = zerostd.prepare(model, optimizer, **form)
    losses = []
    for step in range(STEPS):
        torch.manual_seed(step)
        np.random.seed(step)  # masks of speech models
        outputs = [value for value in model(**batch).values() if isinstance(value, Tensor) and value.requires_grad]
        loss = torch.stack([value.float().square().mean() for value in outputs]).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    values = model.state_dict() if form is None else zerostd.full_state_dict(model)
    result = {name: value.clone() for name, value in values.items()} | {"losses": torch.stack(losses)}
    if form is not None:
        zerostd.release(model)
    return result


def reference(kind: str) -> tuple[nn.Module, dict[str, Tensor], dict[str, Tensor]]:
    """Return a model, its batch and what plain torch makes of them; raise LeftOutError if that is no reference."""
    reason = ""
    for only in ("", "layers"):  # the sizes of some have to match in ways of their own
        try:
            model = small(kind, only)
            batch = batch_of(model)
            first, second = (train(copy.deepcopy(model), batch, None) for _ in range(2))
        except (LeftOutError, TimeoutError) as error:
            reason = str(error)
        except Exception as error:
            unknown = "Unrecognized configuration" in str(error)
            reason = "AutoModel does not make it" if unknown else "no small configuration is valid"
        else:
            if torch.isfinite(first["losses"]).all() and torch.equal(first["losses"], second["losses"]):
                return model, batch, first
            reason = "plain torch differs from itself"
    raise LeftOutError(reason)


def distance(result: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest relative error of a tensor; 0 if all bits are the same."""
    if result.keys() != expected.keys():
        return float("inf")
    errors = [0.0]
    for name, value in expected.items():
        if not torch.equal(result[name].nan_to_num(), value.nan_to_num()):
            gap = (result[name].double() - value.double()).abs().max() / value.double().abs().max().clamp_min(1e-30)
            errors.append(float(gap) if torch.isfinite(gap) else float("inf"))
    return max(errors)


def tried(model: nn.Module, batch: dict[str, Tensor], expected: dict[str, Tensor], form: dict[str, Any]) -> str:
    """Return "same", or what happened."""
    try:
        error = distance(train(copy.deepcopy(model), batch, form), expected)
    except Exception as problem:
        return f"{type(problem).__name__}: {str(problem)[:200]}"
    limit = LIMIT if dist.is_initialized() else 0.0
    return "same" if error <= limit else f"off by {error:.1e}"


def alone(kinds: list[str]) -> tuple[dict[str, dict[str, str]], Counter[str]]:
    """Try all forms of one rank; return outcomes by architecture and form, and why others were left out."""
    outcomes: dict[str, dict[str, str]] = {}
    left_out: Counter[str] = Counter()
    for kind in kinds:
        with limited():
            try:
                model, batch, expected = reference(kind)
            except LeftOutError as reason:
                left_out[str(reason)] += 1
                continue
        for name, form in FORMS.items():
            with limited():
                outcomes.setdefault(kind, {})[name] = tried(model, batch, expected, form)
        print(kind, outcomes[kind], flush=True)
        gc.collect()
    return outcomes, left_out


def together(rank: int, kinds: list[str], folder: str) -> None:
    """Try two ranks; the first writes outcomes by architecture."""
    quiet()
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{folder}/store")
    outcomes = {}
    for kind in kinds:
        outcomes[kind] = tried(*reference(kind), {"stage": 3})
        gc.collect()
    if rank == 0:
        Path(folder, "outcomes.json").write_text(json.dumps(outcomes))
    dist.destroy_process_group()


def quiet() -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    logging.getLogger("zerostd").setLevel(logging.ERROR)
    torch.set_num_threads(1)


def main(options: argparse.Namespace) -> None:
    quiet()
    begin = time.monotonic()
    kinds = [kind for kind in sorted(transformers.CONFIG_MAPPING) if not options.only or kind in options.only]
    outcomes, left_out = alone(kinds)
    tried_alone = list(outcomes)
    for start in range(0, len(tried_alone), AT_ONCE):
        with tempfile.TemporaryDirectory() as folder:
            spawn(together, (tried_alone[start : start + AT_ONCE], folder), nprocs=2)
            for kind, outcome in json.loads(Path(folder, "outcomes.json").read_text()).items():
                outcomes[kind][TWO_RANKS] = outcome
    forms = [*FORMS, TWO_RANKS]
    same = [kind for kind, cells in outcomes.items() if set(cells.values()) == {"same"}]
    lines = [
        "# Architectures of transformers",
        "",
        f"{date.today()}, {machine()}; transformers {transformers.__version__}. `python benchmarks/architectures.py "
        f"{' '.join(sys.argv[1:])}`, {(time.monotonic() - begin) / 60:.0f} minutes.",
        "",
        f"{STEPS} steps of AdamW in fp32 on small models. *Same*: losses and weights are those of plain torch, bit for "
        f"bit on one rank, within {LIMIT:.0e} on two ranks.",
        "",
        "| form | same | of |",
        "|---|--:|--:|",
    ]
    for form in forms:
        number = sum(cells[form] == "same" for cells in outcomes.values())
        lines.append(f"| {form} | {number} | {len(outcomes)} |")
    lines += ["", f"Same in all forms: {', '.join(same) or 'none'}.", ""]
    for kind in [kind for kind in outcomes if kind not in same]:
        lines.append(f"- {kind}: " + "; ".join(f"{form}: {cell}" for form, cell in outcomes[kind].items()))
    lines += ["", "Left out: " + ", ".join(f"{number} ({reason})" for reason, number in left_out.most_common()) + "."]
    print("\n".join(lines))
    if options.write:
        Path(RESULTS, f"{options.write}.md").write_text("\n".join(lines).replace("\n\n\n", "\n\n") + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="these architectures")
    parser.add_argument("--write", metavar="NAME", help="write benchmarks/results/NAME.md")
    os.environ.setdefault("ZEROSTD_TIMEOUT_S", "60")
    main(parser.parse_args())
