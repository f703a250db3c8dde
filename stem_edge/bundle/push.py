"""Pushing a bundle to a model hub, in one commit: a revision there is always a whole bundle.

Beside it lies a model card, README.md, for people and for search. It is no file of the bundle, so nothing
reads it when the bundle is opened.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stem_edge.bundle.checksums import verify
from stem_edge.bundle.manifest import (
    BACKBONES,
    MANIFEST,
    TABLES,
    TOKEN_COUNTS,
    Manifest,
    QualityReport,
)
from stem_edge.bundle.opening import open_bundle
from stem_edge.errors import HubError, InputError
from stem_edge.files.plain_files import damaged
from stem_edge.graph.formats import EngineName
from stem_edge.hub import PREFIX
from stem_edge.hub.asking import LOG_IN, UnreachableError, asking
from stem_edge.hub.fetch import Snapshot, fetch, hub_api, open_snapshot
from stem_edge.hub.names import HubName, hub_name
from stem_edge.progress import Progress, show_status, tell
from stem_edge.units import format_size

CARD = "README.md"
OWN_CARD = "<!-- stem-edge push writes this card; without this line, it leaves yours alone. -->"
HUB = "https://huggingface.co/"


def model_card(
    manifest: Manifest, name: str, license: str | None = None, base_model: str | None = None
) -> str:
    """Return the card of a bundle, as Markdown with a header in YAML.

    name: org/name on the hub; base_model: name of the original model; license: as the hub spells
    it, like apache-2.0. Unknown ones are left out.
    """
    parts = [_header(license, base_model), OWN_CARD, f"# {name.partition('/')[2]}"]
    parts += [_origin(base_model), _sizes(manifest)]
    parts += [_quality(engine, manifest.reports[engine]) for engine in manifest.engines]
    parts += [f"## Run it\n\n```sh\n{_commands(name)}\n```"]
    return "\n\n".join(parts) + "\n"


def _header(license: str | None, base_model: str | None) -> str:
    facts = {"library_name": "stem-edge", "license": license, "base_model": base_model}
    # Strings of JSON are strings of YAML, too, whatever is in them.
    lines = [f"{key}: {json.dumps(value)}" for key, value in facts.items() if value is not None]
    lines += ["pipeline_tag: text-generation", "tags:", "- stem-edge", "- quantized"]
    return "\n".join(["---", *lines, "---"])


def _origin(base_model: str | None) -> str:
    made = "A bundle for [stem-edge](https://pypi.org/project/stem-edge/)"
    return f"{made}, made from [{base_model}]({HUB}{base_model})." if base_model else f"{made}."


def _sizes(manifest: Manifest) -> str:
    model, tables = manifest.model, manifest.table_format
    rows = [
        ("parameters of the backbone", f"{model.backbone_parameters:,}"),
        ("layers, width", f"{model.n_layers}, {model.dim}"),
        ("tokens", f"{model.vocab_size:,}"),
        ("context", f"{model.max_context:,} tokens"),
        ("size on disk", format_size(manifest.nbytes)),
    ]
    for engine in manifest.engines:
        if (format := manifest.format(engine)) is not None:
            nbytes = format_size(manifest.reports[engine].backbone_nbytes)
            rows.append((f"backbone for {engine}", f"{format.name}, {nbytes}"))
    if tables is not None:
        nbytes = format_size(manifest.report.tables_nbytes)
        kind, records = tables.kind, tables.stored.records
        rows.append(("tables, which stay on flash", f"{kind}, {nbytes}, {records:,} records"))
    return "\n".join(["| | |", "|---|---|", *(f"| {what} | {found} |" for what, found in rows)])


def _quality(engine: EngineName, report: QualityReport) -> str:
    tokens = len(report.probe_tokens)
    if not tokens:
        return f"## Quality on {engine}\n\nTypes are kept as stored in the checkpoint."
    lines = [
        f"## Quality on {engine}",
        f"Compared with its checkpoint ({format_size(report.checkpoint_nbytes)}) over {tokens} tokens:",
        f"- mean divergence: {report.divergence:.4g} nats",
    ]
    if report.agreement is not None:
        lines.append(f"- the same best token at {report.agreement:.1%} of positions")
    if report.divergence_99 is not None:
        lines.append(f"- 99th percentile of the divergence: {report.divergence_99:.4g} nats")
    return f"{lines[0]}\n\n{lines[1]}\n\n" + "\n".join(lines[2:])


def _commands(name: str) -> str:
    return "\n".join(
        [
            "pip install stem-edge",
            f"stem-edge generate hf:{name} 'Once upon a time'",
            f"stem-edge serve hf:{name}",
        ]
    )


RIGHT = "ok"
COMMIT_SECONDS = 300.0  # a hub looks at all files of a commit before it answers


def push(
    bundle: str | Path,
    name: str,
    *,
    private: bool = False,
    revision: str | None = None,
    license: str | None = None,
    base_model: str | None = None,
    progress: bool | None = None,
) -> str:
    """Push a bundle to a model hub, with a model card; return its name with the new commit.

    All files are hashed first, so that no damage is spread. The hub's files are not sent again, so
    a push that was cut off goes on. Files of an older bundle are deleted there.

    name: org/name; the model is made if it does not exist.
    private: make a new model for its owner only; refuse one that is public.
    revision: branch to push to, made if it does not exist. Default: the main branch.
    license, base_model: for the card, as the hub spells them: "apache-2.0", "org/name".

    Raises BundleError, HubError, InputError.
    """
    target = hub_name(name if name.startswith(PREFIX) else PREFIX + name)
    if target is None or (target.revision and revision):
        raise InputError(f"{name!r} and revision {revision!r}; give the revision once")
    target = HubName(target.repository, revision or target.revision)
    _check_card(license, base_model)
    opened = open_bundle(bundle, progress=progress)
    with Progress(opened.manifest.nbytes, "verifying", progress) as bar:
        found = verify(opened.path, bar.advance)
    files = [MANIFEST, *opened.manifest.files]
    for file in files[1:]:
        if found[file] != RIGHT:
            raise damaged(opened.file(file), found[file])
    with _log_in_first(target), asking(target):
        _make(target, private=private)
    before = open_snapshot(target, progress=False)
    card = model_card(opened.manifest, target.repository, license, base_model)
    with asking(target, COMMIT_SECONDS), _quiet(progress):
        additions = _additions(opened.path, files)
        if _is_ours(before):
            additions.append(_addition(CARD, card.encode()))
        if progress is not False:
            show_status(f"sending {len(files)} files, {format_size(opened.manifest.nbytes)}")
        done = hub_api().create_commit(
            target.repository,
            [*additions, *_deletions(before.listing, files)],
            commit_message="Push a bundle of stem-edge",
            revision=target.revision,
            num_threads=2,
        )
    if done.oid == before.name.revision:
        tell(f"{target} has all of it already", progress)
    return str(target.at(str(done.oid)))


def _check_card(license: str | None, base_model: str | None) -> None:
    """Raise InputError for a license or model name that hubs do not accept."""
    if license is not None and not re.fullmatch("[a-z0-9][a-z0-9.+-]*", license):
        raise InputError(f"license is {license!r}; expected an id of the hub's, like apache-2.0")
    if base_model is not None and not re.fullmatch(r"[\w.-]+/[\w.-]+", base_model, re.ASCII):
        raise InputError(f"base_model is {base_model!r}; expected org/name")


@contextmanager
def _log_in_first(target: HubName) -> Iterator[None]:
    """Let a refusal say first that no token is set, if that is so."""
    from huggingface_hub import get_token

    try:
        yield
    except UnreachableError:
        raise
    except HubError as error:
        if get_token() is not None:
            raise
        said = str(error).removeprefix(f"{target}: ").partition(";")[0]
        raise HubError(
            f"{target}: pushing needs a token, and none is set; {LOG_IN} ({said})"
        ) from error


@contextmanager
def _quiet(progress: bool | None) -> Iterator[None]:
    """Let the hub's library show its bars on a terminal only, and no warnings about itself."""
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    hide = not are_progress_bars_disabled() and (progress is False or not sys.stderr.isatty())
    if hide:
        disable_progress_bars()
    try:
        with warnings.catch_warnings(), _filtered(logging.getLogger("huggingface_hub.hf_api")):
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        if progress is not False:
            show_status("")
        if hide:
            enable_progress_bars()


@contextmanager
def _filtered(logger: logging.Logger) -> Iterator[None]:
    """Drop the library's message that no file was modified; push says that itself."""

    def wanted(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("No files have been modified")

    logger.addFilter(wanted)
    try:
        yield
    finally:
        logger.removeFilter(wanted)


def _make(target: HubName, *, private: bool) -> None:
    """Make the model and the branch, if they are missing."""
    api = hub_api()
    api.create_repo(target.repository, private=private or None, exist_ok=True)
    # There may have been one, for all to see.
    if private and not api.model_info(target.repository).private:
        raise InputError(
            f"{target}: is public, and private is for new models; make it private on the hub first, "
            "give another name, or leave out private (--private)"
        )
    if target.revision is not None:
        api.create_branch(target.repository, branch=target.revision, exist_ok=True)


def _is_ours(before: Snapshot) -> bool:
    """Return whether push may replace the card: it is missing, or push wrote it."""
    if CARD not in before.listing:
        return True
    fetch(before, [CARD])
    try:
        return OWN_CARD in (before.folder / CARD).read_text("utf-8", errors="replace")
    except OSError as error:
        raise HubError(f"{before.name}: cannot read its {CARD} ({error.strerror})") from error


def _additions(folder: Path, files: Collection[str]) -> list[Any]:
    return [_addition(file, folder / file) for file in files]


def _addition(file: str, source: Path | bytes) -> Any:
    from huggingface_hub import CommitOperationAdd

    return CommitOperationAdd(file, source)


def _deletions(there: Collection[str], files: Collection[str]) -> list[Any]:
    """Delete what an older bundle had, and leave all that others put there."""
    from huggingface_hub import CommitOperationDelete

    own = {
        TOKEN_COUNTS,
        *(file for kind in BACKBONES.values() for file in (*kind.files, *kind.native)),
    }
    old = [f for f in there if (f in own or f.startswith(f"{TABLES}/")) and f not in files]
    return [CommitOperationDelete(file) for file in old]
