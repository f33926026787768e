"""From pytest-benchmark's JSON to a Markdown table and a picture of each op, side by side with their peers.

python bench/report.py results.json   # writes results.md and results.png beside it
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path

from matplotlib.figure import Figure

COLORS = {"cpu": "C0", "triton": "C1", "cuda": "C2", "eager": "0.55", "sdpa": "0.7", "compile": "0.8"}


def groups(path: Path) -> dict[str, list[dict]]:
    """The rows of each group, in the order they ran."""
    found = defaultdict(list)
    for benchmark in json.loads(path.read_text(encoding="utf-8"))["benchmarks"]:
        found[benchmark["group"]].append({"row": benchmark["params"]["row"], **benchmark["extra_info"]})
    return dict(found)


def markdown(found: dict[str, list[dict]]) -> str:
    first = next(iter(found.values()))[0]
    lines = [
        f"Measured on {first['device']}, commit {first['commit']}. Medians; `times eager` in turns with eager.",
        "",
    ]
    for group, rows in found.items():
        lines += [
            f"**{group}**",
            "",
            "| | ms | spread | times eager | rate | share of limit |",
            "|---|---|---|---|---|---|",
        ]
        for r in rows:
            rate = f"{r['GB/s']} GB/s" if "GB/s" in r else f"{r['GFLOP/s']} GFLOP/s"
            share = r.get("share_of_copy", r.get("share_of_product"))
            lines.append(
                f"| {r['row']} | {r['median_ms']:.2f} | {r['spread_ms']:.2f} | {r['times_eager']:.2f} | {rate} | "
                f"{share:.0%} |"
            )
        lines.append("")
    return "\n".join(lines)


def picture(found: dict[str, list[dict]], path: Path) -> None:
    """Speed over eager of every row, forward and backward together, a panel for each op."""
    ops = defaultdict(dict)
    for group, rows in found.items():
        if group.endswith("forward + backward"):
            ops[group.split(",")[0]][", ".join(group.split(", ")[1:-1])] = rows
    figure = Figure(figsize=(11, 2.2 + 0.55 * sum(map(len, ops.values()))), layout="constrained")
    heights = [len(settings) for settings in ops.values()]
    panels = figure.subplots(len(ops), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    for axes, (op, settings) in zip(panels, ops.items(), strict=True):
        names = list(dict.fromkeys(r["row"] for rows in settings.values() for r in rows))
        width = 0.8 / len(names)
        for i, name in enumerate(names):
            y = [j + (i - (len(names) - 1) / 2) * width for j in range(len(settings))]
            values = [next((r["times_eager"] for r in rows if r["row"] == name), 0) for rows in settings.values()]
            color, hatch = COLORS.get(name.split(",")[0], "C3"), "//" if name.endswith("packed") else None
            axes.barh(y, values, width, color=color, hatch=hatch, edgecolor="white", linewidth=0.3, label=name)
        axes.axvline(1, color="black", linewidth=0.8)
        axes.set_yticks(range(len(settings)), list(settings), fontsize=8)
        axes.invert_yaxis()
        axes.set_title(f"{op}, forward + backward", fontsize=10, loc="left")
        axes.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    panels[-1].set_xlabel("times as fast as plain PyTorch")
    figure.savefig(path, dpi=110)


def main(path: Path) -> None:
    found = groups(path)
    path.with_suffix(".md").write_text(markdown(found) + "\n", encoding="utf-8")
    picture(found, path.with_suffix(".png"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
