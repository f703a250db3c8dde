"""Chooses the reader for a checkpoint, by the names of its files."""

from __future__ import annotations

from pathlib import Path

from stem_edge.bundle.hub.names import meant_name
from stem_edge.bundle.manifest import MANIFEST
from stem_edge.errors import CheckpointError
from stem_edge.export.checkpoints.blagpt import find_states
from stem_edge.export.checkpoints.blagpt import read_checkpoint as read_blagpt
from stem_edge.export.checkpoints.checkpoint import Checkpoint, note_zero_tables
from stem_edge.export.checkpoints.fetched import checkpoint_folder
from stem_edge.export.checkpoints.gguf import read_checkpoint as read_gguf
from stem_edge.export.checkpoints.hugging_face.reader import CONFIG
from stem_edge.export.checkpoints.hugging_face.reader import read_checkpoint as read_hugging_face
from stem_edge.export.checkpoints.lingua import PARAMS
from stem_edge.export.checkpoints.lingua import read_checkpoint as read_lingua
from stem_edge.export.tensor_files.json import one_line
from stem_edge.export.tensor_files.source_file import SourceFile, looks_like
from stem_edge.files.checkpoint_files import SUFFIX, is_checkpoint

ARCHIVES = (".zip", ".npz", ".tar", ".tgz", ".gz", ".bz2", ".xz", ".zst", ".7z", ".rar")
PICKLES = (".bin", ".ckpt", ".pkl", ".pickle")
MOST_SHOWN = 8  # names of files in a message
# Suffix of a file name -> advice, for a folder without a file that is read.
ADVICE: dict[tuple[str, ...], str] = {
    (".safetensors",): f", and no {CONFIG}; copy that file, too",
    (SUFFIX,): "; give one of these files itself",
    ARCHIVES: "; unpack the archive with a tool that you trust, and give the folder with its files",
    PICKLES: ", which can carry code; save the model as safetensors where you trust it, and copy that",
}


def read_checkpoint(path: str | Path) -> Checkpoint:
    """Open a checkpoint of any known trainer: a local path, or hf:org/name on a hub.

    Raises CheckpointError, HubError, InputError.
    """
    return note_zero_tables(_open(checkpoint_folder(path)))


def _open(path: Path) -> Checkpoint:
    if not path.exists():
        hint = f"did you mean {meant}? else " if (meant := meant_name(path.as_posix())) else ""
        raise CheckpointError(
            f"{path}: no such checkpoint; {hint}give a folder that training wrote, a "
            "GGUF file, or a model on a hub as hf:org/name"
        )
    if (path / CONFIG).is_file():  # must be first, since Mistral's folders have a params.json, too
        return read_hugging_face(path)
    if path.suffix == SUFFIX and path.is_file():
        return read_gguf(path)
    if (path / PARAMS).is_file():
        return read_lingua(path)
    if find_states(path):
        return read_blagpt(path)
    _refuse(path)
    raise CheckpointError(f"{path}: no {CONFIG} or {PARAMS}; give a checkpoint or a GGUF file")


def _refuse(path: Path) -> None:
    """Raise CheckpointError with advice if `path` is something that users mistake for a checkpoint."""
    if path.is_file():
        what = looks_like(SourceFile(path).head)
        if path.name.lower().endswith(ARCHIVES):
            what = f"{what or 'an archive by its name'}: unpack it with a tool that you trust"
        raise CheckpointError(
            f"{path}: not a checkpoint{f', but {what}' if what else ''}; give the folder it lies in, "
            "a .gguf file, or a .pt file of BlaGPT"
        )
    if not path.is_dir():
        raise CheckpointError(f"{path}: not a folder; give the folder that holds the checkpoint")
    if (path / MANIFEST).is_file():
        raise CheckpointError(f"{path}: is a bundle; give the checkpoint that it was made from")
    folders = (p for pattern in ("*/", "*/*/") for p in sorted(path.glob(pattern)))
    if below := [str(p.relative_to(path)) for p in folders if is_checkpoint(p)]:
        raise CheckpointError(
            f"{path}: not a checkpoint itself, but its folders {', '.join(below[-3:])} are; give one "
            "of them"
        )
    names = sorted(p.name for p in path.iterdir())
    for endings, advice in ADVICE.items():
        if found := [name for name in names if name.lower().endswith(endings)]:
            shown = ", ".join(map(one_line, found[:MOST_SHOWN]))
            raise CheckpointError(f"{path}: not a checkpoint, but has {shown}{advice}")
