"""Pretraining: masked tokens and next sentences, from text to checkpoint.

Source: Devlin et al., "BERT", sections 3.1 and A.2, https://arxiv.org/abs/1810.04805.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import platform
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from .. import __version__
from ..bert import BertForPreTraining
from ..data import Batch, PretrainingData, make_loader, prepare
from ..ops.registry import check_backend_name, use_backend
from . import checkpoint
from .graphs import GraphedStep
from .memory import keep_freed_memory
from .metrics import plot_losses, read_metrics, write_atomically, write_metrics
from .presets import PRESETS

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
METRICS, SUMMARY, CONFIG, PLOT = "metrics.jsonl", "summary.json", "config.json", "loss.png"
LOADERS = 2  # processes that make a GPU's batches
FETCH_EVERY = 10  # steps between two readings of the losses from a GPU, each of which waits for it


@dataclasses.dataclass(frozen=True)
class PretrainConfig:
    """A run. None means the preset's value; of ``batch_size`` and ``batch_tokens`` (tokens that are not padding, as
    many examples as fit) only one may be given. ``accumulate``: batches that make up a step, whose losses are means
    over all of them.

    ``corpus``: "builtin", a file or a directory (:func:`fastbert.data.prepare`); ``tokenizer``: "word", "wordpiece", a
    ``vocab.txt`` or a saved tokenizer; ``dtype``: fp32, or bf16 or fp16 by autocast (fp16 with a scaled loss);
    ``backend``: of every op, None for the best; ``device``: None for a GPU if there is one; ``unpad``: whether padding
    is dropped before the embeddings; ``cuda_graphs``: capture the step as a CUDA graph, which needs ``batch_tokens``;
    ``save_every``: steps between checkpoints besides the last.

    Raises ``ValueError`` naming the setting, its value and what is accepted.
    """

    corpus: str = "builtin"
    preset: str = "notebook"
    steps: int = 100
    batch_size: int | None = None
    batch_tokens: int | None = None
    accumulate: int = 1
    max_len: int | None = None
    tokenizer: str | None = None
    learning_rate: float | None = None
    backend: str | None = None
    dtype: str = "fp32"
    device: str | None = None
    seed: int = 0
    unpad: bool = True
    compile: bool = False
    cuda_graphs: bool = False
    save_every: int | None = None

    def __post_init__(self):
        if self.preset not in PRESETS:
            raise ValueError(f"preset is {self.preset!r}; accepted are {', '.join(PRESETS)}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}; accepted are {', '.join(DTYPES)}")
        if self.backend is not None:
            check_backend_name(self.backend, "backend")
        for name in ("steps", "batch_size", "batch_tokens", "accumulate", "max_len", "save_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; 1 or more is accepted")
        if self.learning_rate is not None and not self.learning_rate > 0:
            raise ValueError(f"learning_rate is {self.learning_rate}; a number above 0 is accepted")
        if self.batch_size is not None and self.batch_tokens is not None:
            raise ValueError(
                f"batch_size is {self.batch_size} and batch_tokens is {self.batch_tokens}; only one of them is accepted"
            )
        if self.cuda_graphs and (self.batch_tokens is None or not self.unpad or self.compile or self.accumulate > 1):
            raise ValueError(
                f"cuda_graphs is True, batch_tokens {self.batch_tokens}, unpad {self.unpad}, compile {self.compile}, "
                f"accumulate {self.accumulate}; accepted with it are a number, True, False and 1"
            )
        preset = PRESETS[self.preset]
        for name in ("batch_size", "max_len", "tokenizer", "learning_rate"):
            if getattr(self, name) is None and not (name == "batch_size" and self.batch_tokens):
                object.__setattr__(self, name, getattr(preset, name))


class Trainer:
    """A model, its optimizer and the step that both the run and the throughput benchmark take.

    ``capacity``: :attr:`Batch.sizes` of the batches that CUDA graphs, if they are wanted, are made for.
    """

    def __init__(
        self,
        model: BertForPreTraining,
        config: PretrainConfig,
        device: torch.device,
        capacity: tuple[int, int, int] | None = None,
    ):
        if device.type == "cpu":
            keep_freed_memory()
        if config.cuda_graphs and device.type != "cuda":
            raise ValueError(f"cuda_graphs is True and device is {str(device)!r}; a CUDA device is needed")
        preset = PRESETS[config.preset]
        self.config, self.device, self.capacity = config, device, capacity
        self.model = model.to(device).train()
        self.model.unpad = config.unpad
        rate = torch.tensor(config.learning_rate, device=device) if config.cuda_graphs else config.learning_rate
        self.optimizer = preset.optimizer(self.model, rate)
        self.warmup = preset.warmup
        self.autocast = DTYPES[config.dtype] if config.dtype != "fp32" else None
        self.scaler = torch.amp.GradScaler(device.type, enabled=config.dtype == "fp16")
        self.forward = torch.compile(self.model) if config.compile else self.model
        self.graphed = GraphedStep(lambda batch: self._step([batch])) if config.cuda_graphs else None

    def learning_rate(self, step: int) -> float:
        """Of step ``step``, counted from 1: constant, or a linear rise and a linear fall."""
        if self.warmup is None:
            return self.config.learning_rate
        rise = max(1, round(self.warmup * self.config.steps))
        fall = self.config.steps - rise + 1
        return self.config.learning_rate * min(step / rise, (self.config.steps - step + 1) / fall)

    def step(self, step: int, *batches: Batch) -> tuple[Tensor, Tensor]:
        """One optimizer step on all of ``batches``; returns the two losses, on the device."""
        for group in self.optimizer.param_groups:
            rate = self.learning_rate(step)
            group["lr"] = group["lr"].fill_(rate) if isinstance(group["lr"], Tensor) else rate
        if self.graphed and self.capacity and all(map(int.__le__, batches[0].sizes, self.capacity)):
            filled = batches[0].filled(*self.capacity).pin_memory()
            return self.graphed(filled.to(self.device, non_blocking=True))
        return self._step([batch.to(self.device, non_blocking=True) for batch in batches])

    def _step(self, batches: Sequence[Batch]) -> tuple[Tensor, Tensor]:
        self.optimizer.zero_grad(set_to_none=True)
        # Means over all batches, whatever the share of each.
        labelled, pairs = (sum(batch.sizes[i] for batch in batches) for i in (2, 1))
        losses = []
        with use_backend(self.config.backend) if self.config.backend else contextlib.nullcontext():
            for batch in batches:
                shares = batch.sizes[2] / max(labelled, 1), batch.sizes[1] / pairs
                found = self._forward(batch)
                losses.append([loss if share == 1 else loss * share for loss, share in zip(found, shares, strict=True)])
                self.scaler.scale(sum(losses[-1])).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        mlm_loss, nsp_loss = (sum(loss.detach() for loss in column) for column in zip(*losses, strict=True))
        return mlm_loss, nsp_loss

    def _forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        padding = {"packing": batch.packing} if self.config.unpad else {"attention_mask": batch.attention_mask}
        autocast = torch.autocast(self.device.type, self.autocast) if self.autocast else contextlib.nullcontext()
        with autocast:
            output = self.forward(
                batch.input_ids,
                token_type_ids=batch.token_type_ids,
                labels=batch.labels,
                masked_positions=batch.masked_positions,
                next_sentence_label=batch.next_sentence_label,
                **padding,
            )
        return output.mlm_loss, output.nsp_loss

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps besides the parameters."""
        generators = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            generators["cuda"] = torch.cuda.get_rng_state(self.device)
        return {"optimizer": self.optimizer.state_dict(), "scaler": self.scaler.state_dict(), "generators": generators}

    def restore(self, state: dict[str, Any]) -> None:
        groups = self.optimizer.state_dict()["param_groups"]  # a resumed run may be captured where the first was not
        self.optimizer.load_state_dict({"state": state["optimizer"]["state"], "param_groups": groups})
        self.scaler.load_state_dict(state["scaler"])
        torch.set_rng_state(state["generators"]["cpu"])
        if self.device.type == "cuda" and "cuda" in state["generators"]:
            torch.cuda.set_rng_state(state["generators"]["cuda"], self.device)


def pretrain(config: PretrainConfig, out: str | os.PathLike[str], *, resume: bool = False) -> dict[str, Any]:
    """Train and return the summary that ``summary.json`` holds.

    ``out``, the run's directory, gets ``config.json``, ``metrics.jsonl`` (a line each step), ``summary.json``,
    ``loss.png`` and checkpoints, ``checkpoint-<step>``, which ``BertModel.from_pretrained`` reads. ``resume`` goes on
    from the newest checkpoint there with the same numbers that an uninterrupted run would give (on the same machine
    and threads).

    Raises ``ValueError`` or an ``OSError`` for a corpus that is missing, empty, too short to pair or not UTF-8, for
    a directory that cannot be written or holds another run.
    """
    out = Path(out)
    first = _claim(out, config, resume)
    device = torch.device(config.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    preset = PRESETS[config.preset]
    data = prepare(
        config.corpus,
        tokenizer=config.tokenizer,
        max_len=config.max_len,
        seed=config.seed,
        static_masking=preset.static_masking,
    )
    # Only now: a run that found no data leaves a directory that may be used again.
    write_atomically(out / CONFIG, json.dumps(dataclasses.asdict(config), indent=2) + "\n")
    print(
        f"{len(data):,} examples of up to {config.max_len} tokens, {data.fill:.1%} of them filled; "
        f"vocabulary of {data.tokenizer.vocab_size:,}"
    )
    capacity = data.capacity(config.batch_tokens) if config.cuda_graphs else None
    torch.manual_seed(config.seed)
    if first is None:
        model, step, records = preset.build(data.tokenizer.vocab_size, config.max_len), 0, []
        trainer = Trainer(model, config, device, capacity)
    else:
        trainer = Trainer(BertForPreTraining.from_pretrained(first), config, device, capacity)
        state = checkpoint.load_state(first)
        trainer.restore(state)
        step = state["step"]
        records = read_metrics(out / METRICS, step)
        print(f"going on after step {step}, from {first}")
    write_metrics(out / METRICS, records)
    records = _run(trainer, data, out, step, records)
    summary = _summarize(config, data, trainer, records)
    write_atomically(out / SUMMARY, json.dumps(summary, indent=2) + "\n")
    size = f"batch {config.batch_size}" if config.batch_size else f"{config.batch_tokens} tokens a batch"
    title = f"{config.preset} on {Path(config.corpus).name}, {size}, {config.dtype}"
    plot_losses(out / PLOT, records, title)
    print(
        f"MLM loss {summary['mlm_loss']:.3f} on average, {summary['last_mlm_loss']:.3f} at the end; NSP loss "
        f"{summary['nsp_loss']:.3f}\n{summary['sentence_pairs_per_s']:,.0f} sentence pairs/s, "
        f"{summary['tokens_per_s']:,.0f} valid tokens/s on {summary['device']}\nrun, checkpoint and loss.png in {out}"
    )
    return summary


def _claim(out: Path, config: PretrainConfig, resume: bool) -> Path | None:
    """Make ``out`` this run's directory; returns the checkpoint to go on from, or None to start."""
    settings = dataclasses.asdict(config)
    try:
        out.mkdir(parents=True, exist_ok=True)
        if resume and (out / CONFIG).exists():
            # A setting that came after the run began had its default then.
            before = {field.name: field.default for field in dataclasses.fields(config)}
            before |= json.loads((out / CONFIG).read_text(encoding="utf-8"))
            differing = [name for name in settings if settings[name] != before[name] and name not in _MAY_DIFFER]
            if differing:
                listed = ", ".join(f"{name} was {before[name]!r}, is {settings[name]!r}" for name in differing)
                raise ValueError(f"out is {str(out)!r}, a run with other settings: {listed}")
        elif any(out.iterdir()) and not (resume and checkpoint.latest(out) is None):
            raise ValueError(
                f"out is {str(out)!r}, which is not empty; pass --resume to go on with the run there, or another "
                "directory"
            )
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise type(error)(error.errno, f"out is {str(out)!r}, which cannot be written: {error.strerror}") from error
    return checkpoint.latest(out) if resume else None


# Settings that a resumed run may change: how fast and how far it runs, not what it computes.
_MAY_DIFFER = ("steps", "backend", "device", "compile", "cuda_graphs", "save_every")


def _run(trainer: Trainer, data: PretrainingData, out: Path, step: int, records: list[dict]) -> list[dict]:
    """The steps after ``step``; returns the records of all steps."""
    config, device = trainer.config, trainer.device
    loader = make_loader(
        data,
        config.batch_size,
        batch_tokens=config.batch_tokens,
        packed=config.unpad,
        first_step=step * config.accumulate,
        pad_to_max_len=config.cuda_graphs,
        num_workers=LOADERS if device.type == "cuda" else 0,
        pin_memory=device.type == "cuda",
    )
    batches = iter(loader)
    pending: list[tuple] = []
    with (out / METRICS).open("a", encoding="utf-8") as file, tqdm(total=config.steps, initial=step) as bar:
        started = time.perf_counter()
        while step < config.steps:
            step += 1
            chosen = list(itertools.islice(batches, config.accumulate))
            packings = [batch.packing for batch in chosen]
            sizes = [sum(s) for s in zip(*((p.batch, p.batch * p.seqlen, p.tokens) for p in packings), strict=True)]
            pending.append((step, trainer.step(step, *chosen), *sizes))
            last = step == config.steps
            if device.type == "cpu" or len(pending) == FETCH_EVERY or last:
                losses = torch.stack([torch.stack(pair) for _, pair, *_ in pending]).tolist()
                seconds = (time.perf_counter() - started) / len(pending)
                for (number, _, *sizes), (mlm_loss, nsp_loss) in zip(pending, losses, strict=True):
                    records.append(_record(number, mlm_loss, nsp_loss, *sizes, seconds))
                    file.write(json.dumps(records[-1]) + "\n")
                file.flush()
                bar.update(len(pending))
                bar.set_postfix_str(
                    f"MLM {mlm_loss:.3f}, NSP {nsp_loss:.3f}, {records[-1]['sentence_pairs_per_s']:,.0f} pairs/s, "
                    f"{records[-1]['tokens_per_s']:,.0f} tokens/s"
                )
                pending = []
                started = time.perf_counter()
            if last or (config.save_every and step % config.save_every == 0):
                checkpoint.save(out, step, trainer.model, data.tokenizer, trainer.state())
                started = time.perf_counter()
    return records


def _record(
    step: int, mlm_loss: float, nsp_loss: float, pairs: int, places: int, tokens: int, seconds: float
) -> dict[str, float]:
    return {
        "step": step,
        "mlm_loss": mlm_loss,
        "nsp_loss": nsp_loss,
        "sentence_pairs_per_s": round(pairs / seconds, 2),
        "tokens_per_s": round(tokens / seconds, 1),
        "valid_fraction": round(tokens / places, 4),
    }


def _summarize(config: PretrainConfig, data: PretrainingData, trainer: Trainer, records: list[dict]) -> dict[str, Any]:
    def mean(name: str, chosen: list[dict]) -> float:
        return sum(record[name] for record in chosen) / len(chosen)

    def median(name: str) -> float:
        values = sorted(record[name] for record in records)
        return values[len(values) // 2]

    last = records[-max(1, len(records) // 10) :]
    return {
        **dataclasses.asdict(config),
        "examples": len(data),
        "vocab_size": data.tokenizer.vocab_size,
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "mlm_loss": mean("mlm_loss", records),
        "nsp_loss": mean("nsp_loss", records),
        "last_mlm_loss": mean("mlm_loss", last),
        "last_nsp_loss": mean("nsp_loss", last),
        "sentence_pairs_per_s": median("sentence_pairs_per_s"),
        "tokens_per_s": median("tokens_per_s"),
        "valid_fraction": mean("valid_fraction", records),
        "device": torch.cuda.get_device_name(trainer.device) if trainer.device.type == "cuda" else platform.machine(),
        "threads": torch.get_num_threads(),
        "versions": {"fastbert": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }
