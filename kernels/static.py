"""What the compiler makes of every kernel, without a GPU: ``python -m fastbert.kernels.static [--all] [--out DIR]``.

Compiles the calls that each kernel module declares (``static_cases()``) for each target and writes a table, Markdown
and JSON: registers, spills, shared memory, occupancy, the widest load and store found in the machine code, the bytes a
call moves against the least any implementation must move, and the time these imply. Without ``--all``: the calls that
the test suite compiles. Exits with status 1 if a kernel spills or exceeds shared memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import math
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fastbert.kernels
import triton

from . import StaticCase
from .offline import TARGETS, Launch, offline

MEMORY_BYTES_PER_S = 4.3e12
MATRIX_FLOPS_PER_S = 790e12


@dataclasses.dataclass(frozen=True)
class Limits:
    """Of one multiprocessor: 32-bit registers of a lane's file, warps, blocks, bytes of shared memory."""

    registers: int
    register_unit: int
    warps: int
    blocks: int
    shared: int
    shared_per_block: int
    shared_reserved: int  # by the system, for each block
    schedulers: int  # each holds an equal share of registers and warps


# NVIDIA: tables of compute capabilities in the CUDA C++ programming guide. AMD: CDNA3 ISA guide.
LIMITS = {
    "sm_80": Limits(2048, 8, 64, 32, 164 << 10, 163 << 10, 1 << 10, 4),
    "sm_90": Limits(2048, 8, 64, 32, 228 << 10, 227 << 10, 1 << 10, 4),
    "sm_100": Limits(2048, 8, 64, 32, 228 << 10, 227 << 10, 1 << 10, 4),
    "gfx942": Limits(2048, 8, 32, 32, 64 << 10, 64 << 10, 0, 4),
}


@dataclasses.dataclass(frozen=True)
class Code:
    """Facts of one compiled kernel."""

    registers: int
    spilled_bytes: int  # to memory; a scalar register that AMD's compiler keeps in a lane of a vector one is not
    shared_bytes: int
    num_warps: int
    occupancy: float
    widest_load: int  # bytes
    widest_store: int
    instructions: int
    fits: bool


def cases(everything: bool) -> Iterator[tuple[str, StaticCase]]:
    """(module, case) of every kernel module that declares any."""
    for info in pkgutil.iter_modules(fastbert.kernels.__path__):
        if info.name == "static":
            continue
        module = importlib.import_module(f"fastbert.kernels.{info.name}")
        for case in getattr(module, "static_cases", lambda: ())():
            if everything or case.ci:
                yield info.name, case


def occupancy(limits: Limits, registers: int, num_warps: int, shared_bytes: int) -> float:
    """Share of a multiprocessor's warps that can be resident."""
    per_warp = math.ceil(max(registers, 1) / limits.register_unit) * limits.register_unit
    warps = limits.registers // limits.schedulers // per_warp * limits.schedulers
    blocks = min(warps // num_warps, limits.warps // num_warps, limits.blocks)
    blocks = min(blocks, limits.shared // max(1, shared_bytes + limits.shared_reserved))
    return blocks * num_warps / limits.warps


def analyse(target: str, launch: Launch) -> Code:
    facts = _amd(launch) if target == "gfx942" else _nvidia(launch)
    limits, shared, num_warps = LIMITS[target], launch.compiled.metadata.shared, launch.compiled.metadata.num_warps
    return Code(
        **facts,
        shared_bytes=shared,
        num_warps=num_warps,
        occupancy=occupancy(limits, facts["registers"], num_warps, shared),
        fits=shared <= limits.shared_per_block,
    )


_SASS_WIDTHS = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}


def _sass_bytes(opcodes: list[str], names: tuple[str, ...]) -> int:
    """Most bytes that one of the instructions ``names`` moves; without a width, it is 4."""
    parts = [opcode.split(".") for opcode in opcodes]
    return max((next((_SASS_WIDTHS[x] for x in p if x in _SASS_WIDTHS), 4) for p in parts if p[0] in names), default=0)


def _nvidia(launch: Launch) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(launch.compiled.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", "-sass", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    # A stack is reserved before the code is final; what no instruction reads is none.
    touched = re.search(r"\b(?:LDL|STL)\b", text) is not None
    usage = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    opcodes = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", text)
    return {
        "registers": usage["REG"],
        "spilled_bytes": touched * (usage["STACK"] + usage["LOCAL"]),
        "widest_load": _sass_bytes(opcodes, ("LDG", "LDGSTS")),
        "widest_store": _sass_bytes(opcodes, ("STG",)),
        "instructions": sum(opcode != "NOP" for opcode in opcodes),
    }


def _amd_bytes(code: str, name: str) -> int:
    """Most bytes that a global or buffer instruction ``name`` moves: from dwordx4 to ubyte_d16."""
    found = re.findall(rf"\b(?:global|buffer)_{name}_(?:lds_)?(?:u|s)?(byte|short|dword)(?:x(\d))?", code)
    return max(({"byte": 1, "short": 2, "dword": 4}[unit] * int(count or 1) for unit, count in found), default=0)


def _amd(launch: Launch) -> dict[str, Any]:
    text = launch.compiled.asm["amdgcn"]
    facts = {name: int(value) for name, value in re.findall(r"^\s+\.(\w+):\s+(\d+)$", text, re.MULTILINE)}
    code = text[: text.index(".rodata")] if ".rodata" in text else text
    return {
        "registers": facts["vgpr_count"],
        "spilled_bytes": facts["private_segment_fixed_size"],
        "widest_load": _amd_bytes(code, "load"),
        "widest_store": _amd_bytes(code, "store"),
        "instructions": len(re.findall(r"^\t[vs]_\w+|^\t(?:global|buffer|ds|flat)_\w+", code, re.MULTILINE)),
    }


def compile_all(everything: bool, targets: list[str]) -> list[dict[str, Any]]:
    """One record per case: its launches with the code of each target, bytes, operations and the implied time."""
    found = []
    analysed: dict[tuple[str, str], Code] = {}
    for module, case in cases(everything):
        # By kernel and how often it came before: a target may take a launch that another does without.
        launches: dict[tuple[str, int], dict[str, Any]] = {}
        for target in targets:
            with offline(target) as recorded:
                case.call()
            seen: list[str] = []
            for launch in recorded:
                key = (target, launch.compiled.hash)
                if key not in analysed:
                    analysed[key] = analyse(target, launch)
                record = {"kernel": launch.name, "programs": math.prod(launch.grid), "bytes": launch.bytes_moved}
                record = launches.setdefault((launch.name, seen.count(launch.name)), record | {"code": {}})
                record["code"][target] = dataclasses.asdict(analysed[key])
                seen.append(launch.name)
        moved = sum(launch["bytes"] for launch in launches.values() if targets[0] in launch["code"])
        found.append(
            {
                "op": module,
                "case": case.name,
                "launches": list(launches.values()),
                "bytes_moved": moved,
                "bytes_least": case.bytes_least,
                "flops": case.flops,
                "integer_ops": case.integer_ops,
                "microseconds": 1e6 * max(moved / MEMORY_BYTES_PER_S, case.flops / MATRIX_FLOPS_PER_S),
            }
        )
        print(f"{module}: {case.name}", file=sys.stderr, flush=True)
    return found


def faults(records: list[dict[str, Any]]) -> list[str]:
    """Kernels that spill or do not fit, in words."""
    return [
        f"{launch['kernel']} ({record['case']}) on {target}: {code['spilled_bytes']} bytes spilled, "
        f"{code['shared_bytes']} bytes of shared memory"
        for record in records
        for launch in record["launches"]
        for target, code in launch["code"].items()
        if code["spilled_bytes"] or not code["fits"]
    ]


def markdown(records: list[dict[str, Any]], targets: list[str]) -> str:
    """The tables."""
    lines = [
        "# Triton kernels, compiled without a GPU",
        "",
        f"By `python -m fastbert.kernels.static --all`, triton {triton.__version__}. The numbers in a cell belong to "
        f"{', '.join(targets)}; - where a target does without. Occupancy: resident warps in percent. Load and store: "
        "widest instruction, bytes. Instructions: of the whole kernel, loops counted once.",
        "",
        f"Bytes: each tensor of each launch once, partial sums included; least: inputs and outputs once. Time: what "
        f"{MEMORY_BYTES_PER_S / 1e12} TB/s and {MATRIX_FLOPS_PER_S / 1e12:.0f} TFLOP/s imply, to hold a GPU run "
        "against. No figure here was measured.",
    ]
    for op in dict.fromkeys(record["op"] for record in records):
        mine = [record for record in records if record["op"] == op]
        lines += ["", f"## {op}", "", "| call | MB moved | MB least | ratio | GFLOP | integer GOP | implied µs |"]
        lines += ["|---|---:|---:|---:|---:|---:|---:|"]
        for r in mine:
            moved, least = r["bytes_moved"] / 1e6, r["bytes_least"] / 1e6
            lines.append(
                f"| {r['case']} | {moved:.2f} | {least:.2f} | {moved / least:.3f} | {r['flops'] / 1e9:.2f} "
                f"| {r['integer_ops'] / 1e9:.3f} | {r['microseconds']:.1f} |"
            )
        lines += ["", "| call | kernel | programs | warps | registers | spilled | shared | occupancy | load | store |"]
        lines[-1] += " instructions |"
        lines += ["|---|---|---:|---:|---|---|---|---|---|---|---|"]
        for r in mine:
            for launch in r["launches"]:
                codes = [launch["code"].get(target) for target in targets]

                def cell(name, codes=codes):
                    return " / ".join("-" if code is None else str(code[name]) for code in codes)

                share = " / ".join("-" if code is None else f"{100 * code['occupancy']:.0f}" for code in codes)
                lines.append(
                    f"| {r['case']} | {launch['kernel']} | {launch['programs']} | {cell('num_warps')} "
                    f"| {cell('registers')} | {cell('spilled_bytes')} | {cell('shared_bytes')} | {share} "
                    f"| {cell('widest_load')} | {cell('widest_store')} | {cell('instructions')} |"
                )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m fastbert.kernels.static", description=__doc__.split("\n")[0])
    parser.add_argument("--all", action="store_true", help="every declared call, not only those of the test suite")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--out", type=Path, help="folder for triton.md and triton.json; default: print the Markdown")
    arguments = parser.parse_args()
    records = compile_all(arguments.all, arguments.targets)
    text = markdown(records, arguments.targets)
    if arguments.out is None:
        print(text)
    else:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "triton.md").write_text(text)
        (arguments.out / "triton.json").write_text(json.dumps(records, indent=1) + "\n")
    if found := faults(records):
        sys.exit("\n".join(found))


if __name__ == "__main__":
    main()
