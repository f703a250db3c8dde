"""A small Gemma 4 as Hugging Face has it: weights, tokenizer, chat template, ends of a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from hf_folders import edit, make_gemma
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from tokenizers.processors import TemplateProcessing
from trained_tokenizers import corpus

SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>", "<image>"]
EOS, BOS, END_OF_TURN, IMAGE = 1, 2, 5, 6
PIECES = 256  # trained ones, beside special tokens and bytes
VOCAB_SIZE = len(SPECIAL) + 256 + PIECES + 2
TEMPLATE = """{{ bos_token }}{% for message in messages %}
{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) }}
{{ message.content | trim }}<end_of_turn>
{% endfor %}
{%- if add_generation_prompt %}<start_of_turn>model
{% endif %}"""


def make_tokenizer() -> Tokenizer:
    """Make a tokenizer with Gemma's steps: spaces as metaspaces, BPE, bytes for what is unknown."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    # Not among the pieces, so that there is text which needs bytes.
    texts = (text for text in corpus() if "\u6771" not in text)
    trained.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=PIECES, show_progress=False))
    learned = json.loads(trained.to_str())["model"]
    pieces = sorted(learned["vocab"], key=learned["vocab"].__getitem__)
    names = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    made = Tokenizer(
        models.BPE(
            {name: number for number, name in enumerate(names)},
            [tuple(pair) for pair in learned["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    made.normalizer = normalizers.Replace(" ", "\u2581")
    made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    made.add_special_tokens([AddedToken(name, normalized=False) for name in SPECIAL])
    made.add_tokens([AddedToken(run, normalized=False) for run in ("\n\n", "\u2581\u2581")])
    made.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    return made


def write_tokenizer(folder: Path) -> Tokenizer:
    """Write the tokenizer, and return it."""
    made = make_tokenizer()
    made.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "GemmaTokenizer", "bos_token": "<bos>", "eos_token": "<eos>",
        "pad_token": "<pad>", "unk_token": "<unk>",
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return made


def write_gemma(folder: Path, **changes: Any) -> Any:
    """Write a folder; return transformers' model, in which every tensor affects the logits."""
    sizes = {"vocab_size": VOCAB_SIZE, "vocab_size_per_layer_input": VOCAB_SIZE}
    model = make_gemma(**(sizes | {"max_position_embeddings": 256} | changes))
    for layer in model.model.layers:  # flat scores, so that rounding changes little
        layer.self_attn.q_norm.weight.data *= 0.3
    model.save_pretrained(folder)
    write_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    edit(folder, "generation_config.json", eos_token_id=[EOS, END_OF_TURN])
    return model


def logits(model: Any, ids: list[int], **given: Any) -> Any:
    """Return transformers' logits [T, V]."""
    with torch.no_grad():
        return model(torch.tensor([ids]), **given).logits[0].numpy()
