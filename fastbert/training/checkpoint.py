"""Checkpoints of a run: complete or not there, whenever the process is killed.

A checkpoint is a directory ``checkpoint-<step>`` that :meth:`BertModel.from_pretrained` reads: ``config.json``,
``model.safetensors`` and the tokenizer; beside them ``training_state.pt``: step, optimizer, generators, losses so far.
It is written under another name and renamed when everything in it has reached the disk.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch

from ..bert import BertForPreTraining
from ..data.tokenizers import Tokenizer

STATE = "training_state.pt"
KEEP = 2  # the newest checkpoints that stay


def save(run: Path, step: int, model: BertForPreTraining, tokenizer: Tokenizer, state: dict[str, Any]) -> Path:
    """Write ``checkpoint-<step>`` into the directory ``run`` and remove all but the newest few."""
    final, aside = run / f"checkpoint-{step}", run / f"checkpoint-{step}.tmp"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    model.save_pretrained(aside)
    tokenizer.save(aside)
    torch.save({"step": step, **state}, aside / STATE)
    for path in aside.iterdir():
        _to_disk(path)
    if final.exists():  # of a run that ended at this very step before it was resumed
        shutil.rmtree(final)
    os.rename(aside, final)
    _to_disk(run)
    for old in _all(run)[:-KEEP]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def _to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _all(run: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    found = [p for p in run.glob("checkpoint-*") if p.name.removeprefix("checkpoint-").isdigit()]
    return sorted(found, key=lambda p: int(p.name.removeprefix("checkpoint-")))


def latest(run: Path) -> Path | None:
    """The newest complete checkpoint of a run, or None."""
    return next(reversed(_all(run)), None)


def load_state(checkpoint: Path) -> dict[str, Any]:
    """What :func:`save` was given as ``state``, and ``step``."""
    return torch.load(checkpoint / STATE, map_location="cpu", weights_only=True)
