"""A small random Gemma 4 and its assistant, and what transformers drafts with them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
import transformers
from all_borrowed import sharing_all
from hf_folders import GEMMA, make_gemma, randomized, written
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

V, CLUSTERS, BEST = 320, 16, 3  # tokens of both; clusters of tokens, and those that are scored
SIZES: dict[str, Any] = {
    "vocab_size": V, "vocab_size_per_layer_input": V, "max_position_embeddings": 1024,
}  # fmt: skip
# Two kinds of layers, the sliding one twice, so that two read the keys and values of one.
ASSISTANT: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 3, "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}  # fmt: skip


class Pair(NamedTuple):
    """A target and its assistant in transformers, and their folders."""

    target: Any
    assistant: Any
    folder: Path

    def drafts(self, seen: Sequence[int], count: int) -> list[int]:
        """Return what transformers drafts after a text of which all but the last token is computed."""
        given = transformers.GenerationConfig(max_length=len(seen) + count + 1)
        with torch.no_grad(), patch.object(self.assistant, "generation_config", given):
            given.num_assistant_tokens = count
            generator = SinglePositionMultiTokenCandidateGenerator(
                self.assistant, self.target.get_input_embeddings(), given
            )
            ids = torch.tensor([seen])
            outputs = self.target(
                ids[:, :-1], output_hidden_states=True, return_shared_kv_states=True
            )
            found, _ = generator.get_candidates(ids, {}, outputs, False, 0)
        drafts: list[int] = found[0, len(seen) :].tolist()
        return drafts


def make_pair(folder: Path, *, clusters: int = CLUSTERS, **changes: Any) -> Pair:
    """Make random models in which every tensor counts, and write them to folders t and a."""
    target = make_gemma(**SIZES)
    with sharing_all():
        text = transformers.Gemma4TextConfig(**(GEMMA | SIZES | ASSISTANT))
        own = {"use_ordered_embeddings": clusters > 0, "num_centroids": max(clusters, 1)}
        own |= {
            "centroid_intermediate_top_k": BEST,
            "backbone_hidden_size": target.config.hidden_size,
        }
        config = transformers.Gemma4AssistantConfig(text_config=text, **(own | changes))
        config._attn_implementation = "eager"
        assistant = transformers.Gemma4AssistantForCausalLM(config).eval()
    randomized(assistant, seed=1)
    with torch.no_grad():
        for layer in assistant.model.layers:
            layer.layer_scalar.fill_(0.9)
        for layer in (*target.model.layers, *assistant.model.layers):
            layer.self_attn.q_norm.weight *= 0.3  # flat scores, so that rounding changes little
        if clusters:
            mixed = np.random.default_rng(0).permutation(V)
            assistant.masked_embedding.token_ordering.copy_(torch.tensor(mixed))
    written(target, folder / "t")
    assistant.save_pretrained(folder / "a")
    return Pair(target, assistant, folder)
