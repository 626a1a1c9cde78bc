"""Models that do not exist here: a profile from a few numbers, or from a Hugging Face config.json on disk.

All are transformers of one shape: embedding, equal blocks, head. The costs of a sample of s tokens follow, with h the
width of the residual stream, a that of all heads together and v the vocabulary:

FLOPs      2 a token for each entry of a matrix, 4 s a for attention in each block and token (not halved where it is
           causal), 2 h v a token for the head; lookups take none.
kept       in bf16 by a token and block: inputs of both norms 4 h, of attention 2 h; queries, keys and values; the
           output of flash attention 2 a; input of the feed-forward part 2 h, 4 bytes for each of its entries (8 if it
           is gated); masks of two dropouts 2 h if there are any. With a = h and a feed-forward part of 4 h this is the
           well-known 34 s h. Head: inputs of its norm and matrix; logits in bf16 and, for the loss, in fp32, 6 s v.
boundary   the input of a block in bf16, 2 s h.
peak       the largest output: of the feed-forward part in a block, the gradient of the fp32 logits in the head.
"""

from __future__ import annotations

import math
import re
import reprlib
from dataclasses import dataclass
from decimal import Decimal
from itertools import takewhile
from pathlib import Path
from typing import Any

from zerostd.errors import PrepareError, is_whole
from zerostd.monitoring.decoding import decode, read_document
from zerostd.planning.profiles import GroupProfile, ModelProfile

UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
VOCABULARY = 50257  # of GPT-2 and GPT-3
LEAST_UNTIED = 64000  # rows in embedding and head together, from which on they are taken for two matrices
MOST_LAYERS = 10_000
LARGEST = 10**15  # any number that describes a model
LONGEST = 4096  # tokens of a sample, if nobody says
LAYER_FIELDS = ("num_hidden_layers", "n_layer", "num_layers")  # of a config.json
LAYERS = {1e4: 1, 1e5: 2, 1e6: 4, 1e7: 6}  # depths by number of parameters: below 100M our own,
LAYERS |= {125e6: 12, 350e6: 24, 1.3e9: 24, 2.7e9: 32, 6.7e9: 32, 13e9: 40, 175e9: 96}  # those of GPT-2 and GPT-3,
LAYERS |= {530e9: 105, 1e12: 128}  # and those of MT-NLG and Megatron


_Ends = tuple[int, int, int]  # parameters before and after the blocks, rows of the logits; 0: it pools its first token


@dataclass(frozen=True)
class _Block:
    """One block: its parameters, and the widths that decide what it computes and keeps."""

    numel: int
    matrices: int  # entries of its matrices
    hidden: int
    attention: int  # queries of all heads together
    keys: int  # of all heads together; values are as many
    inner: int  # of the feed-forward part
    is_gated: bool = False
    drops: bool = True

    def profile(self, name: str, sequence: int) -> GroupProfile:
        kept = 8 * self.hidden + 2 * (self.attention + 2 * self.keys) + 2 * self.attention
        kept += (8 if self.is_gated else 4) * self.inner + (2 * self.hidden if self.drops else 0)
        return GroupProfile(
            name,
            trained=self.numel,
            forward_flops=float(sequence * (2 * self.matrices + 4 * sequence * self.attention)),
            kept_bytes=float(sequence * kept),
            boundary_bytes=2.0 * sequence * self.hidden,
            peak_bytes=2.0 * sequence * self.inner,
        )


def parse_count(value: int | str) -> int:
    """Return a number of parameters from an integer or a text with a unit: 350M, 7.5B, 1T."""
    match = re.fullmatch(r"\s*([0-9][0-9_,]*(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", str(value))
    count = 0
    if match is not None and not isinstance(value, float) and match.group(2).upper() in UNITS:
        count = int(Decimal(re.sub("[_,]", "", match.group(1))) * UNITS[match.group(2).upper()])
    if not 1 <= count <= LARGEST:
        raise PrepareError(
            f"{reprlib.repr(value)} is not a number of parameters; write it like '350M', '7.5B', '1T' or as an integer "
            "from 1 to 1000T"
        )
    return count


def from_numbers(
    numel: int | str,
    *,
    hidden: int | None = None,
    layers: int | None = None,
    vocabulary: int | None = None,
    sequence: int = 1024,
    samples: int | None = None,
) -> ModelProfile:
    """Return a GPT of exactly `numel` parameters, in bf16 with the states of AdamW.

    With `hidden` and `layers`, a block has 12 hidden^2 + 13 hidden parameters, and what is left belongs to embedding
    and head: to the embedding alone where it is about one matrix (tied), to both where it is two. Without them a
    published shape of about this size is taken, and the blocks are scaled so that the sum is right.

    `hidden` is the width of the residual stream, `vocabulary` the rows of the embedding (None: from what is left, or
    that of GPT-2), `sequence` the tokens in one sample, `samples` the sequences in one pass on one rank, if known.
    """
    total = parse_count(numel)
    _check(hidden=hidden, layers=layers, vocabulary=vocabulary, sequence=sequence, samples=samples)
    if hidden is not None and layers is not None:
        width, ends, sizes = _exact(total, hidden, layers, vocabulary)
    else:
        width, ends, sizes = _scaled(total, hidden, layers, vocabulary)
    blocks = [_Block(size, max(0, size - 13 * width), width, width, width, 4 * width) for size in sizes]
    return _assemble(f"gpt-{numel}", blocks, ends, sequence, samples)


def _check(**given: int | None) -> None:
    for what, value in given.items():
        if value is not None and not (is_whole(value, 1) and value <= LARGEST):
            raise PrepareError(f"{what}={reprlib.repr(value)} must be a whole number from 1 to {LARGEST:,}")


def _check_layers(layers: int) -> int:
    if layers > MOST_LAYERS:
        raise PrepareError(f"{layers:,} layers exceed the limit of {MOST_LAYERS:,}: correct layers=, hidden= or size")
    return layers


def _exact(total: int, hidden: int, layers: int, vocabulary: int | None) -> tuple[int, _Ends, list[int]]:
    _check_layers(layers)
    size = 12 * hidden**2 + 13 * hidden
    rest = total - layers * size
    if rest < 0:
        raise PrepareError(
            f"{layers} blocks of width {hidden} have {layers * size:,} parameters, more than the {total:,} of the "
            "model: correct numel=, hidden= or layers=, or leave hidden and layers out"
        )
    rows = rest // hidden
    is_tied = rows < (LEAST_UNTIED if vocabulary is None else 2 * vocabulary)
    head = min(2 * hidden, rest) if is_tied else rest // 2
    return hidden, (rest - head, head, vocabulary or max(1, rows if is_tied else rows // 2)), [size] * layers


def _scaled(total: int, hidden: int | None, layers: int | None, vocabulary: int | None) -> tuple[int, _Ends, list[int]]:
    if vocabulary is None:
        vocabulary = VOCABULARY if total >= 10**8 else max(1, 5 * math.isqrt(total))
    if layers is None and hidden is not None:
        layers = max(1, round((total - vocabulary * hidden) / (12 * hidden**2)))
    elif layers is None:
        layers = LAYERS[min(LAYERS, key=lambda known: abs(math.log(known / total)))]
    _check_layers(layers)
    if hidden is None:  # 12 layers hidden^2 + vocabulary hidden = total
        root = (math.sqrt(vocabulary**2 + 48 * layers * total) - vocabulary) / (24 * layers)
        hidden = round(root / 64) * 64 if root >= 64 else max(1, int(root))
    head = min(2 * hidden, total)
    embedding = min(vocabulary * hidden, total - head)
    share, more = divmod(total - embedding - head, layers)
    return hidden, (embedding, head, vocabulary), [share + (index < more) for index in range(layers)]


def _assemble(name: str, blocks: list[_Block], ends: _Ends, sequence: int, samples: int | None) -> ModelProfile:
    before, after, vocabulary = ends
    hidden = blocks[0].hidden
    stream = 2.0 * sequence * hidden  # one activation in bf16
    if vocabulary:
        logits = float(sequence * vocabulary)
        head = GroupProfile("head", after, 0, 2.0 * hidden * logits, 2 * stream + 6 * logits, stream, 4 * logits)
    else:
        head = GroupProfile("head", after, 0, 2.0 * hidden**2, 4.0 * hidden, stream, 2.0 * hidden)
    embedding = GroupProfile("embedding", before, peak_bytes=stream)
    middle = (block.profile(f"blocks.{index}", sequence) for index, block in enumerate(blocks))
    return ModelProfile(name, (embedding, *middle, head), shared_bytes=2, samples=samples)


# -- config.json --


def from_config(path: str | Path, *, sequence: int | None = None, samples: int | None = None) -> ModelProfile:
    """Return the model that a Hugging Face config.json describes, in bf16 with the states of AdamW.

    transformers builds it on the meta device, so counts are exact: of a causal language model with its head, of any
    other model without one. What a pass takes is estimated by the formulas above.

    `path` is the file, or the folder that holds it. A sample has `sequence` tokens, or as many as the model takes, at
    most 4096. PrepareError says what is wrong with the file, or that its model is no transformer.
    """
    _check(sequence=sequence, samples=samples)
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    text = read_document(file, what=str(file), error=PrepareError, remedy="name a config.json")
    fields = decode(text, dict[str, Any], what=str(file), error=PrepareError, remedy="name a config.json")
    kind = fields.pop("model_type", None)
    model = _build(file, kind, fields)
    config = model.config
    longest = _width(config, "max_position_embeddings") or LONGEST
    tokens = model.get_input_embeddings()
    tables = (module for module in model.modules() if module is not tokens and hasattr(module, "num_embeddings"))
    learns_positions = any(table.num_embeddings == longest for table in tables)
    if sequence is not None and learns_positions and sequence > longest:
        raise PrepareError(
            f"sequence={sequence} is longer than the {longest} positions of {file}; use at most {longest}"
        )
    blocks, ends = _take_apart(model)
    if not blocks or not _width(config, "num_attention_heads"):
        raise _unknown(file, kind)
    name = fields.get("_name_or_path") or kind
    profiles = [_block_of(block, config) for block in blocks]
    return _assemble(name, profiles, ends, sequence or min(longest, LONGEST), samples)


def _unknown(file: Path, kind: Any) -> PrepareError:
    return PrepareError(
        f"{file}: model_type {reprlib.repr(kind)} is not a known transformer; give a function that builds the "
        "model as `module:function` instead, or its size, such as '7.5B'"
    )


def _build(file: Path, kind: Any, fields: dict[str, Any]) -> Any:
    """Return the model of a configuration, on the meta device."""
    try:
        import torch
        import transformers
    except ImportError as error:
        raise PrepareError(f"reading {file} needs transformers ({error}): pip install transformers") from None
    if not isinstance(kind, str) or kind not in transformers.CONFIG_MAPPING:
        raise _unknown(file, kind)
    fields = {name: value for name, value in fields.items() if name != "auto_map"}  # nobody's own code
    _check_layers(next((fields[name] for name in LAYER_FIELDS if isinstance(fields.get(name), int)), 1))
    try:
        config = transformers.AutoConfig.for_model(kind, **fields)
        is_encoder = type(config) in transformers.MODEL_FOR_MASKED_LM_MAPPING
        has_head = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING and not is_encoder
        with torch.device("meta"):
            return (transformers.AutoModelForCausalLM if has_head else transformers.AutoModel).from_config(config)
    except Exception as error:  # of any kind: transformers checks fields in many places
        raise PrepareError(f"{file}: transformers cannot build its model: {error}; correct the file") from None


def _take_apart(model: Any) -> tuple[list[Any], _Ends]:
    """Return the blocks of a model, which are in lists of modules, and what is before and after them."""
    blocks: list[Any] = []
    inside = set[int]()  # modules
    for module in model.modules():
        if type(module).__name__ == "ModuleList" and id(module) not in inside:
            blocks += module
            inside.update(id(part) for part in module.modules())
    of_blocks = {id(parameter): parameter.numel() for block in blocks for parameter in block.parameters()}
    first = takewhile(lambda parameter: id(parameter) not in of_blocks, model.parameters())
    before = sum(parameter.numel() for parameter in first)
    numel = sum(parameter.numel() for parameter in model.parameters())
    head = model.get_output_embeddings()
    return blocks, (before, numel - before - sum(of_blocks.values()), 0 if head is None else int(head.weight.shape[0]))


def _block_of(block: Any, config: Any) -> _Block:
    """Return the widths of a block. Of experts, those that a token passes through count."""
    per_token = _width(config, "num_experts_per_tok")
    matrices = 0
    for matrix in (parameter for parameter in block.parameters() if parameter.dim() > 1):
        num_experts = matrix.shape[0] if matrix.dim() == 3 else 1
        matrices += matrix.numel() * min(per_token or num_experts, num_experts) // num_experts
    hidden = _width(config, "hidden_size")
    heads = _width(config, "num_attention_heads")
    width = _width(config, "head_dim", "d_kv") or hidden // heads
    attention = heads * width
    keys = (_width(config, "num_key_value_heads") or heads) * width
    inner = _width(config, "intermediate_size", "n_inner", "d_ff") or 4 * hidden
    is_gated = matrices - 2 * hidden * (attention + keys) > 2.5 * hidden * inner
    drops = any(getattr(module, "p", 0.0) for module in block.modules())
    numel = sum(parameter.numel() for parameter in block.parameters())
    return _Block(numel, matrices, hidden, attention, keys, inner, is_gated, drops)


def _width(config: Any, *names: str) -> int:
    """Return the first of these fields that is a number above 0, or 0."""
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), 0)
