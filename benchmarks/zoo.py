"""Models of many families, for models.py: each a function that gives a module and a batch, full or toy.

`HELD_OUT` were not looked at while the planner was made. A batch is what forward takes; `loss_of` makes a number of
what forward returns.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["HELD_OUT", "ZOO", "call", "loss_of"]

Made = tuple[nn.Module, Any]
HELD_OUT = ("convnext_large", "graph", "whisper")
ZOO: dict[str, Callable[[bool], Made]] = {}


def call(model: nn.Module, batch: Any) -> Any:
    """What a model returns for a batch."""
    if isinstance(batch, dict):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple) else model(batch)


def loss_of(output: Any) -> Tensor:
    """A scalar of whatever a model returns."""
    if hasattr(output, "loss") and output.loss is not None:
        return output.loss
    if hasattr(output, "logits"):
        output = output.logits
    if isinstance(output, tuple):
        output = output[0]
    return output.float().square().mean()


def entry(make: Callable[[bool], Made]) -> Callable[[bool], Made]:
    ZOO[make.__name__.rstrip("_")] = make
    return make


def images(number: int, size: int) -> Tensor:
    return torch.randn(number, 3, size, size)


def tokens(rows: int, length: int, vocabulary: int) -> Tensor:
    return torch.randint(0, vocabulary, (rows, length))


# -- images --


@entry
def resnet152(toy: bool) -> Made:
    vision = importlib.import_module("torchvision.models")
    return (vision.resnet18(), images(2, 32)) if toy else (vision.resnet152(), images(128, 224))


@entry
def convnext_large(toy: bool) -> Made:
    vision = importlib.import_module("torchvision.models")
    return (vision.convnext_tiny(), images(1, 32)) if toy else (vision.convnext_large(), images(64, 224))


@entry
def vit_h_14(toy: bool) -> Made:
    vision = importlib.import_module("torchvision.models")
    if toy:
        return vision.VisionTransformer(32, 16, 2, 2, 32, 64), images(2, 32)
    return vision.vit_h_14(), images(64, 224)


@entry
def timm_swin(toy: bool) -> Made:
    timm = importlib.import_module("timm")
    name = "resnet10t" if toy else "swin_large_patch4_window7_224"
    return timm.create_model(name), images(2 if toy else 64, 64 if toy else 224)


class UNet(nn.Module):
    """Down and up again, with what was left on the way added."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        sizes = [width * 2**level for level in range(depth)]
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(self._block(size, 2 * size) for size in sizes)
        self.up = nn.ModuleList(self._block(2 * size, size) for size in reversed(sizes))
        self.last = nn.Conv2d(width, 3, 1)

    @staticmethod
    def _block(before: int, after: int) -> nn.Module:
        convolutions = (nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(4, after), nn.SiLU())
        return nn.Sequential(*convolutions, nn.Conv2d(after, after, 3, padding=1), nn.GroupNorm(4, after), nn.SiLU())

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        left = []
        for block in self.down:
            left.append(x)
            x = nn.functional.avg_pool2d(block(x), 2)
        for block in self.up:
            x = block(nn.functional.interpolate(x, scale_factor=2.0)) + left.pop()
        return self.last(x)


@entry
def unet(toy: bool) -> Made:
    return (UNet(8, 2), images(2, 16)) if toy else (UNet(96, 5), images(16, 256))


# -- text --


@entry
def bert(toy: bool) -> Made:
    hf = importlib.import_module("transformers")
    vocabulary, hidden, layers, heads, inner = (64, 32, 2, 2, 64) if toy else (30522, 1024, 24, 16, 4096)
    config = hf.BertConfig(
        vocab_size=vocabulary, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        intermediate_size=inner,
    )  # fmt: skip
    ids = tokens(2, 8, 64) if toy else tokens(48, 512, 30522)
    return hf.BertForMaskedLM(config), {"input_ids": ids, "labels": ids}


@entry
def llama(toy: bool) -> Made:
    hf = importlib.import_module("transformers")
    sizes = (64, 32, 64, 2, 2) if toy else (32000, 2048, 5504, 20, 16)
    vocabulary, hidden, inner, layers, heads = sizes
    config = hf.LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, use_cache=False,
    )  # fmt: skip
    ids = tokens(2, 8, 64) if toy else tokens(4, 2048, 32000)
    return hf.LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}


@entry
def gpt2(toy: bool) -> Made:
    hf = importlib.import_module("transformers")
    vocabulary, length, width, layers, heads = (64, 16, 32, 2, 2) if toy else (50257, 1024, 1280, 36, 20)
    config = hf.GPT2Config(
        vocab_size=vocabulary, n_positions=length, n_embd=width, n_layer=layers, n_head=heads
    )  # fmt: skip
    ids = tokens(2, 8, 64) if toy else tokens(8, 1024, 50257)
    return hf.GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids, "use_cache": False}


@entry
def t5(toy: bool) -> Made:
    hf = importlib.import_module("transformers")
    sizes = (64, 32, 16, 64, 2, 2) if toy else (32128, 1024, 64, 4096, 24, 16)
    vocabulary, model, head, inner, layers, heads = sizes
    config = hf.T5Config(
        vocab_size=vocabulary, d_model=model, d_kv=head, d_ff=inner, num_layers=layers, num_heads=heads,
        decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip
    ids = tokens(2, 8, 64) if toy else tokens(8, 512, 32128)
    return hf.T5ForConditionalGeneration(config), {"input_ids": ids, "labels": ids[:, : ids.shape[1] // 2].contiguous()}


@entry
def whisper(toy: bool) -> Made:
    hf = importlib.import_module("transformers")
    sizes = (64, 16, 2, 2, 32, 8, 2) if toy else (51865, 1024, 24, 16, 4096, 1500, 16)
    vocabulary, width, layers, heads, inner, frames, rows = sizes
    config = hf.WhisperConfig(
        vocab_size=vocabulary, d_model=width, encoder_layers=layers, decoder_layers=layers,
        encoder_attention_heads=heads, decoder_attention_heads=heads, encoder_ffn_dim=inner, decoder_ffn_dim=inner,
        max_source_positions=frames, max_target_positions=448, pad_token_id=0, bos_token_id=1, eos_token_id=1,
        decoder_start_token_id=0, suppress_tokens=None, begin_suppress_tokens=None, use_cache=False,
    )  # fmt: skip
    sounds = torch.randn(rows, config.num_mel_bins, 2 * frames)
    return hf.WhisperForConditionalGeneration(config), {
        "input_features": sounds, "labels": tokens(rows, 4 if toy else 256, vocabulary)
    }  # fmt: skip


class Experts(nn.Module):
    """Each token goes through the expert that a router chooses: a host sync for each."""

    def __init__(self, width: int, number: int) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, number)
        parts = (
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(number)
        )
        self.experts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        flat = self.norm(x).flatten(0, 1)
        weights, chosen = self.router(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero().flatten()
            out = out.index_add(0, rows, (expert(flat[rows]) * weights[rows, None]).to(out.dtype))
        return x + out.view_as(x)


@entry
def mixture(toy: bool) -> Made:
    width, number, layers = (16, 2, 2) if toy else (1024, 16, 6)
    batch = torch.randn(2, 4, width) if toy else torch.randn(16, 1024, width)
    return nn.Sequential(*(Experts(width, number) for _ in range(layers))), batch


class Recurrent(nn.Module):
    """A stack of recurrent layers over embedded tokens."""

    def __init__(self, layer: type[nn.RNNBase], vocabulary: int, width: int, depth: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(layer(width, width, batch_first=True) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)[0]
        return self.head(x)


@entry
def lstm(toy: bool) -> Made:
    return (Recurrent(nn.LSTM, 64, 16, 2), tokens(2, 8, 64)) if toy else (
        Recurrent(nn.LSTM, 32000, 2048, 8), tokens(32, 256, 32000)
    )  # fmt: skip


@entry
def gru(toy: bool) -> Made:
    return (Recurrent(nn.GRU, 64, 16, 2), tokens(2, 8, 64)) if toy else (
        Recurrent(nn.GRU, 32000, 2048, 10), tokens(32, 256, 32000)
    )  # fmt: skip


# -- graphs --


class GraphNetwork(nn.Module):
    """Layers of torch_geometric with feed-forward parts between; they take the mean over neighbours."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        geometric = importlib.import_module("torch_geometric.nn")
        self.layers = nn.ModuleList(geometric.SAGEConv(width, width) for _ in range(depth))
        parts = (nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU()) for _ in range(depth))
        self.inner = nn.ModuleList(parts)
        self.outer = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(depth))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        for layer, inner, outer in zip(self.layers, self.inner, self.outer, strict=True):
            x = x + outer(inner(layer(x, edges)))
        return x


@entry
def graph(toy: bool) -> Made:
    nodes, width, depth = (16, 8, 2) if toy else (60_000, 1024, 24)
    edges = torch.randint(0, nodes, (2, 4 * nodes))
    return GraphNetwork(width, depth), (torch.randn(nodes, width), edges)
