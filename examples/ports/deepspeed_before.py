"""A script for DeepSpeed: ZeRO-3, optimizer on the CPU, bf16 with fp32 masters, clipping, accumulation, checkpoints.

deepspeed --num_gpus 2 examples/ports/deepspeed_before.py --checkpoints /tmp/checkpoints
"""

import argparse
import os

import deepspeed
import torch
from small_gpt import GPT, batches, next_token_loss

ACCUMULATE = 2

ds_config = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": ACCUMULATE,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "data_types": {"grad_accum_dtype": "fp32"},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": 5e8,
        "stage3_prefetch_bucket_size": 5e8,
        "stage3_param_persistence_threshold": 1e5,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
}


def train(checkpoints: str, steps: int = 20) -> list[float]:
    """The loss of every step."""
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=ds_config):
        model = GPT()
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=ds_config)

    losses, passes = [], []
    for tokens in batches(steps * ACCUMULATE, size=8):
        tokens = tokens.to(engine.device)
        loss = next_token_loss(engine(tokens), tokens)
        engine.backward(loss)
        is_last = engine.is_gradient_accumulation_boundary()
        engine.step()
        passes.append(loss.item())
        if is_last:
            losses.append(sum(passes) / ACCUMULATE)
            passes = []
    engine.save_checkpoint(checkpoints, tag=f"step-{steps}")
    engine.save_16bit_model(f"{checkpoints}/model")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoints", required=True)
    parser.add_argument("--local_rank", type=int, default=-1)  # the launcher passes it
    options = parser.parse_args()
    deepspeed.init_distributed()
    losses = train(options.checkpoints)
    if int(os.environ["RANK"]) == 0:
        print(f"loss of the first step {losses[0]:.4f}, of the last {losses[-1]:.4f}")
