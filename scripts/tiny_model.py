"""Make a tiny Llama with random weights and a tokenizer, so that a real vLLM can be run anywhere.

usage: tiny_model.py FOLDER      (with the python of vLLM's environment)

2 layers, 3 MB, vocabulary of 512 byte-level tokens. What it says is noise; everything around it is
real.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEXT = "One engine on a machine of many cores wastes most of them; several small ones do not. "
TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}<|assistant|>"


def main() -> None:
    """Write the model unless it is there."""
    folder = Path(sys.argv[1])
    if (folder / "model.safetensors").is_file():
        return
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator([TEXT * 20], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    fast.chat_template = TEMPLATE
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        bos_token_id=0,
        eos_token_id=1,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    fast.save_pretrained(folder)
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # 0600 by itself; a service has another user


if __name__ == "__main__":
    main()
