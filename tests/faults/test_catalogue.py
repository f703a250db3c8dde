"""The catalogue of faults: each line has a test, or a reason why it does not apply.

Lines are numbered in groups; the tests of group M are those of tests/faults/ named test_m1_...,
test_m2_m3_... and say in their docstring or name what the fault is. ELSEWHERE names tests in other
folders. A line that does not apply is in the NOT_APPLICABLE of a test file of its group: ids -> reason.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

HERE = Path(__file__).parent
GROUPS = {
    "C": ("import of checkpoints", 16),
    "M": ("bundle and manifest", 18),
    "Z": ("table stores", 18),
    "B": ("backbone files", 17),
    "T": ("tokenizers and chat templates", 16),
    "P": ("prompts and sampling options", 15),
    "D": ("disks", 10),
    "R": ("memory", 11),
    "K": ("threads and processes", 11),
    "X": ("power loss and kills", 8),
}
ELSEWHERE = {
    "M16": "stem_edge/bundle/hub/test_fetch.py::test_wrong_bytes_are_refused_until_they_are_deleted",
    "M17": "stem_edge/bundle/hub/test_fetch.py::test_a_connection_that_is_cut_goes_on_where_it_was",
    "P6": "stem_edge/apps/serving/openai/test_contract.py::test_refused_chats_name_the_field",
    "P14": "faults/backbones/test_backbones.py::test_b17_weights_that_are_not_finite",
    "Z11": "faults/backbones/test_backbones.py::test_b17_a_row_that_is_not_finite_fails_only_its_readers",
    "P13": "runtime/grammars/test_constraint.py::test_what_cannot_be_compiled_is_refused",
}
LINES = [
    f"{group}{number}" for group, (_, count) in GROUPS.items() for number in range(1, count + 1)
]


@cache
def _sources() -> list[str]:
    return [path.read_text("utf-8") for path in sorted(HERE.rglob("test_*.py"))]


@cache
def ids_with_a_test() -> set[str]:
    """Find the ids with which names of tests begin."""
    names = re.findall(r"^def test_((?:[a-z]\d+_)+)", "\n".join(_sources()), re.MULTILINE)
    return {id.upper() for name in names for id in name.rstrip("_").split("_")} | ELSEWHERE.keys()


@cache
def not_applicable() -> dict[str, str]:
    """Find the ids that are not tested, with the reason."""
    reasons: dict[str, str] = {}
    for text in _sources():
        for table in re.findall(
            r"^NOT_APPLICABLE: [^\n]* = (\{.*?\})$", text, re.MULTILINE | re.DOTALL
        ):
            for lines, reason in ast.literal_eval(table).items():
                reasons |= dict.fromkeys(lines.split(), reason)
    return reasons


@pytest.mark.parametrize("line", LINES)
def test_every_line_has_a_test_or_a_reason(line: str) -> None:
    reason = not_applicable().get(line)
    assert (line in ids_with_a_test()) != (reason is not None)
    assert reason is None or len(reason.split()) >= 5


@pytest.mark.parametrize("test", ELSEWHERE.values())
def test_tests_elsewhere_exist(test: str) -> None:
    file, _, name = test.partition("::")
    assert f"def {name}(" in (HERE.parent / file).read_text("utf-8")


def test_there_are_no_other_lines() -> None:
    assert ids_with_a_test() | not_applicable().keys() <= set(LINES)
