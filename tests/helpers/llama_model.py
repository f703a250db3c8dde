"""A small chat model of random weights for the tests of the server, with a vocabulary of short English texts."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

import stem_edge

SPECIAL = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content or [] %}{{ part.text }}{% endfor %}{% endif %}"
    "{% for call in message.tool_calls or [] %}\n<tool_call>\n"
    '{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}\n{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTEXT = 8192  # tokens, as the tests ask for


def write_bundle(out: Path, texts: list[str]) -> None:
    """Write a bundle whose tokenizer is trained on texts."""
    checkpoint = out.parent / "checkpoint"
    _write_model(checkpoint, _write_tokenizer(checkpoint, texts))
    stem_edge.export_bundle(checkpoint, out, type="fp32", progress=False)


def _write_tokenizer(folder: Path, texts: list[str]) -> int:
    """Write tokenizer files; return the size of the vocabulary."""
    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        special_tokens=[AddedToken(name, special=True) for name in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    begin = ("<s>", 1)
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[begin])
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    told = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    return int(tokenizer.get_vocab_size())


def _write_model(folder: Path, vocab_size: int) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight[: len(SPECIAL)] = 0  # so that answers seldom end by chance
    model.save_pretrained(folder)
