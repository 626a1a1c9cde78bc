"""Models of transformers whose blocks share inputs: a position bias that is handed along, the output of an encoder, a
cache of keys and values. Each block's backward ends before these have their gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zerostd
from support.live_bytes import LiveBytes
from zerostd import Placement
from zerostd.engine.runtime import runtime_of
from zerostd.parameters import GroupState

transformers = pytest.importorskip("transformers")

WORDS = 32


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=WORDS, d_model=128, d_kv=32, d_ff=2048, num_layers=4, num_heads=4, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)  # type: ignore[no-any-return]


def bart() -> nn.Module:
    sizes = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in BART_SIZES.items()}
    config = transformers.BartConfig(vocab_size=WORDS, d_model=128, max_position_embeddings=64, **sizes)
    return transformers.BartForConditionalGeneration(config)  # type: ignore[no-any-return]


BART_SIZES = {"layers": 4, "attention_heads": 4, "ffn_dim": 2048}


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=128, intermediate_size=2048, num_hidden_layers=6, num_attention_heads=4
    )
    return transformers.LlamaForCausalLM(config)  # type: ignore[no-any-return]


MODELS = {"t5": t5, "bart": bart, "llama": llama}


def made(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = MODELS[name]()
    tokens = torch.randint(3, WORDS, (2, 24))
    return model.train(), {"input_ids": tokens, "labels": tokens}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, steps: int = 2) -> list[float]:
    torch.manual_seed(1)  # dropout
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


@pytest.mark.parametrize("activations", ["device", "recompute"])
@pytest.mark.parametrize("name", MODELS)
def test_blocks_that_share_inputs_are_released_as_backward_passes_them(name: str, activations: str) -> None:
    plain, batch = made(name)
    expected = train(plain, adam(plain), batch)
    model, _ = made(name)
    rest = {"parameters": "host", "gradients": "host", "optimizer_states": "host"}
    globs = [f"*.{blocks}.[0-9]" for blocks in ("block", "layers") if any(f".{blocks}.0" in n for n, _ in names(model))]
    model, optimizer = zerostd.prepare(
        model, adam(model), placement=Placement(activations=activations, **rest), groups=globs
    )
    groups = runtime_of(model, "a test").groups
    assert len(groups) >= 7
    num_gathered = []

    def count(parameter: nn.Parameter) -> None:
        num_gathered.append(sum(group.state is GroupState.GATHERED for group in groups))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(count)
    assert train(model, optimizer, batch) == expected
    full = zerostd.full_state_dict(model)
    assert all(torch.equal(full[key], value) for key, value in plain.state_dict().items())
    assert max(num_gathered) <= 2  # the one that runs, and the next


def names(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return list(model.named_modules())


def peak_in_backward(activations: str) -> int:
    model, _ = made("t5")
    tokens = torch.randint(3, WORDS, (8, 64))
    model, _ = zerostd.prepare(model, adam(model), placement=Placement(activations=activations))
    with LiveBytes() as live:
        loss = model(input_ids=tokens, labels=tokens).loss
        live.peak = 0
        loss.backward()
    return live.peak


def test_t5_recomputes_one_block_at_a_time() -> None:
    """Its encoder and its decoder have one class, so each was a group. Recomputed at once, they were all alive."""
    assert peak_in_backward("recompute") < 0.3 * peak_in_backward("device")
