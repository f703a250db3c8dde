"""Write the keys of config.json that the installed transformers knows, for each model_type that is read here.

    python tools/hf_keys.py    # writes export/checkpoints/hugging_face/keys.json

A key is known if a configuration class has it as a field or takes it out of its arguments, or if code
that computes looks for it in any configuration. Its default is the value that counts without it.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import msgspec
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from stem_edge.export.checkpoints.hugging_face.keys import FILE, KnownKeys
from stem_edge.export.checkpoints.hugging_face.reader import KINDS

# What makes a configuration of the keys of a file.
MAKERS = ("__post_init__", "convert_rope_params_to_dict")
TAKEN = re.compile(r'kwargs\.(?:pop|get)\(\s*"(\w+)"(?:, ([^,()]+))?')
# Modules of transformers that compute for every model, beside the model's own.
SHARED = ("masking_utils.py", "cache_utils.py", "modeling_rope_utils.py")
LOOKED_FOR = re.compile(
    r'(?:get|has)attr\([^,()]*config(?:\.\w+\([^()]*\))?, "(\w+)"(?:, ([^,()]+))?'
)


def known_keys() -> KnownKeys:
    """Return what the installed transformers knows."""
    models = {kind: _known(kind) for kind in KINDS if kind in CONFIG_MAPPING}
    first, *others = models.values()
    every = {
        key: default
        for key, default in first.items()
        if all(key in other and other[key] == default for other in others)
    }
    own = {kind: {k: v for k, v in keys.items() if k not in every} for kind, keys in models.items()}
    generation = sorted(transformers.GenerationConfig._get_default_generation_params())
    return KnownKeys(transformers.__version__, generation, every, own)


def _known(kind: str) -> dict[str, Any]:
    """Return key -> default of a model_type."""
    config = CONFIG_MAPPING[kind]
    file = Path(inspect.getfile(config))
    folder = Path(inspect.getfile(transformers)).parent
    model = file.with_name(file.name.replace("configuration", "modeling"))
    found: dict[str, Any] = {}
    for code in (model, *(folder / name for name in SHARED)):
        found |= _keys_in(LOOKED_FOR, code.read_text("utf-8"))
    for maker in (vars(c)[name] for c in config.__mro__ for name in MAKERS if name in vars(c)):
        found |= _keys_in(TAKEN, inspect.getsource(maker))
    found |= dict.fromkeys(config.attribute_map)
    found |= {field.name: _plain(field.default) for field in dataclasses.fields(config)}
    return dict(sorted(found.items()))


def _keys_in(pattern: re.Pattern[str], code: str) -> dict[str, Any]:
    return {key: _literal(default) for key, default in pattern.findall(code)}


def _literal(code: str) -> Any:
    """Return the value of a literal; None for other code, because it depends on other keys."""
    try:
        return ast.literal_eval(code)
    except (ValueError, SyntaxError):
        return None


def _plain(default: object) -> object:
    return default if isinstance(default, bool | int | float | str) else None


def main(arguments: list[str] | None = None) -> None:
    style = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=style).parse_args(arguments)
    FILE.write_bytes(msgspec.json.format(msgspec.json.encode(known_keys()), indent=1) + b"\n")


if __name__ == "__main__":
    main()
