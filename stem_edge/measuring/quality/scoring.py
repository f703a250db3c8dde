"""The models that score a text: a bundle, and the reference it is compared with."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from stem_edge.edit_files.file import Edit
from stem_edge.measuring.planning.candidates import is_bundle, model_folder, open_checkpoint
from stem_edge.measuring.quality.logit_source import bundle_logits, checkpoint_logits
from stem_edge.measuring.quality.scores import Logits
from stem_edge.runtime import Model
from stem_edge.runtime.backends.keywords import LoadKeywords
from stem_edge.runtime.backends.options import LoadOptions
from stem_edge.runtime.loading import load_with
from stem_edge.system.memory import own_memory
from stem_edge.units import parse_size


@dataclass(frozen=True)
class Scoring:
    """Models that score windows of a text."""

    bundle: str | Path
    keywords: LoadKeywords  # of stem_edge.load, for the bundle; context_length is the window
    window: int
    edits: tuple[Edit, ...]
    against: str | Path | None
    prefill: bool  # whether the graph for prompts of onnxruntime is measured

    def open(self, stack: ExitStack) -> tuple[str, str | None, list[Logits]]:
        """Load the models; the stack closes them. Raises what stem_edge.load raises.

        Returns the engines of bundle and reference (None for a checkpoint, or without a reference), and
        their logits.
        """
        keywords, references, engine = self.keywords, list[Logits](), None
        if self.against is not None:
            path = model_folder(self.against)
            if is_bundle(path):
                other, left = self._reference(stack, path)
                keywords, engine = keywords | {"memory": left}, other.plan.engine
                references = [partial(bundle_logits, other)]
            else:
                references = [partial(checkpoint_logits, open_checkpoint(path))]
        model = stack.enter_context(
            load_with(self.bundle, LoadOptions(**keywords, warm_start=False))
        )
        model.engine.uses_prefill = self.prefill
        stack.enter_context(model.edited(*self.edits))
        return model.plan.engine, engine, [partial(bundle_logits, model), *references]

    def _reference(self, stack: ExitStack, path: Path) -> tuple[Model, int | None]:
        """Load another bundle in half of the memory, and return it and what it leaves."""
        memory = self.keywords.get("memory")
        limit = None if memory is None else parse_size(memory)
        options = LoadOptions(
            memory=None if limit is None else limit // 2,
            threads=self.keywords.get("threads"),
            context_length=self.window,
            warm_start=False,
            progress=self.keywords.get("progress"),
        )
        model = load_with(path, options)
        stack.enter_context(model)
        model.engine.uses_prefill = False
        # The bundle is planned with this process's memory as it is, so only what the reference has
        # planned and not yet taken must be left out.
        taken = max(0, model.plan.total - own_memory())
        return model, None if limit is None else limit - taken
