"""Models by description: counts are those of the published models, costs are the usual formulas."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerostd.errors import PrepareError
from zerostd.planning.described import from_config, from_numbers, parse_count

GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
MISTRAL = LLAMA | {
    "model_type": "mistral",
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
}
QWEN2 = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
    "vocab_size": 152064,
}
BERT = {
    "model_type": "bert",
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "vocab_size": 30522,
}
ROBERTA = BERT | {
    "model_type": "roberta",
    "max_position_embeddings": 514,
    "type_vocab_size": 1,
    "vocab_size": 50265,
}
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "gpt2": (GPT2, 124_439_808),
    "gpt2-xl": (GPT2 | {"n_embd": 1600, "n_layer": 48, "n_head": 25}, 1_557_611_200),
    "Llama-2-7b": (LLAMA, 6_738_415_616),
    "Mistral-7B-v0.1": (MISTRAL, 7_241_732_096),
    "Qwen2-7B": (QWEN2, 7_615_616_512),
    "bert-base-uncased": (BERT, 109_482_240),
    "roberta-base": (ROBERTA, 124_645_632),
}


def written(folder: Path, fields: object) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(fields))
    return file


# -- counts --


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("350M", 350_000_000),
        ("7.5B", 7_500_000_000),
        (" 128 b ", 128_000_000_000),
        ("1T", 10**12),
        ("0.1K", 100),
        ("124,439,808", 124_439_808),
        ("124_439_808", 124_439_808),
        (17, 17),
    ],
)
def test_counts_are_read_with_their_unit(text: str | int, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["7.5Q", "-1B", "0", 0, -5, "", "B", "1.2.3M", True, 1.5, "0.1"])
def test_what_is_no_count_is_refused_with_the_remedy(text: Any) -> None:
    with pytest.raises(PrepareError, match=r"write it like '350M', '7.5B'"):
        parse_count(text)


@given(st.integers(1, 10**13))
def test_any_number_of_parameters_is_met_exactly(count: int) -> None:
    profile = from_numbers(count)
    assert profile.numel == profile.trained == count
    assert all(group.trained >= 0 for group in profile.groups)


@given(st.integers(1, 512), st.integers(1, 24), st.integers(0, 10**8), st.none() | st.integers(1, 10**5))
def test_given_shapes_are_met_exactly(hidden: int, layers: int, rest: int, vocabulary: int | None) -> None:
    block = 12 * hidden**2 + 13 * hidden
    profile = from_numbers(layers * block + rest, hidden=hidden, layers=layers, vocabulary=vocabulary)
    assert [group.trained for group in profile.groups[1:-1]] == [block] * layers
    assert profile.groups[0].trained + profile.groups[-1].trained == rest


@pytest.mark.parametrize(
    ("size", "layers", "hidden"),
    [("125M", 12, 768), ("6.7B", 32, 4096), ("13B", 40, 5120), ("175B", 96, 12288), ("1T", 128, 25600)],
)
def test_shapes_are_about_the_published_ones(size: str, layers: int, hidden: int) -> None:
    profile = from_numbers(size, sequence=1)
    assert len(profile.groups) == layers + 2
    assert profile.groups[1].boundary_bytes / 2 == pytest.approx(hidden, rel=0.02)


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_configs_have_the_published_number_of_parameters(name: str, tmp_path: Path) -> None:
    fields, count = PUBLISHED[name]
    written(tmp_path, fields)
    profile = from_config(tmp_path, samples=2)
    assert profile.numel == count and profile.samples == 2
    assert len(profile.groups) == fields.get("n_layer", fields.get("num_hidden_layers")) + 2


def test_ties_and_biases_count(tmp_path: Path) -> None:
    tied = from_config(written(tmp_path, LLAMA | {"tie_word_embeddings": True}))
    assert tied.numel == 6_738_415_616 - 32000 * 4096
    biased = from_config(written(tmp_path, LLAMA | {"attention_bias": True, "mlp_bias": True}))
    assert biased.numel == 6_738_415_616 + 32 * (5 * 4096 + 2 * 11008)
    wide = from_config(written(tmp_path, LLAMA | {"model_type": "qwen3", "head_dim": 256}))
    assert wide.numel == 6_738_415_616 + 32 * (4 * 4096 * 4096 + 2 * 256)


def test_a_field_that_is_left_out_is_what_transformers_takes_it_for(tmp_path: Path) -> None:
    short = {key: LLAMA[key] for key in LLAMA if key != "intermediate_size"}
    assert from_config(written(tmp_path, short)).numel == 6_738_415_616


def test_other_transformers_are_taken_apart_as_well(tmp_path: Path) -> None:
    """An encoder with its decoder, and experts of which a token passes through two of eight."""
    both = from_config(written(tmp_path, {"model_type": "t5", "d_model": 64, "d_ff": 128, "num_layers": 2}))
    assert [group.name for group in both.groups] == ["embedding", *(f"blocks.{i}" for i in range(4)), "head"]
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4}
    experts = sizes | {"model_type": "mixtral", "num_local_experts": 8, "num_hidden_layers": 1, "vocab_size": 100}
    block = from_config(written(tmp_path, experts | {"num_experts_per_tok": 2}), sequence=1).groups[1]
    assert block.trained == 4 * 64 * 64 + 8 * 3 * 64 * 128 + 8 * 64 + 2 * 64
    assert block.forward_flops == 2 * (4 * 64 * 64 + 2 * 3 * 64 * 128 + 8 * 64) + 4 * 64


# -- costs --


def test_costs_of_a_block_are_the_usual_formulas() -> None:
    s, h, v = 1024, 1600, 50257
    profile = from_numbers(1_557_611_200, hidden=h, layers=48, vocabulary=v, sequence=s, samples=4)
    block, head = profile.groups[1], profile.groups[-1]
    assert block.forward_flops == s * (2 * 12 * h * h + 4 * s * h)
    assert (block.kept_bytes, block.boundary_bytes, block.peak_bytes) == (34 * s * h, 2 * s * h, 8 * s * h)
    assert head.forward_flops == 2 * s * h * v
    assert head.kept_bytes == 6 * s * v + 4 * s * h
    assert profile.groups[0].forward_flops == 0
    assert profile.activations() == 4 * (48 * 34 * s * h + 6 * s * v + 4 * s * h + 4 * s * v)


def test_config_and_numbers_agree(tmp_path: Path) -> None:
    counted = from_numbers(124_439_808, hidden=768, layers=12, vocabulary=50257)
    read = from_config(written(tmp_path, GPT2))
    assert replace(counted, name="gpt2") == read


def test_a_gated_block_with_few_keys_keeps_what_it_saves(tmp_path: Path) -> None:
    profile = from_config(written(tmp_path, MISTRAL), sequence=100)
    block = profile.groups[1]
    matrices = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    assert block.forward_flops == 100 * (2 * matrices + 4 * 100 * 4096)
    assert block.kept_bytes == 100 * (8 * 4096 + 2 * (4096 + 2 * 1024) + 2 * 4096 + 8 * 14336)


def test_head_is_tied_or_not_by_what_is_left() -> None:
    tied = from_numbers(1_557_611_200, hidden=1600, layers=48)
    assert tied.groups[-1].trained == 2 * 1600
    untied = from_numbers(32 * (12 * 4096**2 + 13 * 4096) + 2 * 32000 * 4096, hidden=4096, layers=32)
    assert untied.groups[-1].trained == 32000 * 4096
    assert untied.groups[-1].forward_flops == 2 * 1024 * 32000 * 4096


def test_long_contexts_are_cut_unless_asked_for(tmp_path: Path) -> None:
    file = written(tmp_path, MISTRAL)
    assert from_config(file).groups[1].boundary_bytes == 2 * 4096 * 4096
    assert from_config(file, sequence=32768).groups[1].boundary_bytes == 2 * 32768 * 4096


# -- what is refused --


def test_numbers_that_do_not_fit_are_refused() -> None:
    with pytest.raises(PrepareError, match="12 blocks of width 768 have 85,054,464 parameters, more than"):
        from_numbers("80M", hidden=768, layers=12)
    for wrong in ({"hidden": 0}, {"layers": -1}, {"vocabulary": 1.5}, {"sequence": 0}, {"samples": True}):
        with pytest.raises(PrepareError, match=f"{next(iter(wrong))}=.* must be a whole number"):
            from_numbers("1B", **wrong)


def test_an_unknown_architecture_is_refused_with_what_to_use(tmp_path: Path) -> None:
    file = written(tmp_path, {"model_type": "mamba", "hidden_size": 768})
    with pytest.raises(PrepareError, match=r"model_type 'mamba' is not a known transformer.*module:function"):
        from_config(file)


def test_a_bad_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(PrepareError, match=r"config\.json cannot be read"):
        from_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(PrepareError, match=r"config\.json is not JSON"):
        from_config(tmp_path)
    with pytest.raises(PrepareError, match="but must be an object"):
        from_config(written(tmp_path, [1]))
    with pytest.raises(PrepareError, match=r"(?s)transformers cannot build its model.*vocab_size.*many"):
        from_config(written(tmp_path, GPT2 | {"vocab_size": "many"}))
    with pytest.raises(PrepareError, match="longer than the 1024 positions"):
        from_config(written(tmp_path, GPT2), sequence=2048)
