"""Random tiny models of every supported family, and a tiny tokenizer. Shared by all tests; needs no network.

model = tiny_model("llama", vocab_size=67)      # a transformers model on the CPU, float32, seed 0
folder = tiny_folder("llama", tmp_path / "m")   # config, safetensors, tokenizer: what a Hub folder looks like
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
GEMMA3N = {
    "head_dim": 8,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 8,
    "num_kv_shared_layers": 0,
    "vocab_size_per_layer_input": 64,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 4,
    "altup_num_inputs": 2,
    "activation_sparsity_pattern": [0.5, 0.0],
    "intermediate_size": [48, 48],
}
ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
DEEPSEEK = {
    **ROUTED,
    "kv_lora_rank": 8,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
GLM4_MOE = {**ROUTED, "head_dim": 8}
ROPE_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

# name -> (model_type, settings over COMMON)
ARCHS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama_tied": ("llama", {"tie_word_embeddings": True}),
    "llama3_rope": ("llama", {"rope_parameters": ROPE_LLAMA3}),
    "llama_qknorm": ("qwen3", {"head_dim": 16, "attention_bias": False}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 8}),
    "qwen3_moe": ("qwen3_moe", {"head_dim": 8, **MOE}),
    "mistral": ("mistral", {"sliding_window": 8}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral_top1": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 1}),
    "gemma2": ("gemma2", {"head_dim": 8, "sliding_window": 8, "tie_word_embeddings": True}),
    "gemma3": ("gemma3_text", {"head_dim": 8, "sliding_window": 8, "tie_word_embeddings": True}),
    "gemma3n": ("gemma3n_text", {"tie_word_embeddings": True, **GEMMA3N}),
    "phi3": ("phi3", {}),
    "gpt2": ("gpt2", {"tie_word_embeddings": True, "n_inner": 48}),
    "gpt_neox": ("gpt_neox", {}),
    "opt": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32, "tie_word_embeddings": True}),
    "falcon": ("falcon", {"num_kv_heads": 2, "new_decoder_architecture": True, "tie_word_embeddings": True}),
    "olmo2": ("olmo2", {}),
    "granite": ("granite", {"logits_scaling": 4.0, "tie_word_embeddings": True}),
    "deepseek_v3": ("deepseek_v3", DEEPSEEK),
    "glm4_moe": ("glm4_moe", GLM4_MOE),
    "gpt_oss": ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 8}),
}
# the 17 families that the design names, one each
FAMILIES = [
    *("llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "mixtral", "gemma2", "gemma3", "phi3", "gpt2", "gpt_neox"),
    *("opt", "falcon", "olmo2", "granite", "deepseek_v3", "gpt_oss"),
]

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>\\n' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CHATML_PLAIN = CHATML.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def tiny_config(arch: str, **overrides: Any):
    """The transformers config of a tiny `arch` (a key of ARCHS)."""
    model_type, settings = ARCHS[arch]
    return AutoConfig.for_model(model_type, **{**COMMON, **settings, **overrides})


def tiny_model(arch: str, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> PreTrainedModel:
    """A random model in eval mode. Norms, biases and sinks are random too, so that a test sees them."""
    torch.manual_seed(seed)
    config = tiny_config(arch, **overrides)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.to(dtype)


def tiny_tokenizer(vocab_size: int = 64, generation: bool = True, chat: bool = True) -> PreTrainedTokenizerFast:
    """A character-level tokenizer: pad 0, bos 1, eos <|im_end|> 2, <|im_start|> 3, unk 4, then printable characters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    special = ["<pad>", "<s>", "<|im_end|>", "<|im_start|>", "<unk>"]
    letters = "\n abcdefghijklmnopqrstuvwxyz.,?!ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789:;'\"-_()/{}[]<>|@#$%^&*+=~`\\"
    vocab = {token: i for i, token in enumerate([*special, *letters][:vocab_size])}
    inner = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="<|im_end|>",
        unk_token="<unk>",
        additional_special_tokens=["<|im_start|>"],
    )
    if chat:
        tokenizer.chat_template = CHATML if generation else CHATML_PLAIN
    return tokenizer


def tiny_folder(
    arch: str, path: Path, dtype: torch.dtype = torch.bfloat16, max_shard_size: str = "50GB", **overrides: Any
) -> Path:
    """Saves a tiny model with its tokenizer the way a Hub folder looks; returns `path`."""
    model = tiny_model(arch, dtype=dtype, **overrides)
    model.save_pretrained(path, max_shard_size=max_shard_size)
    tiny_tokenizer(model.config.vocab_size).save_pretrained(path)
    return Path(path)
