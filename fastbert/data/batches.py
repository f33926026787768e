"""Batches: examples gathered, masked, and padded or packed a whole batch at a time, in an order that a seed fixes.

A loader's sampler yields batches of example numbers, and the data set turns such a batch into tensors at
once: nothing is done example by example. The sampler and the masks know no state but (seed, epoch), so worker
processes, or a run resumed at any step, see the same batches.

A batch has a number of examples, or as many as fit in a budget of tokens that are not padding, so that memory
and time of a step are even. Whether examples of like length then share a batch depends on who computes padding:
- Packed, nobody does. A token costs ``24 h^2`` operations a layer in products and ``4 h n`` in attention (hidden
  size h, sequence length n; at h = 768, n = 128: 14.2 and 0.4 million), so an epoch costs the same however it is
  cut into batches, and sorting would only put all long sequences, the dear ones, into the same steps. Examples
  stay in random order.
- Padded, every sequence costs as much as the longest of its batch. WikiText pairs of up to 128 tokens fill 54% of
  a batch of 4,096 tokens in random order, and 97% of one that was sorted by length within windows of 32 batches.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from ..ops.packing import Packing
from .examples import IGNORED, PREDICTED, Examples, mask_tokens, ranges
from .tokenizers import Tokenizer

WINDOW = 32  # batches whose examples are sorted by length together


@dataclasses.dataclass(frozen=True)
class Batch:
    """B examples padded to S tokens, or the same without the padding, T tokens; all int64.

    ``input_ids``, ``token_type_ids`` (0 = first segment and padding, 1 = second) and ``labels`` (-100 where
    nothing is predicted): ``[B, S]``, or packed ``[T]``. ``masked_positions``: ``[N]``, where labels are in them,
    flattened. ``attention_mask`` (1 = a token, 0 = padding): ``[B, S]``, None if packed. ``next_sentence_label``:
    ``[B]``, 0 = the second sentence follows the first, 1 = it is random. ``packing``: where the tokens are in
    ``[B, S]``, padded or packed.
    """

    input_ids: Tensor
    attention_mask: Tensor | None
    token_type_ids: Tensor
    labels: Tensor
    masked_positions: Tensor
    next_sentence_label: Tensor
    packing: Packing

    @property
    def valid_tokens(self) -> int:
        """Tokens that are not padding."""
        return self.packing.tokens

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Tokens, sequences and labels of a packed batch."""
        return self.packing.tokens, self.packing.batch, self.masked_positions.shape[0]

    def filled(self, tokens: int, sequences: int, labels: int) -> Batch:
        """A packed batch of just these :attr:`sizes`, with the same losses: for CUDA graphs, which know no other.

        Spare tokens lie in sequences of their own, behind the others; the rest of those are empty. Spare places of
        labels point at the first token, which never has one. Raises ``ValueError`` if the batch does not fit.
        """
        packing, found = self.packing, self.sizes
        lacking, more, places = tokens - found[0], sequences - found[1], labels - found[2]
        if min(lacking, more, places) < 0 or lacking > more * packing.seqlen:
            raise ValueError(
                f"a batch of {found} tokens, sequences and labels does not fit {(tokens, sequences, labels)}"
            )
        lengths = (lacking - packing.seqlen * torch.arange(more)).clamp(0, packing.seqlen)
        spare = Packing.from_lengths(lengths, packing.seqlen)
        return Batch(
            F.pad(self.input_ids, (0, lacking)),
            None,
            F.pad(self.token_type_ids, (0, lacking)),
            F.pad(self.labels, (0, lacking), value=IGNORED),
            F.pad(self.masked_positions, (0, places)),
            F.pad(self.next_sentence_label, (0, more), value=IGNORED),
            Packing(
                torch.cat([packing.indices, packing.batch * packing.seqlen + spare.indices]),
                torch.cat([packing.cu_seqlens, found[0] + spare.cu_seqlens[1:]]),
                packing.seqlen,
                sequences,
                packing.seqlen,
            ),
        )

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """The same batch on ``device``."""
        return self._each(lambda part: part.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """The same batch in page-locked memory."""
        return self._each(lambda part: part.pin_memory())

    def _each(self, change: Callable) -> Batch:
        return Batch(**{name: part if part is None else change(part) for name, part in vars(self).items()})


@dataclasses.dataclass(frozen=True)
class PretrainingData:
    """A tokenizer and the examples it gave, ready for :func:`make_loader`.

    ``static_masking``: draw each example's mask once, not afresh every epoch.
    """

    tokenizer: Tokenizer
    examples: Examples
    max_len: int
    seed: int
    static_masking: bool = False

    def __len__(self) -> int:
        return len(self.examples)

    @property
    def fill(self) -> float:
        """Share of tokens in a batch padded to ``max_len``."""
        return self.examples.mean_length / self.max_len

    def capacity(self, batch_tokens: int) -> tuple[int, int, int]:
        """:attr:`Batch.sizes` that hold nearly every batch of this many tokens at most."""
        sequences = round(2 * batch_tokens / self.examples.mean_length)
        return batch_tokens, sequences, round(PREDICTED * batch_tokens) + sequences


class _Batches(Dataset):
    """``batches[epoch, indices]`` is a :class:`Batch`."""

    def __init__(self, data: PretrainingData, pad_to_max_len: bool, packed: bool) -> None:
        self.examples, self.tokenizer = data.examples, data.tokenizer
        self.seed, self.static_masking = data.seed, data.static_masking
        self.seqlen, self.packed = data.max_len if pad_to_max_len else None, packed
        wordless = {*self.tokenizer.special_ids, self.tokenizer.unk_id}
        self.replacements = np.setdiff1d(np.arange(self.tokenizer.vocab_size), list(wordless))

    def __getitem__(self, key: tuple[int, NDArray[np.int64]]) -> Batch:
        epoch, indices = key
        examples, tokenizer = self.examples, self.tokenizer
        starts = examples.offsets[indices]
        lengths = examples.offsets[indices + 1] - starts
        first = examples.first[indices][:, None]
        position = np.arange(self.seqlen or lengths.max())
        valid = position < lengths[:, None]
        input_ids = np.full(valid.shape, tokenizer.pad_id, dtype=np.int64)
        input_ids[valid] = examples.tokens[ranges(starts, lengths)]
        # all but [CLS] at 0 and [SEP] at the end of both segments
        maskable = valid & (position > 0) & (position != first - 1) & (position != lengths[:, None] - 1)
        input_ids, labels = mask_tokens(
            input_ids,
            maskable,
            lengths,
            indices,
            mask_id=tokenizer.mask_id,
            replacements=self.replacements,
            seed=self.seed,
            epoch=0 if self.static_masking else epoch,
        )
        tokens = input_ids, (valid & (position >= first)).astype(np.int64), labels
        if self.packed:
            tokens = tuple(part[valid] for part in tokens)
        input_ids, token_type_ids, labels = map(torch.from_numpy, tokens)
        mask = torch.from_numpy(valid)
        return Batch(
            input_ids,
            None if self.packed else mask.long(),
            token_type_ids,
            labels,
            (labels.flatten() != IGNORED).nonzero().flatten(),
            torch.from_numpy(examples.next_sentence_label[indices].astype(np.int64)),
            Packing.from_mask(mask),
        )


class _Order(Sampler):
    """Yields (epoch, example numbers) batch by batch: each example once an epoch, in an order of its own.

    ``lengths``: int64 ``[N]``, tokens of each example. Of ``batch_size`` and ``batch_tokens`` one is None.
    ``by_length``: sort windows of a token budget's batches.
    """

    def __init__(
        self,
        lengths: NDArray[np.int64],
        batch_size: int | None,
        batch_tokens: int | None,
        by_length: bool,
        seed: int,
        first_step: int,
        epochs: int | None,
        drop_last: bool,
    ) -> None:
        self.lengths, self.batch_size, self.batch_tokens, self.by_length = lengths, batch_size, batch_tokens, by_length
        self.seed, self.epochs, self.drop_last = seed, epochs, drop_last
        self.first_epoch, self.skipped = 0, first_step
        while self.skipped >= (steps := self._steps(self.first_epoch)):
            self.first_epoch, self.skipped = self.first_epoch + 1, self.skipped - steps

    def __len__(self) -> int:
        if self.epochs is None:
            raise TypeError("a loader with epochs=None has no length: it goes on for ever")
        return sum(self._steps(self.first_epoch + n) for n in range(self.epochs)) - self.skipped

    def __iter__(self) -> Iterator[tuple[int, NDArray[np.int64]]]:
        numbers = itertools.count() if self.epochs is None else range(self.epochs)
        skipped = self.skipped
        for epoch in (self.first_epoch + n for n in numbers):
            for indices in self._batches(epoch)[skipped:]:
                yield epoch, indices
            skipped = 0

    def _steps(self, epoch: int) -> int:
        """Batches of an epoch. A token budget's number varies a little: the epoch is laid out again to count them."""
        if self.batch_size is None:
            return len(self._batches(epoch))
        return len(self.lengths) // self.batch_size if self.drop_last else -(-len(self.lengths) // self.batch_size)

    def _batches(self, epoch: int) -> list[NDArray[np.int64]]:
        """All of an epoch. About a second per million examples."""
        # [seed, 0] is the stream of seed alone, which the sentence pairs were drawn from
        random = np.random.default_rng([self.seed, epoch + 1])
        order = random.permutation(len(self.lengths))
        if self.batch_size is not None:
            batches = np.split(order, np.arange(self.batch_size, len(order), self.batch_size))
            return batches[: self._steps(epoch)]
        if self.by_length:
            order = self._sort_windows(order)
        ends, used, cuts = np.cumsum(self.lengths[order]), 0, []
        while used < ends[-1]:
            cuts.append(np.searchsorted(ends, used + self.batch_tokens, side="right"))
            used = ends[cuts[-1] - 1]
        *batches, last = np.split(order, cuts[:-1])
        if self.by_length:
            batches = [batches[i] for i in random.permutation(len(batches))]
        return batches if self.drop_last else [*batches, last]

    def _sort_windows(self, order: NDArray[np.int64]) -> NDArray[np.int64]:
        """Sort each window by length, rising and falling in turn: a batch across a border is of like lengths, too."""
        lengths = self.lengths[order]
        window = np.cumsum(lengths) // (WINDOW * self.batch_tokens)
        return order[np.lexsort((np.where(window % 2, -lengths, lengths), window))]


def make_loader(
    data: PretrainingData,
    batch_size: int | None = None,
    *,
    batch_tokens: int | None = None,
    packed: bool = False,
    first_step: int = 0,
    epochs: int | None = None,
    pad_to_max_len: bool = False,
    drop_last: bool = False,
    num_workers: int = 0,
    pin_memory: bool = False,
) -> DataLoader:
    """A loader of :class:`Batch`, over ``epochs`` epochs or, by default, without end.

    Batches have ``batch_size`` examples, or as many as fit in ``batch_tokens`` tokens without padding: then all
    but an epoch's last are fuller than ``batch_tokens`` less the longest example. ``packed``: leave padding out of
    the batches; if it stays, batches of ``batch_tokens`` are made of examples of like length.
    ``first_step``: batches taken by an earlier run; this one goes on with the next, so that the step number
    alone says where a training run is. ``pad_to_max_len`` pads to ``data.max_len`` instead of the longest
    example of the batch. ``drop_last``: leave out an epoch's last batch, the smaller one. Raises ``ValueError``
    for a number out of range, and for a budget that the longest example alone exceeds.
    """
    if (batch_size is None) == (batch_tokens is None):
        raise ValueError(f"batch_size is {batch_size} and batch_tokens is {batch_tokens}; one of them is accepted")
    for name, value, least in (("batch_size", batch_size, 1), ("first_step", first_step, 0)):
        if value is not None and value < least:
            raise ValueError(f"{name} is {value}; {least} or more is accepted")
    if epochs is not None and epochs < 1:
        raise ValueError(f"epochs is {epochs}; 1 or more, or None for no end, is accepted")
    if drop_last and batch_size is not None and batch_size > len(data):
        raise ValueError(f"batch_size is {batch_size}; with drop_last, at most the {len(data)} examples are accepted")
    lengths = np.diff(data.examples.offsets)
    if batch_tokens is not None and batch_tokens < (longest := lengths.max()):
        raise ValueError(f"batch_tokens is {batch_tokens}; {longest} or more, the longest example, is accepted")
    if drop_last and batch_tokens is not None and batch_tokens >= (total := lengths.sum()):
        raise ValueError(
            f"batch_tokens is {batch_tokens}; with drop_last, fewer than the {total} of all examples are accepted"
        )
    return DataLoader(
        _Batches(data, pad_to_max_len, packed),
        batch_size=None,  # the sampler yields whole batches
        sampler=_Order(lengths, batch_size, batch_tokens, not packed, data.seed, first_step, epochs, drop_last),
        num_workers=num_workers,
        pin_memory=pin_memory,
        generator=torch.Generator(),  # or it would draw from the default one, and change the model's dropout
    )
