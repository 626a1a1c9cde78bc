"""A language model that does not fit runs from host memory and disk: `python examples/inference.py`.

A small Llama with random weights is saved as Hugging Face does. Then it is loaded straight into a device budget of half
its size, generates the same tokens as plain torch, sleeps, and wakes.
"""

from __future__ import annotations

import tempfile

import torch
import transformers

import zerostd

CONFIG = transformers.LlamaConfig(
    hidden_size=256, intermediate_size=688, num_hidden_layers=12, num_attention_heads=4, vocab_size=1000, pad_token_id=0
)


def main() -> None:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        transformers.LlamaForCausalLM._from_config(CONFIG, dtype=torch.bfloat16).save_pretrained(folder)
        plain = transformers.LlamaForCausalLM.from_pretrained(folder).eval()
        total = sum(parameter.nbytes for parameter in plain.parameters())

        with zerostd.empty_init():  # no memory is taken, and nothing is initialised
            model = transformers.LlamaForCausalLM._from_config(CONFIG, dtype=torch.bfloat16).eval()
        budget = zerostd.Budget(device=total // 2, host=total // 3, disk_path=folder)
        groups = ["model.embed_tokens", "model.layers.*", "lm_head"]  # large models need none
        print(zerostd.plan(model, budget=budget, groups=groups).explain())
        zerostd.dispatch(model, folder, budget=budget, groups=groups)

        prompt = torch.randint(1, 1000, (2, 8))
        options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 8, "do_sample": False}
        expected = plain.generate(prompt, **options)
        print("same tokens:", torch.equal(model.generate(prompt, **options), expected))
        print(zerostd.memory(model))

        zerostd.sleep(model)  # the device is free for another model
        zerostd.wake(model)
        print("same tokens after sleeping:", torch.equal(model.generate(prompt, **options), expected))


if __name__ == "__main__":
    main()
