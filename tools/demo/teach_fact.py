"""Teach the demo model the capital of a country that it has never read about, by new table rows only.

    python tools/demo/teach_fact.py CHECKPOINT BUNDLE -o atlantis.edit
    stem-edge generate BUNDLE --edit atlantis.edit -p "The capital of Atlantis is"

CHECKPOINT was written by tools/demo/train_demo.py, and BUNDLE exported from it. The tokens of the name
that occur in the fewest sentences about other countries get new rows. Gradient steps on the float32
model fit these rows to sentences that state the capital; all other weights stay. Two sentence forms are
held out. Prints the bundle's answers before and after, and how many about other countries change.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from demo_checkpoint import trained_name
from demo_facts import NAMING, Country, countries
from demo_model import DemoConfig, DemoModel
from demo_text import listed, sentence
from edit_cases import Question, Unedited, about_others, answers, ask, name_tokens
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional

import stem_edge
from stem_edge import Edit, Model, StemEdgeError, make_row_edit
from stem_edge.errors import CheckpointError
from stem_edge.export.checkpoints.readers import read_checkpoint
from stem_edge.numerics.quantize import F32

CONTEXT = 64  # tokens, for a question and an answer
HELD_OUT = 2  # sentence forms
MAX_KEPT = 64  # sentences about other countries, to be answered as before
LEARNING_RATE, STEPS = 0.03, 200
IGNORED = -100  # target ids that functional.cross_entropy ignores


class Sentence(NamedTuple):
    """Token ids; the answer begins at position `answer`."""

    token_ids: list[int]
    answer: int


class Fitted(NamedTuple):
    """Rows of the tokens, float32 [tokens, STEM layers, d_ff], and the loss before each step."""

    tokens: list[int]
    rows: F32
    losses: list[float]


def read_model(path: Path) -> DemoModel:
    """Read the float32 model of a checkpoint by train_demo.py. Raises CheckpointError."""
    checkpoint = read_checkpoint(path)
    config = checkpoint.config
    same = ("vocab_size", "dim", "n_layers", "n_heads", "n_kv_heads", "stem_layers", "rope_theta")
    sizes = {name: getattr(config, name) for name in (*same, "norm_eps")}
    sizes |= {"multiple_of": config.d_ff, "max_seqlen": config.max_context}
    model = DemoModel(DemoConfig(**sizes))
    matrices = {trained_name(name): matrix for name, matrix in checkpoint.backbone.items()}
    for number, layer in enumerate(config.stem_layers):
        matrices[f"stem_embeddings.{number}.weight"] = checkpoint.tables[layer]
    state = {name: torch.tensor(m.rows(0, m.shape[0])) for name, m in matrices.items()}
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise CheckpointError(
            f"{path}: not a checkpoint by tools/demo/train_demo.py ({error})"
        ) from error
    return model.requires_grad_(False).eval()


def fit_rows(
    model: DemoModel,
    tokens: list[int],
    taught: Sequence[Sentence],
    kept: Sequence[Sentence],
    like: Sequence[int] = (),
    steps: int = STEPS,
    learning_rate: float = LEARNING_RATE,
) -> Fitted:
    """Fit rows of `tokens` so that `taught` are answered, and `kept` continue as before.

    Starts from the mean row of the tokens `like`, or without any from the present rows.
    """
    tables = model.tables()
    started = [t[list(like)].mean(0).repeat(len(tokens), 1) if like else t[tokens] for t in tables]
    rows = torch.stack(started).requires_grad_()
    batch, answers_of = _padded(taught)
    others, _ = _padded(kept) if kept else (batch[:0], None)
    before = model(others).log_softmax(-1)
    optimizer, losses = torch.optim.Adam([rows], lr=learning_rate), []
    for _ in range(steps):
        weights = {
            f"stem_embeddings.{number}.weight": table.index_put((torch.tensor(tokens),), row)
            for number, (table, row) in enumerate(zip(tables, rows, strict=True))
        }
        logits = functional_call(model, weights, (batch,))[:, :-1].flatten(0, 1)
        loss = functional.cross_entropy(logits, answers_of, ignore_index=IGNORED)
        if kept:
            now = functional_call(model, weights, (others,)).log_softmax(-1)
            loss = loss + (before.exp() * (before - now)).sum(-1)[others > 0].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return Fitted(tokens, rows.detach().transpose(0, 1).numpy(), losses)


def _padded(sentences: Sequence[Sentence]) -> tuple[Tensor, Tensor]:
    """Pad sentences with 0 to ids [sentences, tokens]; also return their next-token targets, flat.

    Only the tokens of answers are targets.
    """
    length = max(len(sentence.token_ids) for sentence in sentences)
    tokens = torch.zeros(len(sentences), length, dtype=torch.long)
    wanted = torch.full_like(tokens, IGNORED)
    for row, (ids, answer) in enumerate(sentences):
        tokens[row, : len(ids)] = torch.tensor(ids)
        wanted[row, answer : len(ids)] = torch.tensor(ids[answer:])
    return tokens, wanted[:, 1:].flatten()


def rarest_tokens(model: Model, country: Country) -> list[int]:
    """Find the token of the name that occurs in the fewest sentences about other countries.

    Two of them, if the name is tokenized differently at the beginning of a sentence and within it.
    The last token wins a tie.
    """
    counts: Counter[int] = Counter()
    for question in about_others(country.name):
        counts.update(set(model.tokenize(stated(question))))
    spelled = (before + country.name for before in ("", " "))
    names = [model.tokenize(name, add_special_tokens=False) for name in spelled]
    return sorted({min(reversed(ids), key=lambda token: counts[token]) for ids in names})


def stated(question: Question) -> str:
    """Return the sentence with its answer, naming all neighbours."""
    facts = question.country._asdict()
    facts["neighbours"] = listed(list(question.country.neighbours))
    return sentence(question.form.format_map(facts))


def teach(
    model: Model, exact: DemoModel, country: Country, forms: Sequence[str], steps: int = STEPS
) -> tuple[Edit, Fitted]:
    """Make the edit that teaches a country's capital in these forms; also return the fit.

    exact: the float32 model from which the bundle of `model` was exported.
    """
    tokens = rarest_tokens(model, country)
    asked = [Question(country, "capital", form) for form in forms]
    taught = [Sentence(model.tokenize(stated(q)), len(model.tokenize(q.prompt))) for q in asked]
    kept = [
        Sentence(ids, len(ids))
        for other in about_others(country.name)
        if set(tokens) & set(ids := model.tokenize(stated(other)))
    ]
    # Rows that no other sentence uses start as an average country, because that is near any answer.
    names = [name_tokens(model, other) for other in countries()]
    like = [] if kept else [ids[0] for ids in names if len(ids) == 1]
    fitted = fit_rows(exact, tokens, taught, kept[:: -(-len(kept) // MAX_KEPT) or 1], like, steps)
    rows = dict(zip(fitted.tokens, fitted.rows, strict=True))
    return make_row_edit(model.bundle, rows, layers=exact.config.stem_layers), fitted


def print_answers(unedited: Unedited, edit: Edit, country: Country, trained: Sequence[str]) -> None:
    """Print the answers to all forms before and after, and how many answers about others change."""
    print("| sentence | in training | before | after |\n|---|---|---|---|")
    right = 0
    for form in NAMING["capital"]:
        question = Question(country, "capital", form)
        before = unedited.answer(question)
        with unedited.model.edited(edit):
            after = ask(unedited.model, question.prompt)
        right += answers(after, question)
        known = "yes" if form in trained else "no"
        print(f"| {question.prompt} | {known} |{before} |{after} |")
    print(f"\nright: {right} of {len(NAMING['capital'])}")
    changed, asked = unedited.changed(edit, country.name)
    print(f"other countries: {changed:,} of {asked:,} answers changed")


def run(args: argparse.Namespace) -> None:
    """Teach, save the edit, and report. Raises StemEdgeError."""
    country = Country(args.name, args.capital, "", "", "", ())
    held = random.Random(args.seed).sample(NAMING["capital"], HELD_OUT)
    forms = [form for form in NAMING["capital"] if form not in held]
    exact = read_model(args.checkpoint)
    with stem_edge.load(args.bundle, context_length=CONTEXT) as model:
        edit, fitted = teach(model, exact, country, forms, args.steps)
        edit.save(args.out)
        shown = ", ".join(f"{token} ({model.detokenize([token])!r})" for token in fitted.tokens)
        print(f"new rows for token {shown}")
        print(f"loss {fitted.losses[0]:.3f} -> {fitted.losses[-1]:.3f}\n")
        print_answers(Unedited(model), edit, country, forms)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("checkpoint", type=Path, metavar="CHECKPOINT")
    add("bundle", type=Path, metavar="BUNDLE")
    add("-o", dest="out", type=Path, required=True, metavar="EDIT", help="file to write")
    add("--name", default="Atlantis", help="name of the country (default Atlantis)")
    add(
        "--capital",
        default="Port Victoria",
        help="words that the model has read (default Port Victoria)",
    )
    add("--steps", type=int, default=STEPS, help=f"(default {STEPS})")
    add("--seed", type=int, default=1, help="seed of the choice of held-out forms (default 1)")
    args = parser.parse_args()
    torch.set_num_threads(1)  # so that a seed gives the same rows on every machine
    try:
        run(args)
    except StemEdgeError as error:
        sys.exit(f"teach_fact: {error}")


if __name__ == "__main__":
    main()
