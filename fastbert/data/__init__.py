"""Pretraining data: from a text to batches with masked tokens and sentence pairs.

    data = prepare("builtin", tokenizer="wordpiece", max_len=128, seed=0)
    for step, batch in zip(range(1000), make_loader(data, 256)): ...

Preparing is the slow part, so its result is kept on disk, under a key made of everything it depends on.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import warnings
from pathlib import Path

import numpy as np
import safetensors.numpy
from tqdm import tqdm

from .batches import Batch as Batch
from .batches import PretrainingData as PretrainingData
from .batches import make_loader as make_loader
from .corpus import corpus_digest, read_corpus
from .examples import SPECIALS, Examples, make_examples
from .tokenizers import CLASSES, Tokenizer, WordPieceTokenizer, WordTokenizer, load_tokenizer

FORMAT = 1  # of a cache entry, and of the rules that make examples; a new number leaves old entries alone


def prepare(
    corpus: str | os.PathLike[str],
    *,
    tokenizer: str | os.PathLike[str] = "word",
    min_freq: int = 5,
    vocab_size: int = 30_522,
    max_len: int = 128,
    seed: int = 0,
    static_masking: bool = False,
) -> PretrainingData:
    """Tokenize ``corpus`` and pair its sentences, or take both from the cache.

    ``corpus``: a text file, a directory of ``*.txt`` or ``*.tokens``, or "builtin" (see ``data/corpus.py``).
    ``tokenizer``: "word" (words seen ``min_freq`` times), "wordpiece" (at most ``vocab_size`` pieces learned
    from the corpus), a ``vocab.txt`` of uncased word pieces, or a directory with a saved tokenizer.
    ``max_len``: the most tokens of an example. ``seed``: fixes pairs, masks and order. ``static_masking``: one
    mask an example, as Dive into Deep Learning has it, not one an example and epoch, as RoBERTa
    (https://arxiv.org/abs/1907.11692) has it.

    Entries are kept in ``$FASTBERT_CACHE``, else ``~/.cache/fastbert``; a damaged one is made anew, and one
    that cannot be written is warned of. Raises ``FileNotFoundError`` and ``ValueError`` as ``read_corpus``,
    the tokenizers and ``make_examples`` do.
    """
    if max_len < SPECIALS + 2:
        raise ValueError(
            f"max_len is {max_len}; {SPECIALS + 2} or more is accepted: {SPECIALS} special tokens and 2 others"
        )
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed is {seed}; 0 to 2**64 - 1 is accepted")
    if tokenizer in ("word", "wordpiece"):
        given, recipe = None, [tokenizer, min_freq if tokenizer == "word" else vocab_size]
    else:
        given = _read_tokenizer(Path(tokenizer))
        recipe = _state(given)
    key = json.dumps([FORMAT, corpus_digest(corpus), recipe, max_len, seed])
    entry = _cache_directory() / f"{hashlib.sha256(key.encode()).hexdigest()}.examples"

    found = _load(entry)
    if found is None:
        paragraphs = read_corpus(corpus)
        made = given or _train_tokenizer(tokenizer, paragraphs, min_freq, vocab_size)
        progress = tqdm(paragraphs, desc="tokenizing", unit=" paragraphs")
        tokens = [[np.array(ids, np.int32) for ids in made.encode_batch(p)] for p in progress]
        found = made, make_examples(tokens, made, max_len=max_len, seed=seed)
        _store(entry, *found)
    return PretrainingData(*found, max_len, seed, static_masking)


def _read_tokenizer(path: Path) -> Tokenizer:
    if path.is_dir():
        return load_tokenizer(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"tokenizer {path} does not exist; 'word', 'wordpiece', a vocab.txt or a saved tokenizer's directory "
            "is accepted"
        )
    return WordPieceTokenizer.from_file(path)


def _train_tokenizer(kind: str, paragraphs: list[list[str]], min_freq: int, vocab_size: int) -> Tokenizer:
    sentences = [sentence for paragraph in paragraphs for sentence in paragraph]
    if kind == "word":
        return WordTokenizer.train(sentences, min_freq=min_freq)
    return WordPieceTokenizer.train(sentences, vocab_size=vocab_size)


def _cache_directory() -> Path:
    return Path(os.environ.get("FASTBERT_CACHE") or os.path.expanduser("~/.cache/fastbert"))


def _state(tokenizer: Tokenizer) -> dict:
    return {**tokenizer.config(), "vocabulary": tokenizer.vocabulary}


def _store(entry: Path, tokenizer: Tokenizer, examples: Examples) -> None:
    """Write an entry: the SHA-256 of what follows, then the arrays as safetensors. Warns if it cannot."""
    state = np.frombuffer(json.dumps(_state(tokenizer)).encode(), dtype=np.uint8)
    payload = safetensors.numpy.save({"tokenizer": state, **vars(examples)})
    temporary = None
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=entry.parent, delete=False) as file:
            temporary = file.name
            file.write(hashlib.sha256(payload).digest())
            file.write(payload)
        os.replace(temporary, entry)
    except OSError as error:
        warnings.warn(
            f"cache directory {entry.parent} cannot be written ({error}): the prepared data is not kept; set "
            "FASTBERT_CACHE to a writable directory",
            stacklevel=3,
        )
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def _load(entry: Path) -> tuple[Tokenizer, Examples] | None:
    """What :func:`_store` wrote, or None if there is no entry or its digest does not match its content."""
    try:
        raw = memoryview(entry.read_bytes())
    except OSError:
        return None
    if hashlib.sha256(raw[32:]).digest() != raw[:32]:
        return None
    arrays = safetensors.numpy.load(bytes(raw[32:]))
    state = json.loads(arrays.pop("tokenizer").tobytes())
    kind = CLASSES[state["tokenizer_class"]]
    return kind(state["vocabulary"], lowercase=state["do_lower_case"]), Examples(**arrays)
