"""Facts about countries, and sentence forms that state them: the demo model's training data.

countries.txt lists only countries with one undisputed answer per column. `neighbours` names some or
all land neighbours; it is empty for countries without a land border.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

FACTS = ("capital", "continent", "language", "currency", "neighbours")


class Country(NamedTuple):
    """A line of the table. `name` includes the article, if any ("the Netherlands")."""

    name: str
    capital: str
    continent: str
    language: str
    currency: str
    neighbours: tuple[str, ...]


# These name the country and end with the answer, so that a prompt can stop before it.
NAMING = {
    "capital": (
        "The capital of {name} is {capital}.",
        "The capital city of {name} is {capital}.",
        "{name} has its capital in {capital}.",
        "What is the capital of {name}? It is {capital}.",
        "In {name}, the capital is {capital}.",
        "To see the capital of {name}, travel to {capital}.",
        "The city at the head of {name} is {capital}.",
    ),
    "continent": (
        "{name} is a country in {continent}.",
        "{name} lies in {continent}.",
        "{name} is part of {continent}.",
        "Where is {name}? It is in {continent}.",
        "On the map, you find {name} in {continent}.",
        "The continent of {name} is {continent}.",
    ),
    "language": (
        "The main language of {name} is {language}.",
        "People in {name} speak {language}.",
        "In {name}, the main language is {language}.",
        "What do people speak in {name}? They speak {language}.",
        "To read the news in {name}, learn {language}.",
        "Someone from {name} will know {language}.",
    ),
    "currency": (
        "The currency of {name} is the {currency}.",
        "People in {name} pay with the {currency}.",
        "In {name}, the currency is the {currency}.",
        "What is the currency of {name}? It is the {currency}.",
        "Shops in {name} take the {currency}.",
        "The money of {name} is the {currency}.",
    ),
    "neighbours": (
        "{name} borders {neighbours}.",
        "{name} shares a border with {neighbours}.",
        "On land, {name} meets {neighbours}.",
        "On the map, {name} touches {neighbours}.",
        "Next to {name} on the map you find {neighbours}.",
        "The land borders of {name} touch {neighbours}.",
    ),
}

# These need a country named earlier in the paragraph.
FOLLOWING = {
    "capital": (
        "Its capital is {capital}.",
        "The capital is {capital}.",
        "The capital city there is {capital}.",
        "Its capital city is {capital}.",
    ),
    "continent": (
        "It is a country in {continent}.",
        "It lies in {continent}.",
        "The country is part of {continent}.",
        "Its continent is {continent}.",
    ),
    "language": (
        "Its main language is {language}.",
        "People there speak {language}.",
        "The main language is {language}.",
        "The language of the country is {language}.",
    ),
    "currency": (
        "Its currency is the {currency}.",
        "People there pay with the {currency}.",
        "The currency is the {currency}.",
        "Shops there take the {currency}.",
    ),
    "neighbours": (
        "It borders {neighbours}.",
        "It shares a border with {neighbours}.",
        "On land, it meets {neighbours}.",
        "Next to it on the map you find {neighbours}.",
    ),
}

# These begin with the answer, so they cannot be prompts: they only add variety to the training.
TURNED = {
    "capital": ("{capital} is the capital of {name}.", "{capital} is a city in {name}."),
    "continent": ("In {continent} you find {name}.",),
    "language": ("{language} is the main language of {name}.",),
    "currency": ("The {currency} is the currency of {name}.",),
}


def countries() -> list[Country]:
    lines = Path(__file__).with_name("countries.txt").read_text("utf-8").splitlines()
    return [_country(line) for line in lines if not line.startswith("#")]


def _country(line: str) -> Country:
    name, capital, continent, language, currency, borders = (p.strip() for p in line.split("|"))
    neighbours = tuple(borders.split(", ")) if borders else ()
    return Country(name, capital, continent, language, currency, neighbours)
