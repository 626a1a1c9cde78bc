"""The Trainer of Hugging Face with one more argument, `zero`: the options of zerostd.prepare; and
`from_pretrained`, which loads models straight into tiers.

trainer = Trainer(model, args, train_dataset=data, zero={"stage": 3})

The Accelerator becomes ours: prepare without DDP, clipping over all shards. Models are saved whole by one rank, as
without zerostd. In checkpoints each rank also writes its shards, from which a run resumes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import snapshot_download
from torch import nn
from transformers.trainer import OPTIMIZER_NAME, TRAINER_STATE_NAME
from transformers.utils import GENERATION_CONFIG_NAME

import zerostd
from zerostd.integrations import common
from zerostd.integrations.accelerate import CALL, Accelerator

REFUSED = {  # fields of TrainingArguments, with the remedy
    "deepspeed": "it shards the model too: leave it out, or train without zerostd",
    "fsdp": "it shards the model too: leave it out, or train without zerostd",
    "parallelism_config": "it shards the model too: leave it out, or train without zerostd",
    "torch_compile": "the whole model cannot be compiled over shards: compile its blocks before, with module.compile()",
    "ddp_bucket_cap_mb": "there is no DDP: use zero={'groups': [...]} to choose what travels together",
    "ddp_static_graph": "there is no DDP: leave it out",
    "auto_find_batch_size": "a prepared model cannot be retried: set per_device_train_batch_size",
    "fp16": "its scaler does not support shards: use zero={'precision': 'fp16'}, which scales the loss automatically",
    "fp16_full_eval": "a prepared model cannot be cast: use zero={'precision': 'fp16'}",
    "bf16_full_eval": "a prepared model cannot be cast: use bf16=True or zero={'precision': 'bf16'}",
}
SETTINGS = {  # options of zerostd.prepare that TrainingArguments has, too
    "max_grad_norm": "TrainingArguments(max_grad_norm=...)",
    "accumulate": "TrainingArguments(gradient_accumulation_steps=...)",
}


class Trainer(transformers.Trainer):
    """transformers.Trainer with `zero`. Put it before other bases: `class Mine(Trainer, Seq2SeqTrainer): ...`.

    `bf16=True` is autocast over weights as they are, as without zerostd. Weights of 16 bits with fp32 masters are
    `zero={"precision": "bf16"}`, or "fp16".

    `gradient_accumulation_steps` and `max_grad_norm` are passed on to zerostd.prepare, so updates of states off the
    device may begin inside backward. Callbacks cannot change gradients then; `zero={"accumulate": None}` lets updates
    wait for the step.
    """

    def __init__(self, *args: Any, zero: Mapping[str, Any] | None = None, **options: Any) -> None:
        self.zero = dict(zero or {})
        self._whole: dict[str, Any] | None = None  # a state_dict on its way to `_save`
        super().__init__(*args, **options)

    def create_accelerator_and_postprocess(self) -> None:
        """Refuse options that cannot be honoured: this is the first thing that Trainer does with its arguments."""
        args = self.args
        for name, remedy in REFUSED.items():
            if getattr(args, name, None):
                value = getattr(args, name)
                raise zerostd.NotSupportedError(f"TrainingArguments({name}={value!r}) with zerostd: {remedy}")
        if args.ddp_broadcast_buffers is False:
            raise zerostd.NotSupportedError(
                "TrainingArguments(ddp_broadcast_buffers=False) with zerostd: buffers of rank 0 go to all; leave it out"
            )
        common.check_options(self.zero, CALL, SETTINGS)
        self.zero = {
            "accumulate": args.gradient_accumulation_steps,
            "max_grad_norm": args.max_grad_norm or None,
            **self.zero,  # None: not said, so updates wait for step()
        }
        if args.n_gpu > 1:
            raise zerostd.NotSupportedError(
                f"one process sees {args.n_gpu} devices, so Trainer would copy the model to each: start it with "
                "torchrun, one process a device, or set CUDA_VISIBLE_DEVICES"
            )
        super().create_accelerator_and_postprocess()
        self.accelerator.__class__ = Accelerator
        self.accelerator.set_up(self.zero)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **options: Any) -> Any:
        """Train as Trainer does. True resumes from the newest complete checkpoint."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = _newest_complete(Path(self.args.output_dir)) or True
        return super().train(resume_from_checkpoint, *args, **options)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        if common.has_memory(model):
            super()._move_model_to_device(model, device)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write an ordinary Hugging Face directory, for `from_pretrained`. Every rank must call it."""
        with contextlib.ExitStack() as parts:
            if self.accelerator.optimizer_of(self.model) is not None:
                rank = None if self.args.save_on_each_node else 0
                self._whole = zerostd.full_state_dict(self.model, rank=rank)
                for module in list(self.model.modules()):
                    if hasattr(module, "adapter_state_dict"):  # peft asks it for its own, beside LoRA's matrices
                        parts.enter_context(zerostd.gathered(module))
            try:
                super().save_model(output_dir, _internal_call)
            finally:
                self._whole = None

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if state_dict is None:
            state_dict = self._whole
        super()._save(output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        extra = {"scheduler": self.lr_scheduler.state_dict()}
        self.accelerator.save_shards(Path(output_dir), self.optimizer, extra)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if _newest_shards(resume_from_checkpoint) is None:  # those are loaded once the model is sharded
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        path = _newest_shards(checkpoint)
        if path is None:
            if (Path(checkpoint) / OPTIMIZER_NAME).exists():
                raise zerostd.CheckpointError(
                    f"{checkpoint} has optimizer states that were saved without zerostd: start from its weights with "
                    "from_pretrained, or continue without zerostd"
                )
            return  # save_only_model=True
        extra = _load(path, self.model, self.optimizer.optimizer)
        self.lr_scheduler.load_state_dict(extra["scheduler"])

    def _load_best_model(self) -> None:
        path = _newest_shards(self.state.best_model_checkpoint)
        if path is None:  # save_only_model=True
            super()._load_best_model()
        else:
            _load(path, self.model)


def from_pretrained(
    name: str,
    model_class: Any = transformers.AutoModelForCausalLM,
    *,
    budget: Any = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    groups: Sequence[str] | None = None,
) -> nn.Module:
    """Load a model for inference straight into the tiers of a budget, like `model_class.from_pretrained`.

    Args:
        name: A directory that save_pretrained wrote, or a name on the Hub.
        model_class: One of transformers' AutoModel classes.
        budget: As for `zerostd.dispatch`, and so are device and groups.
        dtype: Of the parameters. None: as the configuration says.
    """
    folder = Path(name)
    if not folder.is_dir():
        folder = Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors"]))
    config = transformers.AutoConfig.from_pretrained(folder)
    with zerostd.empty_init():
        model: nn.Module = model_class.from_config(config, dtype=dtype or config.dtype or torch.float32)
    if (folder / GENERATION_CONFIG_NAME).exists():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    return zerostd.dispatch(model.eval(), folder, budget=budget, device=device, groups=groups)


def _newest_shards(folder: str) -> str | None:
    return zerostd.latest(Path(folder) / common.FOLDER)


def _load(path: str, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Any:
    """Load a checkpoint but its random states: Trainer restores those after it has skipped the batches of the past."""
    with torch.random.fork_rng(devices=[]):
        return zerostd.load(path, model, optimizer)


def _newest_complete(folder: Path) -> str | None:
    """Return the directory checkpoint-N with the largest N. Trainer writes its own state last."""
    states = folder.glob(f"checkpoint-*/{TRAINER_STATE_NAME}")
    names = [state.parent.name.removeprefix("checkpoint-") for state in states]
    numbers = [int(name) for name in names if name.isdigit()]
    return str(folder / f"checkpoint-{max(numbers)}") if numbers else None
