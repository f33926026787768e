"""What a run writes about itself: ``metrics.jsonl``, ``summary.json``, ``loss.png``."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LOSSES = {"mlm_loss": "masked tokens (MLM)", "nsp_loss": "next sentence (NSP)"}


def read_metrics(path: Path, before_step: int) -> list[dict[str, float]]:
    """The complete lines of a ``metrics.jsonl`` up to step ``before_step``; a line cut short by a kill is left out."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if record["step"] <= before_step:
            records.append(record)
    return records


def write_atomically(path: Path, text: str) -> None:
    aside = path.with_name(path.name + ".tmp")
    aside.write_text(text, encoding="utf-8")
    os.replace(aside, path)


def write_metrics(path: Path, records: Sequence[dict[str, Any]]) -> None:
    write_atomically(path, "".join(json.dumps(record) + "\n" for record in records))


def plot_losses(path: Path, records: Sequence[dict[str, float]], title: str) -> None:
    """Both losses over the steps: each step faint, their running mean strong; one panel a loss."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    steps = [record["step"] for record in records]
    for axes, (name, label) in zip(figure.subplots(1, 2), LOSSES.items(), strict=True):
        values = [record[name] for record in records]
        axes.plot(steps, values, color="C0", alpha=0.35, linewidth=1, label="each step")
        axes.plot(steps, running_mean(values), color="C0", linewidth=2, label="running mean")
        axes.set_title(label)
        axes.set_xlabel("step")
        axes.set_ylabel("cross-entropy (nats)")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def running_mean(values: Sequence[float]) -> list[float]:
    """The mean of the last tenth of the values up to each one."""
    window = max(1, len(values) // 10)
    means, total = [], 0.0
    for i, value in enumerate(values):
        total += value - (values[i - window] if i >= window else 0.0)
        means.append(total / min(i + 1, window))
    return means
