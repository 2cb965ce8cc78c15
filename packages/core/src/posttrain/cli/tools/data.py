"""The command ``posttrain data``, which finds rows that are trained on twice, and evaluation rows that are trained on.

Rows are compared by n-grams of words in lower case, without punctuation, as in Brown et al. 2020
(https://arxiv.org/abs/2005.14165), appendix C.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.cli import parse
from posttrain.cli.method import FILES
from posttrain.cli.mixture import CommandSource
from posttrain.cli.source import read
from posttrain.core.config import ConfigMeta, opt
from posttrain.core.errors import DataError
from posttrain.core.files import write_text

HELP = """usage: posttrain data ROWS ... | run.yaml [--against ROWS ...] [--ngram N] [--output FILE] [--name value ...]

Finds rows that are trained on twice, and evaluation rows that are trained on: those of the run, and those of --against.
ROWS are files, a folder, or a dataset of the Hub; the arguments of a run that choose its rows are taken too.

  --against ROWS  evaluation rows, a word for each set, which may be NAME:CONFIG; their split "test" if they have one
  --ngram N       so many words in a row are an overlap [default: the length that 95% of a set's rows have, 8 to 13]
  --output FILE   write the training rows, as JSON lines, without repeated ones and without overlaps

A row is repeated if an earlier one has the same texts, or 80% of its 5-grams. Messages of the system are left out. All
n-grams are held in memory, about 100 bytes for each: 2 GB for 100,000 rows of 200 words."""

NEAR, NEAR_WORDS = 0.8, 5
#: An evaluation row is trained on whole if this share of its n-grams is: Chowdhery et al. 2022
#: (https://arxiv.org/abs/2204.02311), section 8.
WHOLE = 0.7
#: The fewest and the most words of an n-gram that a set is given.
SHORTEST, LONGEST = 8, 13
#: An n-gram in more rows of a set is part of its template, and tells none of them.
TEMPLATE = 10
EXAMPLES = 3
#: Keys of rows and messages whose texts are not theirs.
OTHER_KEYS = {"role", "from", "type", "id", "tools", "system"}
_IDEOGRAM = "\u3040-\u30ff\u3400-\u9fff"  # written without spaces: each is a word
_WORD = re.compile(rf"[{_IDEOGRAM}]|[^\W{_IDEOGRAM}]+")


@dataclass
class Comparison(metaclass=ConfigMeta):
    """What training rows are compared with."""

    against: list[str] | None = opt(None, "Sets of evaluation rows: files, folders, names or name:config on the Hub.")
    ngram: int | None = opt(None, "Words of an n-gram. None: the length that 95% of a set's rows have.", min=1)
    output: str | None = opt(None, "File for the training rows that repeat none and share nothing with a set.")


def run(words: list[str]) -> None:
    """Print the report on the rows of a run, and write those that are left."""
    problems: list[str] = []
    (named, flags), settings = parse.read_flags(words), dict[str, parse.Setting]()
    for name in named:
        settings |= parse.read_file(name, problems) if name.endswith(FILES) else {}
    for name in parse.unknown([CommandSource], settings):  # a run has other arguments too
        del settings[name]
    rows: Any = [name for name in named if not name.endswith(FILES)]
    settings |= ({"dataset_name": parse.Setting("the rows", rows)} if rows else {}) | flags
    needs = ["dataset_name|dataset_mixture|datasets"]
    source, asked = parse.configs([CommandSource, Comparison], settings, problems, needs)
    train, held_out = source.load()
    sets = held_out if isinstance(held_out, dict) else {} if held_out is None else {"the evaluation rows": held_out}
    sets = sets | {name: _evaluation_rows(name) for name in asked.against or ()}
    report, kept = compare(train if isinstance(train, dict) else {"train": train}, sets, asked.ngram)
    print(report)
    if asked.output is not None:
        path = Path(asked.output).expanduser()
        try:
            text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept)
        except TypeError as error:
            raise DataError(f"the rows cannot be written to {path} as JSON: {error}. Leave out --output.") from error
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
        print(f"{len(kept):,} rows are in {path}.")


def _evaluation_rows(name: str) -> Any:
    path, _, config = (name, "", "") if Path(name).expanduser().exists() else name.partition(":")
    found = read(path, config or None, streaming=False)
    if not isinstance(found, dict):
        return found
    return found["test"] if "test" in found else [row for rows in found.values() for row in rows]


def texts_of(row: Any) -> Iterator[str]:
    """The texts of a row in their order: of its columns, and of messages but the system's."""
    if isinstance(row, str):
        yield row
    elif isinstance(row, Mapping) and not any(row.get(key) in ("system", "developer") for key in ("role", "from")):
        yield from texts_of([value for key, value in row.items() if key not in OTHER_KEYS])
    elif isinstance(row, Sequence) and not isinstance(row, bytes):
        for value in row:
            yield from texts_of(value)


def words_of(row: Any) -> list[str]:
    """The words of the texts of a row in lower case, without punctuation and accents; an ideogram is a word too."""
    return [word for text in texts_of(row) for word in _WORD.findall(_plain(text.lower()))]


def _plain(text: str) -> str:
    """`text` however it is encoded, without signs that have no place of their own, which would be no part of a word."""
    if text.isascii():
        return text
    apart = unicodedata.normalize("NFKD", text)
    kept = (sign for sign in apart if unicodedata.category(sign) not in ("Mn", "Mc", "Me", "Cf"))
    return unicodedata.normalize("NFKC", "".join(kept))


def ngrams(words: Sequence[str], size: int) -> dict[int, int]:
    """{hash of `size` words in a row: where they begin}."""
    return {hash(tuple(words[place : place + size])): place for place in range(len(words) - size + 1)}


class Repeats:
    """Finds rows that repeat an earlier one: that have its texts, or most of its n-grams."""

    def __init__(self) -> None:
        self.exact, self.near, self.examples = 0, 0, list[str]()
        self._texts: dict[int, str] = {}
        self._owners: dict[int, str] = {}  # the first that has an n-gram, of the rows that repeat none

    def add(self, name: str, row: Any, words: Sequence[str]) -> bool:
        """Whether the row `name` repeats one that was added before."""
        found = ngrams(words, NEAR_WORDS)
        same = self._texts.setdefault(hash(tuple(" ".join(text.split()) for text in texts_of(row))), name)
        nearest = Counter(owner for owner in map(self._owners.get, found) if owner).most_common(1)
        if same != name:
            self.exact += 1
        elif nearest and nearest[0][1] >= NEAR * len(found):
            self.near, same = self.near + 1, nearest[0][0]
        else:
            for each in found:
                self._owners.setdefault(each, name)
            return False
        self.examples += [f"    {name} repeats {same}"] if len(self.examples) < EXAMPLES else []
        return True


class Overlaps:
    """Finds what training rows share with an evaluation set. Raises a `DataError` where there are no rows.

    Args:
        rows: of the set. size: words of an n-gram. None: the length that 95% of the rows have, 8 to 13.
    """

    def __init__(self, name: str, rows: Any, size: int | None = None) -> None:
        words = [words_of(row) for row in rows]
        if not words:
            raise DataError(f"{name} has no rows to compare with.")
        self.name, self.lengths, self.trained, self.examples = name, sorted(map(len, words)), 0, list[str]()
        self.size = size or min(max(self.lengths[len(words) // 20], SHORTEST), LONGEST)
        having: dict[int, list[int]] = defaultdict(list)
        for number, one in enumerate(words):
            for each in ngrams(one, self.size):
                having[each].append(number)
        self.rows = {each: numbers for each, numbers in having.items() if len(numbers) <= TEMPLATE}
        self.of_template = len(having) - len(self.rows)
        self.own = Counter(number for numbers in self.rows.values() for number in numbers)
        self.found: set[int] = set()

    def add(self, name: str, words: Sequence[str]) -> bool:
        """Whether the training row `name` shares an n-gram with the set."""
        places = ngrams(words, self.size)
        shared = [each for each in places if each in self.rows]
        self.found.update(shared)
        if shared and len(self.examples) < EXAMPLES:
            text = " ".join(words[places[shared[0]] :][: self.size])
            self.examples.append(f"    {name} and its row {self.rows[shared[0]][0]}: {text}")
        self.trained += bool(shared)
        return bool(shared)

    def lines(self) -> list[str]:
        """The report."""
        seen = Counter(number for each in self.found for number in self.rows[each])
        whole = sum(count >= WHOLE * self.own[number] for number, count in seen.items())
        share, short = len(seen) / len(self.lengths), sum(length < self.size for length in self.lengths)
        return [
            f"  against {self.name}: {len(seen):,} of {len(self.lengths):,} rows ({share:.1%}) share {self.size} words "
            f"in a row with {self.trained:,} training rows; {whole:,} of them {WHOLE:.0%} of their {self.size}-grams",
            *self.examples,
            *([f"    not compared: {short:,} rows of fewer words"] * (short > 0)),
            *([f"    left out: {self.of_template:,} n-grams of more than {TEMPLATE} rows"] * (self.of_template > 0)),
        ]


def compare(train: Mapping[str, Any], sets: Mapping[str, Any], size: int | None = None) -> tuple[str, list[Any]]:
    """The report on training rows, and those that repeat none and share nothing with a set. Raises a `DataError` where
    there are no training rows, or a set has none.

    Args:
        train: rows by the name of their dataset. sets: evaluation rows by name. size: as for `Overlaps`.
    """
    others, repeats = [Overlaps(name, rows, size) for name, rows in sets.items()], Repeats()
    kept, count, total = list[Any](), 0, 0
    for source, rows in train.items():
        for number, row in enumerate(rows):
            name, words = f"{source} row {number}", words_of(row)
            shares = [other.add(name, words) for other in others]
            kept += [] if repeats.add(name, row, words) or any(shares) else [row]
            count, total = count + 1, total + len(words)
    if not count:
        raise DataError("there are no training rows.")
    lines = [
        f"{count:,} training rows of {total:,} words",
        f"  repeated: {repeats.exact:,} rows have the texts of an earlier one, {repeats.near:,} have {NEAR:.0%} of its "
        f"{NEAR_WORDS}-grams",
        *repeats.examples,
    ]
    return "\n".join([*lines, *(line for other in others for line in other.lines())]), kept
