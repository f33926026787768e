"""From the JSON files of pretrain_throughput.py to one Markdown page of tables and a picture.

python bench/throughput_report.py bench/results/<machine>/throughput-*.json     # throughput.md and .png beside them
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path

from matplotlib.figure import Figure
from pretrain_throughput import markdown

from fastbert.training.presets import PRESETS

COLORS = {"fastbert": "C0", "fastbert, padded": "C9", "fastbert, eager backend": "C7", "notebook eager": "0.55"}
PEER = "0.5"


def read(path: Path) -> tuple[Namespace, list[dict]]:
    found = json.loads(path.read_text(encoding="utf-8"))
    settings = Namespace(**found["settings"])
    settings.layers = None if settings.layers == "None" else int(settings.layers)
    settings.max_len = int(settings.max_len)
    return settings, found["rows"]


def title(settings: Namespace) -> str:
    layers = settings.layers or PRESETS[settings.preset].config(10, settings.max_len).num_hidden_layers
    return f"{settings.preset}, {layers} layers, {settings.batch_size} x {settings.max_len}, {settings.dtype}"


def picture(results: list[tuple[Namespace, list[dict]]], path: Path) -> None:
    """Valid tokens a second of every row, a panel for each run; the floor, products alone, as a line."""
    columns = 2
    lines = -(-len(results) // columns)
    figure = Figure(figsize=(11, 0.5 + 1.75 * lines), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False).flat
    for axes, (settings, table) in zip(panels, results, strict=False):
        rows = [r for r in table if r["row"] != "floor"]
        floor = next(r["valid_tokens_per_s"] for r in table if r["row"] == "floor")
        speeds = [r["valid_tokens_per_s"] for r in rows]
        bars = axes.barh([r["row"] for r in rows], speeds, color=[COLORS.get(r["row"], PEER) for r in rows])
        axes.bar_label(bars, [f"{s:,.0f}" for s in speeds], fontsize=7, label_type="center", color="white")
        axes.axvline(floor, color="black", linewidth=0.8, linestyle="--")
        axes.set_xlim(0, 1.15 * max(*speeds, floor))
        axes.invert_yaxis()
        axes.tick_params(labelsize=7)
        axes.set_title(title(settings), fontsize=9, loc="left")
    for axes in list(panels):
        axes.remove()
    figure.supxlabel("valid tokens a second of whole training steps; dashed: the matrix products alone", fontsize=8)
    figure.savefig(path, dpi=110)


def main(paths: list[Path]) -> None:
    results = [read(path) for path in paths]
    out = paths[0].parent / "throughput"
    pages = [markdown(settings, table) + "\n" for settings, table in results]
    header = "# Whole pretraining steps, in turns on the same batches\n\nBy `bench/pretrain_throughput.py`.\n\n"
    out.with_suffix(".md").write_text(header + "\n".join(pages), encoding="utf-8")
    picture(results, out.with_suffix(".png"))


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]])
