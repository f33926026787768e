"""A training step as one CUDA graph: its hundreds of launches cost the host one.

Source: https://pytorch.org/docs/stable/notes/cuda.html#cuda-graphs, "Whole-network capture".
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..data import Batch
from ..ops.packing import Packing

WARMUP = 3  # steps before the capture: kernels are compiled, libraries make their handles


class GraphedStep:
    """``step``, a function of a batch, forward to optimizer; called with batches on the GPU, all of the same sizes."""

    def __init__(self, step: Callable[[Batch], tuple[Tensor, ...]]):
        self.step, self.calls = step, 0
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, batch: Batch) -> tuple[Tensor, ...]:
        self.calls += 1
        if self.calls <= WARMUP:
            side, main = torch.cuda.Stream(), torch.cuda.current_stream()
            side.wait_stream(main)
            with torch.cuda.stream(side):
                losses = self.step(batch)
            main.wait_stream(side)
            return losses
        if self.graph is None:
            self.batch, self.graph = batch, torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.losses = self.step(batch)
        else:
            _copy(self.batch, batch)
        self.graph.replay()
        return tuple(loss.clone() for loss in self.losses)


def _copy(target: Batch | Packing, source: Batch | Packing) -> None:
    for name, part in vars(target).items():
        if isinstance(part, Tensor):
            part.copy_(getattr(source, name))
        elif isinstance(part, Packing):
            _copy(part, getattr(source, name))
