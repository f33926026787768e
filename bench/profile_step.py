"""Where the time of a pretraining step goes, by class of op, beside the matrix products alone.

    python bench/profile_step.py --preset bert-base --layers 4 --dtype fp32

Self times of torch's profiler on real text, as Markdown.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict

import torch
from pretrain_throughput import Fastbert, Floor
from torch.profiler import ProfilerActivity, profile

from fastbert.training.presets import PRESETS
from fastbert.training.pretrain import DTYPES

# The first class whose word occurs in an op's name.
CLASSES = {
    "matrix products": ("::mm", "addmm", "::bmm", "product", "linear"),
    "attention": ("attention",),
    "add_dropout_layer_norm": ("add_dropout_layer_norm",),
    "embedding_layer_norm": ("embedding",),
    "gelu": ("gelu", "threshold", "clamp_min"),
    "loss, between its products": ("masked_lm_loss", "log_softmax", "nll_loss"),
    "optimizer": ("adam", "Optimizer"),
    "casts and copies": ("copy_", "::cat", "_to_copy", "contiguous"),
}


def class_of(name: str) -> str:
    return next((c for c, words in CLASSES.items() if any(w.lower() in name.lower() for w in words)), "the rest")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", default="builtin")
    parser.add_argument("--tokenizer")
    parser.add_argument("--preset", default="bert-base", choices=PRESETS)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--max-len", type=int, default=128)
    parser.add_argument("--dtype", default="fp32", choices=DTYPES)
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    args.pad_to_max_len = False
    ours, floor = Fastbert(args, "fastbert").steps(), Floor(args, "floor").steps()
    for _ in range(15):  # until the allocator holds what steps of any size need
        next(ours)
        next(floor)
    # A step at a time, and the fastest: what the profiler itself allocates costs most of them page faults.
    found = []
    for _ in range(args.steps):
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            next(ours)
        classes = defaultdict(float)
        for event in profiled.key_averages():
            classes[class_of(event.key)] += event.self_cpu_time_total / 1e3
        found.append(classes)
        for _ in range(4):
            next(ours)
    times = min(found, key=lambda classes: sum(classes.values()))
    products = statistics.median(next(floor)[0] for _ in range(args.steps)) * 1e3
    total = sum(times.values())
    layers = args.layers or PRESETS[args.preset].config(10, args.max_len).num_hidden_layers
    sizes = f"batch {args.batch_size} x {args.max_len}"
    print(f"## {args.preset}, {layers} layers, {sizes}, {args.dtype}, {torch.get_num_threads()} threads\n")
    print("| class | ms a step | share |\n|---|---|---|")
    for name, milliseconds in sorted(times.items(), key=lambda item: -item[1]):
        print(f"| {name} | {milliseconds:.1f} | {milliseconds / total:.1%} |")
    print(f"| all | {total:.1f} | 100% |")
    print(f"\nThe products alone through torch.mm, attention's among them: {products:.1f} ms.")


if __name__ == "__main__":
    main()
