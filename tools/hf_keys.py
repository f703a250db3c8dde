"""Write keys.json: keys of config.json that the installed transformers knows, by model_type.

    python tools/hf_keys.py    # writes export/checkpoints/hugging_face/keys.json

A key is known if it is a field of a configuration class, if the class takes it out of its arguments, or
if modeling code looks it up in the configuration. Its default is the value in effect without the key.
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

# Methods that take keys of a file out of the arguments.
MAKERS = ("__post_init__", "convert_rope_params_to_dict")
TAKEN = re.compile(r'kwargs\.(?:pop|get)\(\s*"(\w+)"(?:, ([^,()]+))?')
# Modeling code that all models share, in addition to the model's own module.
SHARED = ("masking_utils.py", "cache_utils.py", "modeling_rope_utils.py")
LOOKED_FOR = re.compile(
    r'(?:get|has)attr\([^,()]*config(?:\.\w+\([^()]*\))?, "(\w+)"(?:, ([^,()]+))?'
)


def known_keys() -> KnownKeys:
    """Return the known keys of config.json: those of all model types, and the rest by type."""
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
    """Return known key -> default for the model_type `kind`."""
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
