"""A corpus: paragraphs, each a list of sentences, read from text files or from Python's own documentation.

Three kinds of text are understood. ``*.tokens`` files are WikiText's: one paragraph a line, tokens set apart
by spaces, a sentence ends at " . ". Any other file is plain text: paragraphs end at a blank line, sentences
at ``.``, ``!`` or ``?``. ``builtin`` is the language reference that every CPython carries for ``help()``,
so that a run needs no download.
"""

# ruff: noqa: RUF001 (the quotation marks and stops of printed text are meant)
from __future__ import annotations

import hashlib
import io
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

ACCEPTED = "a text file, a directory of *.txt or *.tokens files, or 'builtin' is accepted"
Paragraphs = list[list[str]]


def read_corpus(corpus: str | os.PathLike[str]) -> Paragraphs:
    """The paragraphs of ``corpus``: a file, a directory (its ``*.txt`` and ``*.tokens``, sorted), or "builtin".

    Raises ``FileNotFoundError`` for a path that does not exist, ``ValueError`` for a text that is not UTF-8,
    is empty, or has no paragraph of two sentences to pair.
    """
    paragraphs = []
    for name, split, raw in _texts(corpus):
        paragraphs += split(_decode(name, raw))
    if not paragraphs:
        raise ValueError(f"corpus {corpus} is empty: it holds no paragraph of text; {ACCEPTED}")
    if all(len(paragraph) < 2 for paragraph in paragraphs):
        raise ValueError(
            f"corpus {corpus} is too short to pair: none of its {len(paragraphs)} paragraphs has two sentences"
        )
    return paragraphs


def corpus_digest(corpus: str | os.PathLike[str]) -> str:
    """SHA-256 of the texts of ``corpus`` and of how each is split: equal digests, equal paragraphs."""
    digest = hashlib.sha256()
    for _, split, raw in _texts(corpus):
        digest.update(f"{split.__name__} {len(raw)}\n".encode())
        digest.update(raw)
    return digest.hexdigest()


def _texts(corpus: str | os.PathLike[str]) -> Iterator[tuple[str, Callable[[str], Paragraphs], bytes]]:
    """(name, function that splits it into paragraphs, bytes) of every text of the corpus."""
    if corpus == "builtin":
        yield "builtin", split_documentation, _documentation().encode()
        return
    path = Path(corpus)
    if not path.exists():
        raise FileNotFoundError(f"corpus {path} does not exist; {ACCEPTED}")
    files = [path]
    if path.is_dir():
        files = sorted(f for f in path.iterdir() if f.suffix in (".txt", ".tokens") and f.is_file())
        if not files:
            raise ValueError(f"corpus {path} is a directory without *.txt or *.tokens files; {ACCEPTED}")
    for file in files:
        yield str(file), split_wikitext if file.suffix == ".tokens" else split_plain, file.read_bytes()


def _decode(name: str, raw: bytes) -> str:
    try:
        return raw.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"corpus file {name} is not UTF-8: byte 0x{raw[error.start]:02x} at offset {error.start}; "
            "UTF-8 text is accepted"
        ) from None


def split_wikitext(text: str) -> Paragraphs:
    """WikiText: lower-cased lines, split at " . "; a line without one (a heading, a blank) is dropped.

    The rule of section 15.9 of Dive into Deep Learning, https://d2l.ai. A closing " . " at the end of the
    raw line counts as one, so that paragraphs of a single sentence are kept: nothing can be paired in them,
    but their words count and they may be drawn as a random second sentence.
    """
    lines = io.StringIO(text, newline=None)  # the line ends of a file opened as text
    return [line.strip().lower().split(" . ") for line in lines if " . " in line]


def split_plain(text: str) -> Paragraphs:
    """Plain text: paragraphs end at blank lines, sentences as :func:`split_sentences` says."""
    paragraphs = [split_sentences(block) for block in re.split(r"\n\s*\n", text.replace("\r\n", "\n"))]
    return [paragraph for paragraph in paragraphs if paragraph]


ABBREVIATED = re.compile(
    r"""(?: (?!i) [^\W\d_]  # an initial
    | mr | mrs | ms | dr | prof | st | sr | jr | rev | hon | gen | col | lt | sgt | capt | gov | vol | figs? | eq
    | eds? | etc | vs | approx | inc | ltd | corp | bros | e\.g | i\.e | a\.m | p\.m | u\.s | u\.k | ph\.d ) \.""",
    re.VERBOSE | re.IGNORECASE,
)
OPENING = "\"'“‘(["
SENTENCE_END = re.compile(
    r"""(?<=[.!?…]) ["'”’)\]]* \s+ (?=["'“‘(\[]* [^\W_])   # a stop, closing marks, space, then a word
    | (?<=[。！？]) (?=\S)                                  # a full-width stop needs no space
    """,
    re.VERBOSE,
)


def split_sentences(paragraph: str) -> list[str]:
    """Sentences of a paragraph, white space collapsed.

    A sentence ends at ``.``, ``!``, ``?`` or ``…`` before white space, unless the next word starts with a
    lower-case letter, or a single full stop closes an abbreviation or an initial.
    """
    text = " ".join(paragraph.split())
    sentences, start = [], 0
    for end in SENTENCE_END.finditer(text):
        word = text[start : end.start()].rsplit(" ", 1)[-1].lstrip(OPENING)
        following = text[end.end() : end.end() + 8].lstrip(OPENING)[:1] if end.group() else ""
        if not ABBREVIATED.fullmatch(word) and not following.islower():
            sentences.append(text[start : end.end()].strip())
            start = end.end()
    sentences.append(text[start:].strip())
    return [sentence for sentence in sentences if sentence]


def _documentation() -> str:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise FileNotFoundError(
            "corpus 'builtin' needs the pydoc_data module, which this Python was installed without; "
            "a text file or a directory of text files is accepted"
        ) from None
    return "\n\n".join(topics[name] for name in sorted(topics))


UNDERLINE = re.compile(r"[*=\-~^\"'+#]{3,}")
CODE_OR_TABLE = re.compile(r">>>|::=|^\s*[|+]|^\s*\.\.\. |^\s*#", re.MULTILINE)
BULLET = re.compile(r"^(?:[*\-•]|\(?\d+[.)]|\[\d+\])\s+")
LITERAL = re.compile(r'"|`')
EMPHASIS = re.compile(r"(\*{1,2})(?=\S)(.+?)(?<=\S)\1")
PROSE = re.compile(r"[A-Z](?:\S*\s){3}.*[.!?:][)’]?")
PUNCTUATION = re.compile(r"(?<=\w)([’'](?=\w))|([^\w\s])")


def split_documentation(text: str) -> Paragraphs:
    """Python's reference texts: the prose of a section is one paragraph; markup, code and tables are dropped.

    A block counts as prose if it starts with a capital, ends as a sentence does and has four words.
    Punctuation is set apart by spaces, as WikiText has it, so that white space separates words.
    """
    sections = [[]]
    for block in re.split(r"\n\s*\n", text):
        lines = block.strip("\n").split("\n")
        if len(lines) > 1 and UNDERLINE.fullmatch(lines[1]):  # a heading starts a section
            sections.append([])
        elif not CODE_OR_TABLE.search(block):
            prose = LITERAL.sub("", BULLET.sub("", " ".join(block.split())))
            prose = EMPHASIS.sub(r"\2", prose)
            if PROSE.fullmatch(prose):
                sections[-1] += [_set_apart(sentence) for sentence in split_sentences(prose)]
    return [section for section in sections if section]


def _set_apart(sentence: str) -> str:
    spaced = PUNCTUATION.sub(lambda found: found[1] or f" {found[2]} ", sentence)
    return " ".join(spaced.split())
