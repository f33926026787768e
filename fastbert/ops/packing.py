"""Packing: a padded batch [B, S, ...] without its padding, [T, ...], and back.

``cu_seqlens`` follows the convention of FlashAttention (https://arxiv.org/abs/2205.14135): sequence ``b``
owns rows ``cu_seqlens[b]`` to ``cu_seqlens[b + 1]`` of the packed tensor.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Packing:
    """Where the tokens of a packed batch came from.

    ``indices``: int64 ``[T]``, position of each token in the flattened padded batch ``[B * S]``, ascending.
    ``cu_seqlens``: int32 ``[B + 1]``, cumulative lengths, on the device of the batch.
    ``max_seqlen``, ``batch``, ``seqlen``: Python ints, so that no layer has to ask the device: the longest
    sequence, B and S.
    """

    indices: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    batch: int
    seqlen: int

    @classmethod
    def from_mask(cls, attention_mask: Tensor) -> Packing:
        """Packing of a ``[B, S]`` mask, bool or 0/1, nonzero = a real token; any pattern.

        Reads two sizes back from the device: make it once a batch, in the data loader where possible.
        """
        if attention_mask.dim() != 2:
            raise ValueError(f"attention_mask has shape {tuple(attention_mask.shape)}; a packing needs [batch, seqlen]")
        on = attention_mask != 0
        return cls._build(on.flatten().nonzero().flatten(), on.sum(1), *attention_mask.shape)

    @classmethod
    def from_lengths(cls, lengths: Tensor, seqlen: int) -> Packing:
        """Packing of sequences that start at position 0 and are ``lengths`` ``[B]`` tokens long."""
        if lengths.dim() != 1:
            raise ValueError(f"lengths has shape {tuple(lengths.shape)}; a packing needs [batch]")
        on = torch.arange(seqlen, device=lengths.device) < lengths[:, None]
        return cls.from_mask(on)

    @classmethod
    def _build(cls, indices: Tensor, lengths: Tensor, batch: int, seqlen: int) -> Packing:
        cu_seqlens = torch.zeros(batch + 1, dtype=torch.int32, device=lengths.device)
        torch.cumsum(lengths, 0, dtype=torch.int32, out=cu_seqlens[1:])
        max_seqlen = int(lengths.max()) if batch else 0
        return cls(indices, cu_seqlens, max_seqlen, batch, seqlen)

    @property
    def tokens(self) -> int:
        """T, the number of packed tokens."""
        return self.indices.shape[0]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Packing:
        """The same packing with its tensors on ``device``."""
        return dataclasses.replace(
            self,
            indices=self.indices.to(device, non_blocking=non_blocking),
            cu_seqlens=self.cu_seqlens.to(device, non_blocking=non_blocking),
        )

    def pin_memory(self) -> Packing:
        """The same packing with its tensors in page-locked memory."""
        return dataclasses.replace(self, indices=self.indices.pin_memory(), cu_seqlens=self.cu_seqlens.pin_memory())


def take(padded: Tensor, packing: Packing) -> Tensor:
    """The packed rows ``[T, ...]`` of a padded tensor ``[B, S, ...]``."""
    if tuple(padded.shape[:2]) != (packing.batch, packing.seqlen):
        raise ValueError(
            f"hidden has shape {tuple(padded.shape)}; its packing is of [{packing.batch}, {packing.seqlen}, ...]"
        )
    return padded.flatten(0, 1).index_select(0, packing.indices)


def unpad(hidden: Tensor, attention_mask: Tensor) -> tuple[Tensor, Packing]:
    """Drop the padding of ``hidden`` ``[B, S, ...]``; ``attention_mask`` ``[B, S]``, nonzero = keep.

    Returns the packed tensor ``[T, ...]`` and its :class:`Packing`. Differentiable in ``hidden``. Raises
    ``ValueError`` if the shapes disagree.
    """
    if hidden.shape[:2] != attention_mask.shape:
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}; hidden {tuple(hidden.shape)} needs "
            f"{tuple(hidden.shape[:2])}"
        )
    packing = Packing.from_mask(attention_mask)
    return take(hidden, packing), packing


def pad(packed: Tensor, packing: Packing) -> Tensor:
    """Undo :func:`unpad`: ``[T, ...]`` to ``[B, S, ...]``, zeros where there was padding. Differentiable."""
    if packed.dim() < 1 or packed.shape[0] != packing.tokens:
        raise ValueError(f"packed has shape {tuple(packed.shape)}; its packing holds {packing.tokens} tokens")
    rows = packed.new_zeros(packing.batch * packing.seqlen, *packed.shape[1:])
    return rows.index_copy(0, packing.indices, packed).unflatten(0, (packing.batch, packing.seqlen))
