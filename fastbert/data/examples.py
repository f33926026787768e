"""Pretraining examples: sentence pairs, drawn once, and masks, drawn from (seed, epoch, example, position).

The two tasks are those of BERT (https://arxiv.org/abs/1810.04805, section 3.1), with the pair and masking
rules of section 15.9 of Dive into Deep Learning (https://d2l.ai). Sequences lie end to end in flat arrays,
int32 with offsets, so that a large corpus fits in memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .tokenizers import Tokenizer

PREDICTED = 0.15  # of the tokens of an example
REPLACED_BY_MASK, REPLACED_AT_RANDOM = 0.8, 0.1  # of the predicted ones; the rest stay as they are
SPECIALS = 3  # [CLS] a [SEP] b [SEP]
IGNORED = -100  # the label of a token that is not predicted
MAX_DRAWS = 200


@dataclasses.dataclass(frozen=True)
class Examples:
    """N unmasked sequences ``[CLS] a [SEP] b [SEP]``, T tokens in all.

    ``tokens``: int32 ``[T]``. ``offsets``: int64 ``[N + 1]``, example ``i`` owns ``offsets[i]`` to
    ``offsets[i + 1]``. ``first``: int32 ``[N]``, tokens of the first segment, ``[CLS]`` and ``[SEP]`` included.
    ``next_sentence_label``: int8 ``[N]``, 0 = ``b`` follows ``a``, 1 = ``b`` is random.
    """

    tokens: NDArray[np.int32]
    offsets: NDArray[np.int64]
    first: NDArray[np.int32]
    next_sentence_label: NDArray[np.int8]

    def __len__(self) -> int:
        return len(self.first)

    @property
    def mean_length(self) -> float:
        """Tokens per example, special tokens included."""
        return len(self.tokens) / max(1, len(self))


def make_examples(
    paragraphs: Sequence[Sequence[Sequence[int]]], tokenizer: Tokenizer, *, max_len: int, seed: int
) -> Examples:
    """Pair each sentence with the next one of its paragraph or, half of the time, with a random one.

    ``paragraphs``: token ids by paragraph and sentence, without special tokens; empty sentences are passed
    over. A random sentence is any sentence of any paragraph, both drawn uniformly, but never the next one nor
    one that reads the same. A pair above ``max_len`` tokens is left out, not truncated. The same arguments
    give the same examples. Raises ``ValueError`` if no pair is left.
    """
    sentences, sizes = _flatten(paragraphs)
    last = np.zeros(len(sentences.lengths), dtype=bool)
    last[np.cumsum(sizes) - 1] = True
    first = np.flatnonzero(~last)  # every sentence with a successor
    if not len(first):
        raise ValueError(f"none of {len(sizes)} paragraphs has two sentences to pair; longer ones are accepted")
    random = np.random.default_rng(seed)
    label = (random.random(len(first)) >= 0.5).astype(np.int8)
    second = first + 1
    second[label == 1] = _draw_others(second[label == 1], sentences, sizes, random)

    lengths = sentences.lengths[first] + sentences.lengths[second] + SPECIALS
    fits = lengths <= max_len
    if not fits.any():
        raise ValueError(
            f"max_len is {max_len}, but the shortest of {len(lengths)} sentence pairs has {lengths.min()} tokens; "
            "at least that many are accepted"
        )
    return _join(sentences, first[fits], second[fits], label[fits], tokenizer)


@dataclasses.dataclass(frozen=True)
class _Sentences:
    tokens: NDArray[np.int32]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]

    def __getitem__(self, i: int) -> NDArray[np.int32]:
        return self.tokens[self.starts[i] : self.starts[i] + self.lengths[i]]


def _flatten(paragraphs: Sequence[Sequence[Sequence[int]]]) -> tuple[_Sentences, NDArray[np.int64]]:
    """The non-empty sentences end to end, and how many each paragraph has (paragraphs without any dropped)."""
    sizes = [sum(len(sentence) > 0 for sentence in paragraph) for paragraph in paragraphs]
    flat = [sentence for paragraph in paragraphs for sentence in paragraph if len(sentence)]
    lengths = np.array([len(sentence) for sentence in flat], dtype=np.int64)
    tokens = np.empty(lengths.sum(), dtype=np.int32)
    starts = np.cumsum(lengths) - lengths
    for start, sentence in zip(starts.tolist(), flat, strict=True):
        tokens[start : start + len(sentence)] = sentence
    return _Sentences(tokens, starts, lengths), np.array([n for n in sizes if n], dtype=np.int64)


def _draw_others(
    true_next: NDArray[np.int64],
    sentences: _Sentences,
    sizes: NDArray[np.int64],
    random: np.random.Generator,
) -> NDArray[np.int64]:
    """For each sentence index, a random one that reads differently: draw all, then redraw those that do not."""
    drawn = np.empty_like(true_next)
    heads = np.cumsum(sizes) - sizes
    pending = np.arange(len(true_next))
    for _ in range(MAX_DRAWS):
        paragraph = random.integers(len(sizes), size=len(pending))
        drawn[pending] = heads[paragraph] + random.integers(sizes[paragraph])
        pending = pending[sentences.lengths[drawn[pending]] == sentences.lengths[true_next[pending]]]
        same = [np.array_equal(sentences[drawn[i]], sentences[true_next[i]]) for i in pending]
        pending = pending[np.array(same, dtype=bool)]
        if not len(pending):
            return drawn
    raise ValueError(
        f"corpus has no random second sentence to offer: {MAX_DRAWS} draws all read the same as the true next "
        "one; a corpus with different sentences is accepted"
    )


def _join(
    sentences: _Sentences,
    first: NDArray[np.int64],
    second: NDArray[np.int64],
    label: NDArray[np.int8],
    tokenizer: Tokenizer,
) -> Examples:
    a, b = sentences.lengths[first], sentences.lengths[second]
    offsets = np.concatenate([[0], np.cumsum(a + b + SPECIALS)])
    starts, ends = offsets[:-1], offsets[1:]
    tokens = np.full(offsets[-1], tokenizer.sep_id, dtype=np.int32)
    tokens[starts] = tokenizer.cls_id
    tokens[ranges(starts + 1, a)] = sentences.tokens[ranges(sentences.starts[first], a)]
    tokens[ranges(ends - 1 - b, b)] = sentences.tokens[ranges(sentences.starts[second], b)]
    return Examples(tokens, offsets, (a + 2).astype(np.int32), label)


def ranges(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """``arange(start, start + length)`` of every pair, end to end."""
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(lengths.sum())


def mask_tokens(
    input_ids: NDArray[np.int64],
    maskable: NDArray[np.bool_],
    lengths: NDArray[np.int64],
    indices: NDArray[np.int64],
    *,
    mask_id: int,
    replacements: NDArray[np.int64],
    seed: int,
    epoch: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Mask 15% of each row: 80% of those become ``mask_id``, 10% a random one of ``replacements``, 10% stay.

    ``input_ids`` ``[B, S]``; ``maskable`` ``[B, S]``, True where a token may be predicted; ``lengths`` ``[B]``,
    of which 15% are predicted, rounded, at least one; ``indices`` ``[B]``, the examples' numbers. Returns the
    masked ids and the labels, -100 where nothing is predicted, both int64 ``[B, S]``.

    What happens to a token depends on nothing but (seed, epoch, example, position): not on the batch that it
    is in, its padding, or the process that makes it. The bits are those of SplitMix64, one stream an example
    (https://doi.org/10.1145/2660193.2660195).
    """
    state = np.array([seed], dtype=np.uint64)
    for part in (epoch, indices):
        state = _mix(state + GOLDEN) + np.asarray(part, dtype=np.uint64)
    position = np.arange(1, input_ids.shape[1] + 1, dtype=np.uint64)
    bits = _mix(_mix(state + GOLDEN)[:, None] + position * GOLDEN)

    # the tokens with the smallest bits are predicted
    count = np.minimum(np.maximum(1, np.rint(lengths * PREDICTED).astype(np.int64)), maskable.sum(1))
    ranked = np.sort(np.where(maskable, bits, MAX_BITS), axis=1)
    threshold = np.take_along_axis(ranked, np.maximum(count - 1, 0)[:, None], axis=1)
    predicted = maskable & (bits <= threshold) & (count > 0)[:, None]

    labels = np.where(predicted, input_ids, IGNORED)
    more = _mix(bits[predicted] + GOLDEN)
    choice = (more >> np.uint64(32)) / 2**32
    random = replacements[((more & np.uint64(0xFFFFFFFF)) * np.uint64(len(replacements))) >> np.uint64(32)]
    replaced = np.where(choice < REPLACED_BY_MASK + REPLACED_AT_RANDOM, random, input_ids[predicted])
    masked = input_ids.copy()
    masked[predicted] = np.where(choice < REPLACED_BY_MASK, mask_id, replaced)
    return masked, labels


GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MAX_BITS = np.uint64(0xFFFFFFFFFFFFFFFF)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
