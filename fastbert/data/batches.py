"""Batches: examples gathered, masked and padded a whole batch at a time, in an order that a seed fixes.

A loader's sampler yields batches of example numbers, and the data set turns such a batch into tensors at
once: nothing is done example by example. The sampler and the masks know no state but (seed, epoch), so worker
processes, or a run resumed at any step, see the same batches.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from ..ops.packing import Packing
from .examples import Examples, mask_tokens, ranges
from .tokenizers import Tokenizer


@dataclasses.dataclass(frozen=True)
class Batch:
    """B examples padded to S tokens, all int64.

    ``input_ids``, ``attention_mask`` (1 = a token, 0 = padding), ``token_type_ids`` (0 = first segment and
    padding, 1 = second) and ``labels`` (-100 where nothing is predicted): ``[B, S]``. ``next_sentence_label``:
    ``[B]``, 0 = the second sentence follows the first, 1 = it is random. ``packing``: where the tokens are.
    """

    input_ids: Tensor
    attention_mask: Tensor
    token_type_ids: Tensor
    labels: Tensor
    next_sentence_label: Tensor
    packing: Packing

    @property
    def valid_tokens(self) -> int:
        """Tokens that are not padding."""
        return self.packing.tokens

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """The same batch on ``device``."""
        return Batch(**{name: part.to(device, non_blocking=non_blocking) for name, part in vars(self).items()})

    def pin_memory(self) -> Batch:
        """The same batch in page-locked memory."""
        return Batch(**{name: part.pin_memory() for name, part in vars(self).items()})


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


class _Batches(Dataset):
    """``batches[epoch, indices]`` is a :class:`Batch`."""

    def __init__(self, data: PretrainingData, pad_to_max_len: bool) -> None:
        self.examples, self.tokenizer = data.examples, data.tokenizer
        self.seed, self.static_masking = data.seed, data.static_masking
        self.seqlen = data.max_len if pad_to_max_len else None
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
        attention_mask = torch.from_numpy(valid.astype(np.int64))
        return Batch(
            torch.from_numpy(input_ids),
            attention_mask,
            torch.from_numpy((valid & (position >= first)).astype(np.int64)),
            torch.from_numpy(labels),
            torch.from_numpy(examples.next_sentence_label[indices].astype(np.int64)),
            Packing.from_mask(attention_mask),
        )


class _Order(Sampler):
    """Yields (epoch, example numbers) batch by batch: each example once an epoch, in an order of its own."""

    def __init__(
        self, count: int, batch_size: int, seed: int, first_step: int, epochs: int | None, drop_last: bool
    ) -> None:
        self.count, self.batch_size, self.seed, self.epochs = count, batch_size, seed, epochs
        self.per_epoch = count // batch_size if drop_last else -(-count // batch_size)
        self.first_epoch, self.skipped = divmod(first_step, self.per_epoch)

    def __len__(self) -> int:
        if self.epochs is None:
            raise TypeError("a loader with epochs=None has no length: it goes on for ever")
        return self.epochs * self.per_epoch - self.skipped

    def __iter__(self) -> Iterator[tuple[int, NDArray[np.int64]]]:
        numbers = itertools.count() if self.epochs is None else range(self.epochs)
        skipped = self.skipped
        for epoch in (self.first_epoch + n for n in numbers):
            # [seed, 0] is the stream of seed alone, which the sentence pairs were drawn from
            order = np.random.default_rng([self.seed, epoch + 1]).permutation(self.count)
            for step in range(skipped, self.per_epoch):
                yield epoch, order[step * self.batch_size : (step + 1) * self.batch_size]
            skipped = 0


def make_loader(
    data: PretrainingData,
    batch_size: int,
    *,
    first_step: int = 0,
    epochs: int | None = None,
    pad_to_max_len: bool = False,
    drop_last: bool = False,
    num_workers: int = 0,
    pin_memory: bool = False,
) -> DataLoader:
    """A loader of :class:`Batch`, over ``epochs`` epochs or, by default, without end.

    ``first_step``: batches taken by an earlier run; this one goes on with the next, so that the step number
    alone says where a training run is. ``pad_to_max_len`` pads to ``data.max_len`` instead of the longest
    example of the batch. Raises ``ValueError`` for a number out of range.
    """
    for name, value, least in (("batch_size", batch_size, 1), ("first_step", first_step, 0)):
        if value < least:
            raise ValueError(f"{name} is {value}; {least} or more is accepted")
    if epochs is not None and epochs < 1:
        raise ValueError(f"epochs is {epochs}; 1 or more, or None for no end, is accepted")
    if drop_last and batch_size > len(data):
        raise ValueError(f"batch_size is {batch_size}; with drop_last, at most the {len(data)} examples are accepted")
    return DataLoader(
        _Batches(data, pad_to_max_len),
        batch_size=None,  # the sampler yields whole batches
        sampler=_Order(len(data), batch_size, data.seed, first_step, epochs, drop_last),
        num_workers=num_workers,
        pin_memory=pin_memory,
        generator=torch.Generator(),  # or it would draw from the default one, and change the model's dropout
    )
