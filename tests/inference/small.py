"""A small Llama with random weights, saved as Hugging Face does, and what plain torch makes of it."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from torch import nn

import zerostd

GROUPS = ["model.embed_tokens", "model.layers.*", "lm_head"]
CONFIG = transformers.LlamaConfig(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=128,
    pad_token_id=0,
    eos_token_id=None,
)


def save_model(folder: Path) -> nn.Module:
    """Save a model with random weights in several files, and return it as it is loaded from there."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM._from_config(CONFIG, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="200KB")
    return transformers.LlamaForCausalLM.from_pretrained(folder).eval()


def make_empty() -> nn.Module:
    with zerostd.empty_init():
        return transformers.LlamaForCausalLM._from_config(CONFIG, dtype=torch.bfloat16).eval()


def tokens(batch_size: int) -> torch.Tensor:
    return torch.randint(1, 128, (batch_size, 5), generator=torch.Generator().manual_seed(batch_size))


def generate(model: nn.Module, batch_size: int) -> torch.Tensor:
    ids = tokens(batch_size)
    options = transformers.GenerationConfig(max_new_tokens=6, do_sample=False, pad_token_id=0, use_cache=True)
    return model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=options)


def num_bytes(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())
