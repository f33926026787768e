"""Text to token ids: whitespace words, or BERT's word pieces.

Both tokenizers give the ids of a text alone, without ``[CLS]`` or ``[SEP]``, and no text can yield a special
token, whatever it spells. A saved tokenizer is a ``vocab.txt``, one token a line, and a
``tokenizer_config.json`` with Hugging Face's keys, so that its ``BertTokenizer`` reads a saved word piece one.
"""

from __future__ import annotations

import abc
import collections
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import tokenizers


class Tokenizer(abc.ABC):
    """What both tokenizers share: a vocabulary, the position of a token being its id.

    ``RESERVED`` names the tokens for an unknown word, padding, mask, beginning and separator, in that order;
    ``special_ids`` are the ids of the last four, which stand for no word: never masked, never drawn.
    Raises ``ValueError`` for a vocabulary with a token twice, without one of the
    reserved tokens, or without any other.
    """

    RESERVED: tuple[str, str, str, str, str]

    def __init__(self, vocabulary: Sequence[str], *, lowercase: bool = True) -> None:
        self.vocabulary = list(vocabulary)
        self.lowercase = lowercase
        self._ids = {token: i for i, token in enumerate(self.vocabulary)}
        if len(self._ids) < len(self.vocabulary):
            twice = collections.Counter(self.vocabulary).most_common(1)[0][0]
            raise ValueError(f"vocabulary holds {twice!r} more than once; distinct tokens are accepted")
        missing = [token for token in self.RESERVED if token not in self._ids]
        if missing:
            raise ValueError(
                f"vocabulary of {len(self.vocabulary)} tokens lacks {', '.join(missing)}; "
                f"a {type(self).__name__} needs {', '.join(self.RESERVED)}"
            )
        if len(self.vocabulary) == len(self.RESERVED):
            raise ValueError("vocabulary holds the reserved tokens alone; one with words is accepted")
        self.unk_id, self.pad_id, self.mask_id, self.cls_id, self.sep_id = map(self._ids.get, self.RESERVED)

    @property
    def vocab_size(self) -> int:
        return len(self.vocabulary)

    @property
    def special_ids(self) -> tuple[int, int, int, int]:
        return self.pad_id, self.mask_id, self.cls_id, self.sep_id

    def encode(self, text: str) -> list[int]:
        """The token ids of ``text``."""
        return self.encode_batch([text])[0]

    @abc.abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The token ids of each of ``texts``."""

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write ``vocab.txt`` and ``tokenizer_config.json`` into ``directory``, made if absent."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "vocab.txt").write_bytes("".join(f"{token}\n" for token in self.vocabulary).encode())
        (directory / "tokenizer_config.json").write_text(json.dumps(self.config(), indent=2) + "\n")

    def config(self) -> dict[str, str | bool]:
        """All of the tokenizer but its vocabulary, under Hugging Face's keys."""
        name = next(name for name, kind in CLASSES.items() if isinstance(self, kind))
        return {"tokenizer_class": name, "do_lower_case": self.lowercase}


class WordTokenizer(Tokenizer):
    """Words set apart by white space, as in section 15.9 of Dive into Deep Learning, https://d2l.ai.

    Words are lower-cased, as its corpus is. ``encode("a crane is flying")`` gives four ids; a word out of the
    vocabulary is ``unk_id``.
    """

    RESERVED = ("<unk>", "<pad>", "<mask>", "<cls>", "<sep>")

    def __init__(self, vocabulary: Sequence[str], *, lowercase: bool = True) -> None:
        super().__init__(vocabulary, lowercase=lowercase)
        self._words = {t: i for t, i in self._ids.items() if t not in self.RESERVED}

    @classmethod
    def train(cls, sentences: Iterable[str], *, min_freq: int = 5) -> WordTokenizer:
        """The vocabulary of ``sentences``: reserved tokens, then words seen ``min_freq`` times or more.

        Descending frequency; words of the same frequency in the order of their first occurrence.
        """
        if min_freq < 1:
            raise ValueError(f"min_freq is {min_freq}; 1 or more is accepted")
        counts = collections.Counter()
        for sentence in sentences:
            counts.update(sentence.lower().split())
        words = [word for word, count in counts.most_common() if count >= min_freq and word not in cls.RESERVED]
        if not words:
            raise ValueError(f"min_freq is {min_freq}; no word of the corpus is as frequent")
        return cls([*cls.RESERVED, *words])

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        get, unk = self._words.get, self.unk_id
        return [[get(w, unk) for w in (t.lower() if self.lowercase else t).split()] for t in texts]


class WordPieceTokenizer(Tokenizer):
    """BERT's word pieces (https://arxiv.org/abs/1810.04805): its normaliser, greedy longest match first.

    ``lowercase`` also strips accents, as the uncased models expect.
    """

    RESERVED = ("[UNK]", "[PAD]", "[MASK]", "[CLS]", "[SEP]")

    def __init__(self, vocabulary: Sequence[str], *, lowercase: bool = True) -> None:
        super().__init__(vocabulary, lowercase=lowercase)
        model = tokenizers.models.WordPiece(self._ids, unk_token="[UNK]", max_input_chars_per_word=100)
        self._pieces = _bert_pipeline(model, lowercase)

    @classmethod
    def train(cls, sentences: Sequence[str], *, vocab_size: int = 30_522, lowercase: bool = True) -> WordPieceTokenizer:
        """Learn at most ``vocab_size`` pieces from ``sentences``; a small corpus gives fewer.

        The same sentences give the same vocabulary. The trainer alone would not see to that: it numbers the
        single-character continuations in the order of a hash map, and ties are broken by number. So they are
        handed to it in order, with the alphabet: the thousand most frequent characters.
        """
        pipeline = _bert_pipeline(tokenizers.models.WordPiece(unk_token="[UNK]"), lowercase)
        normalize, split = pipeline.normalizer.normalize_str, pipeline.pre_tokenizer.pre_tokenize_str
        counts = collections.Counter()
        for sentence in sentences:
            counts.update(normalize(sentence))
        frequent = sorted(counts, key=lambda c: (-counts[c], c))
        alphabet = sorted([c for c in frequent if not c.isspace()][:1000])
        inside_words = [c for c in alphabet if len(split(normalize(f"a{c}a"))) == 1]
        fixed = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]  # BERT's order: padding is id 0
        fixed += [f"##{c}" for c in inside_words]
        if vocab_size < len(fixed) + len(alphabet):
            raise ValueError(
                f"vocab_size is {vocab_size}; the corpus's alphabet alone needs {len(fixed) + len(alphabet)}"
            )
        trainer = tokenizers.trainers.WordPieceTrainer(
            vocab_size=vocab_size,
            min_frequency=2,
            special_tokens=fixed,
            initial_alphabet=alphabet,
            limit_alphabet=len(alphabet),
            show_progress=False,
        )
        pipeline.train_from_iterator(sentences, trainer)
        ids = pipeline.get_vocab(with_added_tokens=True)
        return cls(sorted(ids, key=ids.get), lowercase=lowercase)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], *, lowercase: bool = True) -> WordPieceTokenizer:
        """Read a ``vocab.txt``, one piece a line."""
        return cls(_read_vocabulary(Path(path)), lowercase=lowercase)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._pieces.encode_batch_fast(texts, add_special_tokens=False)]


def _bert_pipeline(model: tokenizers.models.WordPiece, lowercase: bool) -> tokenizers.Tokenizer:
    pipeline = tokenizers.Tokenizer(model)
    pipeline.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=lowercase)
    pipeline.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    return pipeline


CLASSES = {"WordTokenizer": WordTokenizer, "BertTokenizer": WordPieceTokenizer}


def load_tokenizer(directory: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer that :meth:`Tokenizer.save`, or Hugging Face's ``BertTokenizer``, wrote to ``directory``.

    A ``vocab.txt`` alone is read as uncased word pieces. Raises ``FileNotFoundError`` without a ``vocab.txt``,
    ``ValueError`` for a tokenizer of another class.
    """
    directory = Path(directory)
    file = directory / "tokenizer_config.json"
    config = json.loads(file.read_text("utf-8")) if file.exists() else {}
    name = config.get("tokenizer_class", "BertTokenizer").removesuffix("Fast")
    if name not in CLASSES:
        raise ValueError(f"{file} has tokenizer_class {name!r}; accepted are {', '.join(CLASSES)}")
    vocabulary = _read_vocabulary(directory / "vocab.txt")
    return CLASSES[name](vocabulary, lowercase=config.get("do_lower_case", True))


def _read_vocabulary(path: Path) -> list[str]:
    if not path.is_file():
        raise FileNotFoundError(f"vocabulary {path} does not exist; a vocab.txt with one token a line is accepted")
    # splitlines() would also split at separators that a token may hold
    lines = path.read_bytes().decode("utf-8").split("\n")
    return [line.rstrip("\r") for line in (lines[:-1] if lines[-1] == "" else lines)]
