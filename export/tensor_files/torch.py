"""Tensors in files of torch.save, read as data, without torch and without unpickling.

Such a file is an archive (torch_zip.py) with a pickle that says which values make which tensor
(torch_pickle.py), and the values themselves, which are read in place (stored_tensor.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from stem_edge.errors import CheckpointError
from stem_edge.export.tensor_files.json import one_line, reason_of
from stem_edge.export.tensor_files.stored_tensor import (
    VALUE_NBYTES,
    Checksum,
    SourceFile,
    StoredTensor,
    check_shape,
    check_type,
    extent,
)
from stem_edge.export.tensor_files.torch_pickle import Made, Name, read_pickle
from stem_edge.export.tensor_files.torch_zip import Member, read_member, read_members

MAX_PICKLE_NBYTES = 1 << 26  # enough, since the values are not in it
STORAGES = {
    "Float": "F32", "Half": "F16", "BFloat16": "BF16", "Double": "F64", "Int": "I32", "Long": "I64",
    "Char": "I8", "Byte": "U8", "Bool": "BOOL", "Short": "I16", "ComplexFloat": "C64",
    "ComplexDouble": "C128",
}  # fmt: skip
UNTYPED = "torch.storage.UntypedStorage"
DTYPES = {
    "uint16": "U16", "uint32": "U32", "uint64": "U64", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0", "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
}  # fmt: skip
# Names in a trainer's state; those without a maker are known only so that they can be skipped.
_BESIDE = """
collections.OrderedDict collections.defaultdict collections.Counter builtins.dict builtins.list
builtins.set builtins.complex builtins.bytearray _codecs.encode
torch.Size torch.device torch.Tensor torch.nn.parameter.Parameter torch.serialization._get_layout
torch._utils._rebuild_parameter torch._utils._rebuild_parameter_with_state
torch._utils._rebuild_sparse_tensor torch._utils._rebuild_meta_tensor_no_storage
torch._utils._rebuild_qtensor torch._utils._rebuild_tensor_v2 torch._utils._rebuild_tensor_v3
torch._tensor._rebuild_from_type_v2
numpy.ndarray numpy.dtype numpy.core.multiarray._reconstruct numpy._core.multiarray._reconstruct
"""
_TENSOR_NAMES = frozenset(_BESIDE.split()) | {UNTYPED}
_TENSOR_NAMES |= {f"torch.{kind}Storage" for kind in STORAGES}
# Prefixes that wrappers of a model put before its names.
WRAPPERS = re.compile(r"\b(lm_transformer|module|_orig_mod|_checkpoint_wrapped_module)\.")
T = TypeVar("T")


def load_tensors(path: Path) -> dict[Any, Any]:
    """Open a dict saved by torch.save, with a StoredTensor for each tensor, not read yet."""
    file = SourceFile(path)
    state = guarded(path, lambda: read_archive(file, 0, file.nbytes))
    if not isinstance(state, dict):
        raise CheckpointError(
            f"{path}: holds {describe(state)}; expected a dict of tensors: give another file"
        )
    return state


def named_tensors(path: Path, state: Any, skipped: tuple[str, ...] = ()) -> dict[str, StoredTensor]:
    """Return the matrices and vectors of a model's state, by names without wrappers' prefixes.

    skipped: prefixes of names to be left out. Raises CheckpointError.
    """
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: holds {describe(state)}; expected a dict of tensors")
    tensors: dict[str, StoredTensor] = {}
    for key, tensor in state.items():
        name = WRAPPERS.sub("", str(key))
        if name.startswith(skipped):
            continue
        if not isinstance(tensor, StoredTensor):
            raise CheckpointError(
                f"{path}: {one_line(key)} is {one_line(describe(tensor))} without plain values; "
                "expected a tensor"
            )
        if len(tensor.shape) not in (1, 2) or name in tensors:
            raise CheckpointError(
                f"{path}: {one_line(key)} is {list(tensor.shape)}; expected each matrix and vector "
                "once: check that the file is of this model"
            )
        tensors[name] = check_type(tensor.named(one_line(name)))
    return tensors


def describe(value: object) -> str:
    """Describe a value of a file in a message."""
    if isinstance(value, StoredTensor):
        return f"a tensor {list(value.shape)}"
    if isinstance(value, Made):
        return f"a {value.name}"
    return f"a {type(value).__name__}"


def guarded(path: Path, read: Callable[[], T]) -> T:
    """Run a reader; any error of a damaged or hostile file becomes a CheckpointError of one line."""
    try:
        return read()
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: missing; copy the whole checkpoint folder") from error
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot read ({error.strerror or error}); check the disk, or copy it again"
        ) from error
    except (ValueError, TypeError) as error:
        raise CheckpointError(
            f"{path}: not readable as plain tensors ({reason_of(error)}); the file is truncated, "
            "damaged or carries code: copy it again from where it was trained, or save the model as "
            "safetensors there"
        ) from error


def read_archive(file: SourceFile, start: int, nbytes: int) -> Any:
    """Read what one torch.save wrote. Raises ValueError."""
    members = read_members(file, start, nbytes)
    roots = {name.split("/", 1)[0] for name in members}
    root = min(roots, default="")
    if len(roots) != 1 or f"{root}/data.pkl" not in members:
        raise ValueError("a zip archive without data.pkl, so not one of torch.save")
    order = members.get(f"{root}/byteorder")
    if order is not None and read_member(file, order, 16) != b"little":
        raise ValueError("its values are not little-endian; save it again on another machine")
    data = read_member(file, members[f"{root}/data.pkl"], MAX_PICKLE_NBYTES)
    tensors = _Tensors(file, {n.removeprefix(f"{root}/data/"): m for n, m in members.items()})
    return read_pickle(data, _TENSOR_NAMES, tensors.makers(), tensors.storage)


class _Storage(NamedTuple):
    """Storage of torch: values of one type, end to end."""

    member: Member
    dtype: str
    checksum: Checksum | None


class _Tensors:
    """Maker of the tensors of one archive. Its methods get arguments that may be anything."""

    def __init__(self, file: SourceFile, members: dict[str, Member]) -> None:
        self._file, self._members = file, members
        self._checksums: dict[str, Checksum] = {}

    def makers(self) -> dict[str, Callable[..., Any]]:
        """Return name in the pickle -> function that makes what a call of it would."""
        return {
            "collections.OrderedDict": dict,
            "torch._utils._rebuild_tensor_v2": self._plain,
            "torch._utils._rebuild_tensor_v3": self._untyped,
            "torch._utils._rebuild_parameter": lambda tensor, *_: tensor,
            "torch._utils._rebuild_parameter_with_state": lambda tensor, *_: tensor,
            "torch._tensor._rebuild_from_type_v2": self._of_type,
        }

    def storage(self, described: Any) -> _Storage:
        """Find the values that a persistent id of the pickle describes."""
        kind, name, key, _, count = described
        if kind != "storage" or not isinstance(name, Name) or not isinstance(key, str):
            raise ValueError("a tensor without values")
        member = self._members.get(key)
        if member is None:
            raise ValueError(f"the values {key[:80]!r} are missing")
        typed = name.text.removeprefix("torch.").removesuffix("Storage")
        dtype = "U8" if name.text == UNTYPED else STORAGES.get(typed, "")
        if dtype not in VALUE_NBYTES or type(count) is not int:
            raise ValueError(f"values of the kind {name.text}")
        if count * VALUE_NBYTES[dtype] != member.nbytes:
            raise ValueError(f"{member.nbytes} bytes for {count} values of {dtype}")
        if key not in self._checksums and member.crc32:
            self._checksums[key] = Checksum(self._file, *member)
        return _Storage(member, dtype, self._checksums.get(key))

    def _plain(
        self, storage: Any, offset: Any, size: Any, stride: Any, *_: Any, dtype: str | None = None
    ) -> StoredTensor:
        if not isinstance(storage, _Storage) or not isinstance(size, tuple | list):
            raise TypeError("a tensor without values")
        kind = dtype or storage.dtype
        count = storage.member.nbytes // VALUE_NBYTES[kind]
        name = f"at byte {storage.member.at}"
        shape, strides = check_shape(name, size), check_shape(name, stride)
        if len(shape) != len(strides) or type(offset) is not int or offset < 0:
            raise ValueError(f"tensor {name} is {list(shape)} with strides {list(strides)}")
        if offset + extent(shape, strides) > count or math.prod(shape) > count:
            raise ValueError(f"tensor {name} is {list(shape)}, but has {count} values")
        at = storage.member.at + offset * VALUE_NBYTES[kind]
        return StoredTensor(self._file, name, kind, shape, at, strides, storage.checksum)

    def _untyped(
        self, storage: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, dtype: Any,
        *_: Any,
    ) -> StoredTensor:  # fmt: skip
        text = dtype.text.removeprefix("torch.") if isinstance(dtype, Name) else ""
        if text not in DTYPES:
            raise ValueError(f"values of the kind {text or describe(dtype)}")
        return self._plain(storage, offset, size, stride, dtype=DTYPES[text])

    def _of_type(self, maker: Any, kind: Any, arguments: Any, *_: Any) -> Any:
        """Make a tensor that has attributes or is of a subclass."""
        known = self.makers().get(maker.text if isinstance(maker, Name) else "")
        if known is None or known == self._of_type or not isinstance(arguments, tuple):
            raise ValueError("a tensor of an unknown kind")
        return known(*arguments)
