"""Order of weights in a graph that onnxruntime saved with packed matrices: these come first.

onnxruntime saves each matrix plain and packed, side by side. It compares them when it loads a
graph, and computes with the packed ones. Where memory is short, pages of these are dropped and read
again, and the system then reads their neighbours, too. Without plain matrices among them it reads
only what the next products need.

In the graph, places are decimal numbers in the external_data of tensors (onnx.proto): "offset", and
"prepacked_0" with key|offset;length;checksum.
"""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, NamedTuple

from stem_edge.graph.encoder import FIXED32, LENGTH, VARINT, with_length

FIXED64 = 1  # wire type of protobuf, beside those of the encoder
GRAPH, INITIALIZER, NAME, EXTERNAL_DATA, KEY, VALUE = 7, 5, 8, 13, 1, 2  # fields of onnx.proto
OFFSET, NBYTES, PACKED = b"offset", b"length", b"prepacked_"
PIECE_NBYTES = 8 << 20


class _Place(NamedTuple):
    """Bytes in the file of weights."""

    offset: int
    nbytes: int
    plain: bool  # of a matrix that is there packed, too


def put_packed_first(graph: Path) -> None:
    """Order the weights of a saved graph. Raises ValueError for another graph, OSError."""
    data = graph.read_bytes()
    places = [place for tensor in _tensors(data) for place in _places(tensor)]
    with graph.with_name(f"{graph.name}.data").open("r+b", buffering=0) as file:
        moved = _order(file, sorted(set(places)), graph.parent)
    graph.write_bytes(_changed(data, (GRAPH, INITIALIZER), lambda tensor: _moved(tensor, moved)))


def share_weights(graph: Path, other: Path) -> None:
    """Let a saved graph use the weights of another one beside it, by their names, not its own.

    Raises ValueError for other graphs, OSError.
    """
    there = {_name(tensor): tensor for tensor in _tensors(other.read_bytes())}

    def moved(tensor: bytes) -> bytes:
        if not any(_values(tensor, EXTERNAL_DATA)):
            return tensor
        if _name(tensor) not in there:
            raise ValueError(f"{other} has no {_name(tensor)!r}")
        return there[_name(tensor)]

    graph.write_bytes(_changed(graph.read_bytes(), (GRAPH, INITIALIZER), moved))
    graph.with_name(f"{graph.name}.data").unlink()


def _order(file: IO[bytes], places: list[_Place], folder: Path) -> dict[int, int]:
    """Move the bytes of all places; return old offset -> new. folder: for a copy of plain ones."""
    moved: dict[int, int] = {}
    end = 0
    with tempfile.TemporaryFile(dir=folder) as aside:
        for place in (each for each in places if each.plain):
            _copy(file, place.offset, aside, aside.tell(), place.nbytes)
        for place in (each for each in places if not each.plain):
            # Files are mapped from multiples of this on, so places keep their distance from them.
            start = end + (place.offset - end) % mmap.ALLOCATIONGRANULARITY
            _copy(file, place.offset, file, start, place.nbytes)
            moved[place.offset], end = start, start + place.nbytes
        source = 0
        for place in (each for each in places if each.plain):
            start = end + (place.offset - end) % mmap.ALLOCATIONGRANULARITY
            _copy(aside, source, file, start, place.nbytes)
            moved[place.offset], end = start, start + place.nbytes
            source += place.nbytes
    file.truncate(end)
    return moved


def _copy(source: IO[bytes], start: int, target: IO[bytes], to: int, nbytes: int) -> None:
    """Copy bytes from one place to another, which may overlap if it lies before it."""
    for at in range(0, nbytes, PIECE_NBYTES):
        source.seek(start + at)
        piece = source.read(min(PIECE_NBYTES, nbytes - at))
        target.seek(to + at)
        target.write(piece)


def _tensors(graph: bytes) -> Iterator[bytes]:
    for message in _values(graph, GRAPH):
        yield from _values(message, INITIALIZER)


def _name(tensor: bytes) -> bytes:
    (name,) = _values(tensor, NAME)
    return name


def _places(tensor: bytes) -> Iterator[_Place]:
    """Yield where a tensor lies, if it is in the file, and its packed forms."""
    entries = dict(map(_entry, _values(tensor, EXTERNAL_DATA)))
    packed = [
        blob for key, text in entries.items() if key.startswith(PACKED) for blob in _blobs(text)
    ]
    if entries:
        offset, nbytes = (int(entries.get(key, b"")) for key in (OFFSET, NBYTES))
        yield _Place(offset, nbytes, bool(packed))
    yield from (_Place(int(offset), int(nbytes), plain=False) for offset, nbytes, _ in packed)


def _blobs(text: bytes) -> list[list[bytes]]:
    """Return offset, length and checksum of each packed form."""
    _, first, *others = text.split(b"|")
    return [blob.split(b";") for blob in (first, *others)]


def _moved(tensor: bytes, moved: Mapping[int, int]) -> bytes:
    """Return a tensor with its places changed."""

    def new(offset: bytes) -> bytes:
        return b"%d" % moved[int(offset)]

    def changed(entry: bytes) -> bytes:
        key, text = _entry(entry)
        if key == OFFSET:
            text = new(text)
        elif key.startswith(PACKED):
            blobs = (b";".join([new(offset), *rest]) for offset, *rest in _blobs(text))
            text = b"|".join([text.split(b"|")[0], *blobs])
        return with_length(KEY, key) + with_length(VALUE, text)

    return _changed(tensor, (EXTERNAL_DATA,), changed)


def _entry(entry: bytes) -> tuple[bytes, bytes]:
    """Return key and value of a StringStringEntryProto."""
    (key,), (value,) = _values(entry, KEY), _values(entry, VALUE)
    return key, value


def _values(message: bytes, number: int) -> Iterator[bytes]:
    """Yield the values of a field with lengths."""
    return (value for tag, _, value in _fields(message) if tag == number << 3 | LENGTH)


def _changed(message: bytes, path: tuple[int, ...], change: Callable[[bytes], bytes]) -> bytes:
    """Return a message in which all messages at a path of fields are changed."""
    if not path:
        return change(message)
    made = bytearray()
    for tag, whole, value in _fields(message):
        inside = tag == path[0] << 3 | LENGTH
        made += with_length(path[0], _changed(value, path[1:], change)) if inside else whole
    return bytes(made)


def _fields(message: bytes) -> Iterator[tuple[int, bytes, bytes]]:
    """Yield tag, all bytes and value of each field of a message."""
    at = 0
    while at < len(message):
        tag, start = _number(message, at)
        nbytes = {FIXED64: 8, FIXED32: 4}.get(tag & 7, 0)
        if tag & 7 in (VARINT, LENGTH):
            number, start = _number(message, start)
            nbytes = number if tag & 7 == LENGTH else 0
        yield tag, message[at : start + nbytes], message[start : start + nbytes]
        at = start + nbytes


def _number(message: bytes, at: int) -> tuple[int, int]:
    """Return the varint at a place, and the place after it."""
    value = shift = 0
    while True:
        value |= (message[at] & 0x7F) << shift
        if message[at] < 0x80:
            return value, at + 1
        at, shift = at + 1, shift + 7
