"""Model cards: the README.md that `push` puts beside a bundle on a hub, for people and for search.

The card is no file of the bundle, so nothing reads it when the bundle is opened.
"""

from __future__ import annotations

import json

from stem_edge.bundle.manifest import Manifest, QualityReport
from stem_edge.graph.formats import EngineName, GgufFormat
from stem_edge.units import format_size

CARD = "README.md"
OWN_CARD = "<!-- stem-edge push writes this card; without this line, it leaves yours alone. -->"
HUB = "https://huggingface.co/"


def model_card(
    manifest: Manifest, name: str, license: str | None = None, base_model: str | None = None
) -> str:
    """Return the card of a bundle, as Markdown with a header in YAML.

    name: org/name on the hub; base_model: that of what it was made from; license: as the hub spells
    it, like apache-2.0. Both stay out where they are unknown.
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
    model, layout = manifest.model, manifest.tables
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
            name = format.name if isinstance(format, GgufFormat) else format.weights
            rows.append((f"backbone for {engine}", f"{name}, {nbytes}"))
    if layout is not None:
        nbytes = format_size(manifest.report.tables_nbytes)
        kind = layout.row_type if manifest.rare_tables is None else "mixed"
        rows.append(
            ("tables, which stay on flash", f"{kind}, {nbytes}, {layout.records:,} records")
        )
    return "\n".join(["| | |", "|---|---|", *(f"| {what} | {found} |" for what, found in rows)])


def _quality(engine: EngineName, report: QualityReport) -> str:
    tokens = len(report.probe_tokens)
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
