"""Decides which keys of a config.json are read, ignored or refused.

| key | what happens |
|---|---|
| read by this project | used |
| for training, generating text or bookkeeping | ignored |
| other key that transformers knows | refused unless null or transformers' default |
| unknown to transformers | ignored with a note, because it cannot change what transformers computes |

keys.json lists the keys that transformers knows; tools/hf_keys.py writes it. In this project's own
schema (stem_schema.py), an unknown key is refused unless it is null or false.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec

from stem_edge.errors import CheckpointError
from stem_edge.export.tensor_files.json import one_line

FILE = Path(__file__).with_name("keys.json")
LLAMA = "llama"  # this project's own schema shares its keys
# Keys that transformers knows but that do not change logits, in addition to `generation`.
_HARMLESS = """
architectures model_type transformers_version torch_dtype dtype use_cache name_or_path
initializer_range attention_dropout pretraining_tp altup_coef_clip id2label label2id num_labels
problem_type output_attentions output_hidden_states return_dict attn_implementation
experts_implementation
"""
HARMLESS = frozenset(_HARMLESS.split())
BOOKKEEPING = re.compile(r"_.*|.*_token_ids?")  # tokenizers/tokenizer.py reads eos_token_id
# Keys that name code in the checkpoint, which is never run here.
CODE = ("auto_map", "trust_remote_code", "custom_pipelines")
# The default in transformers is null, which means 1: RoPE rotates the whole head.
SAME_AS_NULL = {"partial_rotary_factor": 1}
MOST_SHOWN = 400  # characters


class KnownKeys(msgspec.Struct, frozen=True):
    """Keys of config.json that transformers knows, with their default values."""

    transformers: str  # the version
    generation: list[str]  # keys of text generation
    every: dict[str, Any]  # keys that every model_type has -> default
    models: dict[str, dict[str, Any]]  # model_type -> its other keys -> default

    def of(self, kind: str) -> dict[str, Any]:
        """Return key -> default of a model_type. This project's own schema has Llama's keys."""
        return self.every | self.models.get(kind, self.models[LLAMA]) | SAME_AS_NULL

    def of_text(self, kind: str) -> dict[str, Any]:
        """Return key -> default of the text model inside a (multimodal) model_type."""
        return self.of(f"{kind}_text" if f"{kind}_text" in self.models else kind)


def read_known_keys() -> KnownKeys:
    return msgspec.json.decode(FILE.read_bytes(), type=KnownKeys)


def check_keys(
    path: Path, given: Mapping[str, Any], kind: str, read: Collection[str]
) -> tuple[str, ...]:
    """Return notes for the user about ignored keys. Raises CheckpointError if a key may change the model.

    given: keys of config.json; kind: its model_type; read: names of the keys that this project reads.
    """
    keys = read_known_keys()
    known, own_schema = keys.of_text(kind), kind not in keys.models
    harmless = HARMLESS.union(CODE, keys.generation, read)
    rest = {
        key: value
        for key, value in given.items()
        if value is not None and key not in harmless and not BOOKKEEPING.fullmatch(key)
    }
    unknown = [key for key in rest if key not in known]
    expected = {key: repr(known[key]) for key in rest.keys() - unknown if rest[key] != known[key]}
    if own_schema:
        expected |= {key: "no such key" for key in unknown if rest[key] is not False}
    if expected:
        wrong = [key for key in rest if key in expected]
        said = "; ".join(
            f"{one_line(k)} is {one_line(repr(rest[k]))}, expected {expected[k]}" for k in wrong
        )
        raise CheckpointError(
            f"{path}: {one_line(said, MOST_SHOWN)}: may change what {kind} models compute; if you "
            "know that it does not, delete it from the file"
        )
    if own_schema or not unknown:
        return ()
    named = one_line(", ".join(unknown), MOST_SHOWN)
    return (f"{path.name}: ignored what transformers does not know in {kind} models: {named}",)
