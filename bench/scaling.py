"""What a valid token costs as batch, length and padding change: it must stay flat where arithmetic says so.

    python bench/scaling.py --out bench/results/<machine>/scaling

Padding is dropped, so its share must not matter; batch must not matter once the machine is full; length matters only
through attention, whose operations a token grow with it. Writes <out>.json and <out>.png.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from pathlib import Path

import torch
from common import DEVICE, commit, in_turns
from matplotlib.figure import Figure

from fastbert.bert import BertForPreTraining
from fastbert.data import Batch
from fastbert.ops import Packing
from fastbert.training.presets import PRESETS
from fastbert.training.pretrain import PretrainConfig, Trainer

VOCABULARY = 8192
# Name -> (batch, length, share of tokens that are not padding); the middle one of each sweep is the same point.
SWEEPS = {
    "batch": [(batch, 128, 0.5) for batch in (4, 8, 16, 32, 64)],
    "length": [(2048 // length, length, 0.5) for length in (64, 128, 256, 512)],
    "valid fraction": [(16, 128, share) for share in (0.25, 0.5, 0.75, 1.0)],
}


def make_batch(batch: int, seqlen: int, share: float) -> Batch:
    """Right-padded random tokens; lengths spread evenly around ``share * seqlen``; 15% are labelled."""
    spread = min(share, 1 - share) * seqlen
    lengths = torch.linspace(share * seqlen - spread, share * seqlen + spread, batch).round().long().clamp(4, seqlen)
    packing = Packing.from_lengths(lengths, seqlen)
    on = torch.arange(seqlen) < lengths[:, None]
    ids = torch.randint(5, VOCABULARY, (batch, seqlen)) * on
    labels = torch.where((torch.rand(batch, seqlen) < 0.15) & on, ids, -100)
    types, following = torch.zeros_like(ids), torch.randint(0, 2, (batch,))
    places = (labels.flatten() != -100).nonzero().flatten()
    return Batch(ids, on.long(), types, labels, places, following, packing)


def measure(args: argparse.Namespace) -> dict[str, list[dict]]:
    torch.manual_seed(0)
    preset = PRESETS[args.preset]
    config = dataclasses.replace(preset.config(VOCABULARY, 512), num_hidden_layers=args.layers)
    settings = PretrainConfig(preset=args.preset, steps=10_000, dtype=args.dtype)
    trainer = Trainer(BertForPreTraining(config), settings, DEVICE)
    found = {}
    for name, points in SWEEPS.items():
        batches = {point: make_batch(*point).to(DEVICE) for point in points}
        times = in_turns({p: (lambda b=b: trainer.step(1, b)) for p, b in batches.items()}, args.turns)
        found[name] = [
            {
                "batch": point[0],
                "length": point[1],
                "valid_fraction": batches[point].valid_tokens / (point[0] * point[1]),
                "valid_tokens": batches[point].valid_tokens,
                "step_s": statistics.median(seconds),
                "us_per_valid_token": 1e6 * statistics.median(seconds) / batches[point].valid_tokens,
            }
            for point, seconds in times.items()
        ]
    return found


def plot(found: dict[str, list[dict]], path: Path, title: str) -> None:
    figure = Figure(figsize=(10, 3.2), layout="constrained")
    keys = {"batch": "batch", "length": "length", "valid fraction": "valid_fraction"}
    for axes, (name, points) in zip(figure.subplots(1, 3, sharey=True), found.items(), strict=True):
        axes.plot([p[keys[name]] for p in points], [p["us_per_valid_token"] for p in points], marker="o")
        if name != "valid fraction":
            axes.set_xscale("log", base=2)
        axes.set_xlabel(name)
        axes.set_ylim(0, None)
        axes.grid(alpha=0.3)
        axes.label_outer()
    figure.axes[0].set_ylabel("µs of a step per valid token")
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="bert-base", choices=PRESETS)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("scaling"))
    args = parser.parse_args()
    found = measure(args)
    title = f"{args.preset}, {args.layers} layers, vocabulary {VOCABULARY:,}, {args.dtype}"
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.with_suffix(".json").write_text(json.dumps({"title": title, "commit": commit(), **found}, indent=1) + "\n")
    plot(found, args.out.with_suffix(".png"), title)
    for name, points in found.items():
        print(name, *(f"{p['us_per_valid_token']:.1f}" for p in points), "µs per valid token")


if __name__ == "__main__":
    main()
