"""Models and loads whose memory is estimated."""

import torch
from transformers import Gemma2Config, GPT2Config, LlamaConfig

from benchmarks.common import qwen
from benchmarks.memory import on_meta
from grpo.config.trainer import TrainerConfig
from grpo.model.lora import train_adapter
from grpo.trainer.memory import RankWork, TrainedModel

SMALL = dict(hidden_size=128, intermediate_size=320, num_attention_heads=4, num_key_value_heads=2)


CONFIGS = {
    "qwen2": qwen(2, 100, **SMALL),
    "llama": LlamaConfig(**SMALL, num_hidden_layers=2, vocab_size=100),
    "gpt2": GPT2Config(vocab_size=100, n_embd=128, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0),
    "gemma2, softcapped scores": Gemma2Config(**SMALL, head_dim=32, num_hidden_layers=2, vocab_size=100),
}


WORK = RankWork(
    ranks=1,
    prompts=4,
    longest_prompt=100,
    longest_completion=50,
    generations=8,
    micro_batch_tokens=1000,
    rows=16,
    checkpointing=False,
    buckets=2,
    bucket=10**8,
    fp32_gradients=False,
    offloaded=False,
)


def described(name: str = "qwen2", dtype: torch.dtype = torch.float32, **adapter) -> TrainedModel:
    model = on_meta(CONFIGS[name], dtype).eval()
    if adapter:
        train_adapter(model, TrainerConfig(use_peft=True, **adapter))
    return TrainedModel.of(model, 150)
