"""A file of rows to a file of results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Unpack, cast

from stem_edge.batches.meter import Meter
from stem_edge.batches.output import ResultFile
from stem_edge.batches.reading import count_rows, is_parquet, read_rows
from stem_edge.batches.rows import InputRow, Result
from stem_edge.batches.run import answer
from stem_edge.batches.settings import SEQUENCES, Answers, Settings
from stem_edge.bundle.opening import Bundle
from stem_edge.errors import InputError, UnknownOptionError
from stem_edge.graph.names import STEP_TOKENS
from stem_edge.hub.fetch import pinned
from stem_edge.runtime.backends.keywords import LoadKeywords
from stem_edge.runtime.backends.options import LoadOptions
from stem_edge.runtime.loading import load
from stem_edge.runtime.model import Model
from stem_edge.runtime.sampling_params import SamplingOptions

STDIN = "-"


class BatchKeywords(LoadKeywords, SamplingOptions, total=False):
    """Keywords of stem_edge.load, and the fields of SamplingParams."""


@dataclass(frozen=True)
class Batch:
    """Outcome of a batch."""

    results: int  # lines of the output
    errors: int  # of them
    answered: int  # rows of this run
    failed: int  # of them
    tokens: int  # of the answers of this run
    seconds: float  # without loading
    first_error: str | None = None  # text of this run's first error, with its line


def batch(
    input: str | Path,
    output: str | Path,
    model: Model | str | Path | None = None,
    *,
    column: str | None = None,
    retry_errors: bool = False,
    name: str | None = None,
    answers: Answers | None = None,
    **options: Unpack[BatchKeywords],
) -> Batch:
    """Answer the prompts of a file into another: a line of JSON each, in the order of completion.

    input: JSON lines, or "-" for those of stdin: {"prompt": ...} or {"messages": [...]}, with "id" and
        fields of SamplingParams as they please; or requests in the form of OpenAI's batches, with
        custom_id, method, url and body. Or a parquet file.
    output: gets {"id", "text", "finish_reason", "usage"} of each plain row, OpenAI's form of others,
        and an object with "error" where a row cannot be answered. It is the only state: a row is done
        if its id is in it. So an interrupted batch goes on when it is called again, and each row has
        one line at the end.
    model: a loaded one, or a bundle to load: its folder, or its name on a hub (one commit is taken).
    column: of the prompts in a parquet file; its column "id" has their ids.
    retry_errors: answer rows whose results are errors again.
    name: of the model in results of OpenAI's form; default: the bundle's folder, or name on a hub.
    answers: computes instead of a model here, such as the result of stem_edge.cluster.batches.ray_answers; it
        takes name and options when it is made.
    options: fields of SamplingParams, of plain rows that do not have their own; and, for a path,
        keywords of stem_edge.load. sequences: most answers that are computed together; default 8, if
        memory allows. seed: by which each sampled row without a seed has its own; default 0, so
        that a repeat gives the same; None: different each time. progress: False shows none.

    A step of several sequences rounds otherwise than a step of one, which can change a token: on
    onnxruntime in the same way whichever sequences meet, on ggml not. exact=True computes the bits of
    lone answers. Raises InputError, and what stem_edge.load raises; complete results are in the
    output then, too.
    """
    if (model is None) == (answers is None):
        raise InputError("give either a model or answers")
    source, target = None if str(input) == STDIN else Path(input), Path(output)
    _check(source, target, column)
    bundle = None if isinstance(model, Model) or model is None else str(model)
    if bundle is not None:  # the same commit whenever it is opened
        model = bundle = pinned(bundle, options.get("progress"))
    loading, settings = split(options, name, bundle)
    _check_taken(model, answers, options, name)
    meter = Meter(count_rows(source, column), options.get("progress"))
    with ResultFile(target, retry_errors=retry_errors) as found:
        rows = _new(read_rows(source, column), found, meter)
        first = next(rows, None)
        if first is not None:  # otherwise nothing needs a model
            with _computing(model, answers, loading, settings) as compute:
                _write(compute(chain((first,), rows)), found, meter)
        return Batch(
            len(found),
            found.errors,
            meter.answered,
            meter.failed,
            meter.tokens,
            meter.seconds,
            meter.first_error,
        )


def split(
    options: BatchKeywords, name: str | None = None, bundle: str | Path | None = None
) -> tuple[LoadKeywords, Settings]:
    """Return keywords of stem_edge.load, for a bundle, and what holds for all rows.

    Raises InputError, and what open_bundle raises.
    """
    if unknown := options.keys() - BatchKeywords.__annotations__.keys():
        raise UnknownOptionError(
            f"there is no option {min(unknown)}; see stem_edge.load and stem_edge.SamplingParams"
        )
    given = cast("dict[str, Any]", options.copy())
    sampling = {key: given.pop(key) for key in SamplingOptions.__annotations__ if key in given}
    seed, sequences = sampling.pop("seed", 0), given.get("sequences")
    together = SEQUENCES if sequences is None else sequences
    settings = Settings(cast(SamplingOptions, sampling), seed, together, name)
    if sequences is None:
        given["sequences"] = 1
    if bundle is not None:
        loading = LoadOptions(**given)
        opened = loading.open(bundle)  # in any case, so that its errors come first
        if sequences is None:
            given["sequences"] = _contexts(opened, loading)
    return cast(LoadKeywords, given), settings


def _contexts(bundle: Bundle, options: LoadOptions) -> int:
    """Return the full contexts that SEQUENCES short answers take, as memory is counted for them."""
    length = options.context_length or bundle.manifest.model.max_context
    return max(1, -(-SEQUENCES * STEP_TOKENS // max(length, STEP_TOKENS)))


def _check_taken(
    model: object, answers: Answers | None, options: BatchKeywords, name: str | None
) -> None:
    """Raise InputError for options that nothing would take."""
    given = {*options, *(() if name is None else ("name",))} - {"progress"}
    if answers is not None and given:
        raise InputError(f"{min(given)} is not for answers; give it to what makes them")
    unused = given.intersection(LoadKeywords.__annotations__) - {"sequences"}
    if isinstance(model, Model) and unused:
        raise InputError(f"{min(unused)} is an option of loading; give it to stem_edge.load")


def _check(source: Path | None, target: Path, column: str | None) -> None:
    if str(target) == STDIN:
        raise InputError(f"{target}: results need a file, from which a batch goes on; name one")
    if target.suffix.lower() == ".parquet":
        raise InputError(f"{target}: results are lines of JSON; choose a name like results.jsonl")
    if not target.parent.is_dir():
        raise InputError(f"{target}: there is no folder {target.parent}; make it first")
    if source is None or not source.exists():  # reading reports what cannot be read
        return
    if target.exists() and source.samefile(target):
        raise InputError(f"{target}: is the input, too; choose another output")
    if column is not None and not is_parquet(source):
        raise InputError(f"column is for parquet files, and {source} is none; leave it out")


def _new(rows: Iterator[InputRow], found: ResultFile, meter: Meter) -> Iterator[InputRow]:
    """Yield the rows that are not done."""
    for row in rows:
        if row.key in found:
            meter.skipped += 1
        else:
            yield row


@contextmanager
def _computing(
    model: Model | str | Path | None,
    answers: Answers | None,
    loading: LoadKeywords,
    settings: Settings,
) -> Iterator[Answers]:
    if answers is not None:
        yield answers
    elif isinstance(model, Model):
        yield partial(answer, model, settings=settings)
    else:
        with load(cast(Path, model), **loading) as loaded:
            yield partial(answer, loaded, settings=settings)


def _write(results: Iterator[Result], found: ResultFile, meter: Meter) -> None:
    """Write results as they come."""
    meter.begin()
    try:
        for result in results:
            if found.append(result):
                meter.add(result)
    finally:
        meter.end()
        if (close := getattr(results, "close", None)) is not None:
            close()
