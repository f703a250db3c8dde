"""The public Model class: a loaded bundle that generates text and computes logits."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from stem_edge.runtime.answering import Answering
from stem_edge.runtime.sampling_params import SamplingOptions, SamplingParams
from stem_edge.runtime.scheduling.request import Chunk

if TYPE_CHECKING:  # imported by the methods that need them, which few callers use
    from stem_edge.runtime.conversations.conversation import Conversation
    from stem_edge.runtime.scheduling.many import Prompt, StemIds
    from stem_edge.runtime.scheduling.request import Request
    from stem_edge.runtime.scheduling.scheduler import Scheduler
    from stem_edge.runtime.text.chat import Messages
    from stem_edge.runtime.token_ids import StemId


class Model(Answering):
    """A loaded bundle. Use it as a context manager, or call close().

    Threads may share it: their steps alternate. generate_many decodes several prompts together. KV
    caches of earlier prompts stay in memory: if a prompt begins like an earlier prompt, only the rest
    is computed, and the tokens of the answer stay the same (docs/python.md). A forked process cannot
    use the model. It stays usable after OutOfMemoryError.
    """

    def conversation(
        self, messages: Messages = (), *, template_arguments: Mapping[str, Any] | None = None
    ) -> Conversation:
        """Start a conversation, or continue `messages`. Arguments: see chat_prompt. Raises InputError for bad messages."""
        from stem_edge.runtime.conversations.conversation import Conversation

        return Conversation(self, messages, template_arguments)

    def generate_many(
        self,
        prompts: Iterable[str | Sequence[int]],
        params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        sequences: int = 8,
        exact: bool | None = None,
        stem_ids: Iterable[Sequence[StemId] | None] | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Generator[tuple[int, Chunk]]:
        """Continue many prompts, several at a time; yield (prompt number, chunk) as they come.

        The tokens are those of generate, except for rounding: kernels may round a step of several
        sequences differently. That can change a token if two tokens are almost equally probable.

        prompts: an iterable of any length. Prompts begin in order, each once fewer than `sequences` run.
            Nothing decodes while the iterable waits for its next prompt.
        params: for all prompts, or one for each.
        options: as for generate, for all prompts.
        sequences: most sequences that decode together; fewer do if memory is short.
        exact: compute the same bits as `generate`. Sequences then decode one by one, unless the first
            load measured that batches compute the same bits. Default: `exact` of load.
        stem_ids: for each prompt, the stem_ids of generate, or None.

        A sequence that fails ends with a chunk that has finish_reason "error" and its `error`; the other
        sequences continue. Raises InputError at once for bad options, and for a bad prompt in a list.
        """
        from stem_edge.runtime.scheduling.many import numbered, params_of_each, requests

        edits = self._edits_now()

        def request(prompt: Prompt, params: SamplingParams, stem_ids: StemIds) -> Request:
            return self._request(prompt, params, stem_ids, edits)

        found = requests(request, prompts, params_of_each(params, options), stem_ids)
        return numbered(self.scheduler(sequences, exact=exact), found)

    def generate_texts(
        self,
        prompts: Iterable[str | Sequence[int]],
        params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        sequences: int = 8,
        exact: bool | None = None,
        stem_ids: Iterable[Sequence[StemId] | None] | None = None,
        **options: Unpack[SamplingOptions],
    ) -> list[str]:
        """Return the text generated for each prompt, in order. Arguments: see generate_many.

        Raises the first error of any prompt.
        """
        from stem_edge.runtime.scheduling.many import texts

        many = self.generate_many(
            prompts, params, sequences=sequences, exact=exact, stem_ids=stem_ids, **options
        )
        return texts(many)

    def scheduler(
        self, sequences: int = 8, *, exact: bool | None = None, steady: bool = False
    ) -> Scheduler:
        """Make a Scheduler. The caller makes requests with `request`, submits them, and calls `step`.

        Model.stats has the metrics of all requests together. Raises InputError for a bad `sequences`, OutOfMemoryError.

        sequences, exact: see generate_many.
        steady: decode a single request like a batch, without drafts, so that tokens do not depend on batch size.
        """
        from stem_edge.runtime.backends.options import check_sequences
        from stem_edge.runtime.scheduling.scheduler import Scheduler

        check_sequences(sequences)
        if self.plan.device is not None:  # which has memory for so many full contexts
            sequences = min(sequences, self.plan.sequences)
        sequences, stepping = min(sequences, self.engine.rows.step_sequences), self.stepping
        return Scheduler(
            self.engine,
            self._prefixes,
            stepping if exact is None else stepping._replace(exact=exact),
            self._recorder(),
            self.plan.context_length,
            sequences,
            steady=steady,
        )

    def save_conversation(self, path: str | Path, conversation: Conversation) -> None:
        """Write the messages of a conversation to a file, as JSON that only this user can read.

        Raises InputError if writing fails.
        """
        from stem_edge.runtime.conversations.file import save_messages

        self.engine.check_usable()
        save_messages(Path(path), conversation.messages)

    def load_conversation(self, path: str | Path) -> Conversation:
        """Return the conversation that save_conversation wrote to a file.

        The next turn computes the whole prompt, unless `prompt_cache` has it. Raises InputError for any other file.
        """
        from stem_edge.runtime.conversations.file import load_messages

        self.engine.check_usable()
        return self.conversation(load_messages(Path(path)))

    def forget_prefixes(self) -> None:
        """Drop the KV caches of earlier prompts."""
        self._prefixes.forget()
