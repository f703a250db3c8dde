"""Codecs: how values of rows are encoded on flash, and which encodings row cache slots can hold.

Row cache slots and graphs read only the types in Form. Records of other types are converted to a wider type when
they are read, without rounding. To add a type, extend this file and export/job/table_plan.py; if its codes do not
divide a byte evenly, also extend pack_codes in numerics/quantizing.py.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from stem_edge.numerics.quantize import F32, U8

Form = Literal["fp32", "fp16", "int8", "int4"]
RowType = Literal[Form, "int2"]
F16: TypeAlias = npt.NDArray[np.float16]
Codes: TypeAlias = U8 | F16 | F32
FP16_MAX = float(np.finfo(np.float16).max)


class Codec(NamedTuple):
    """How row values are encoded. forms: types they convert to exactly. scaled: with scales."""

    bits: int  # bits of a value, not counting the scales
    forms: tuple[Form, ...]  # types to which it converts exactly, narrowest first
    scaled: bool  # True: values are whole numbers times the scale of their group


CODECS: dict[RowType, Codec] = {
    "fp32": Codec(32, ("fp32",), False),
    "fp16": Codec(16, ("fp16",), False),
    "int8": Codec(8, ("int8",), True),
    "int4": Codec(4, ("int4", "int8"), True),
    "int2": Codec(2, ("int4", "int8"), True),
}


def form_of(*types: RowType) -> Form:
    """Return the narrowest type to which all `types` convert exactly. Raises ValueError if none."""
    for form in CODECS[types[0]].forms:
        if all(form in CODECS[one].forms for one in types):
            return form
    raise ValueError(f"rows of {' and '.join(types)} do not widen to the same form")
