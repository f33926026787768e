"""The command line: ``fastbert pretrain``, ``fastbert bench``, ``fastbert info``."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from . import info
from .ops import triton
from .ops.registry import BACKENDS


def _pretrain(arguments: argparse.Namespace) -> None:
    from .training.pretrain import PretrainConfig, pretrain

    settings = vars(arguments)
    del settings["run"]
    out, resume = settings.pop("out"), settings.pop("resume")
    if out is None:
        if resume:
            raise ValueError("--resume needs --out DIR, the run to go on with")
        out = Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{settings['preset']}"
    pretrain(PretrainConfig(**settings), out, resume=resume)


def _bench(arguments: argparse.Namespace) -> None:
    """Run the op benchmarks of the checkout this package was installed from."""
    if arguments.tune:
        _tune()
        return
    folder = Path(__file__).resolve().parent.parent / "bench"
    if not folder.is_dir():
        raise ValueError(f"there are no benchmarks in {folder}; they are part of a source checkout (make bench)")
    out = Path(arguments.out or folder / "results" / info.machine() / f"{time.strftime('%Y-%m-%d')}.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    chosen = ["-k", arguments.select] if arguments.select else []
    command = ["-m", "pytest", str(folder), "-c", str(folder.parent / "pyproject.toml"), f"--benchmark-json={out}"]
    finished = subprocess.run([sys.executable, *command, *chosen], cwd=folder)
    if finished.returncode:
        raise ValueError(f"pytest ended with status {finished.returncode}")
    subprocess.run([sys.executable, str(folder / "report.py"), str(out)], check=True)
    print(f"results in {out}, {out.with_suffix('.md').name} and {out.with_suffix('.png').name}")


def _tune() -> None:
    """Print better tables of Triton's configurations, ready to be pasted into ``kernels/``."""
    if reason := triton.unavailable() or (triton.INTERPRETED and "Triton interprets (TRITON_INTERPRET=1)"):
        raise ValueError(f"--tune measures Triton's kernels on a GPU: {reason}")
    from .kernels.tune import tune

    for op, tables in tune().items():
        for table, configs in tables.items():
            entries = "".join(f"    {config},\n" for config in configs)
            print(f"\n# kernels/{op}.py\n{table} = (\n{entries})")


def _info(arguments: argparse.Namespace) -> None:
    print(info.report())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fastbert", description="Kernels that make BERT-style encoders train faster.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser(
        "pretrain",
        help="pretrain a BERT from text",
        description="Pretrain a BERT from text: masked tokens and next sentences. Writes a run directory.",
    )
    command.set_defaults(run=_pretrain)
    command.add_argument("--corpus", default="builtin", metavar="builtin|PATH", help="a file, a directory, or builtin")
    command.add_argument("--preset", default="notebook", help="notebook, bert-mini, bert-small, bert-base, bert-large")
    command.add_argument("--steps", type=int, default=100, metavar="N", help="optimizer steps (100)")
    command.add_argument("--batch-size", type=int, metavar="N", help="sentence pairs a step (the preset's)")
    command.add_argument("--batch-tokens", type=int, metavar="N", help="or tokens that are not padding a step, at most")
    command.add_argument("--accumulate", type=int, default=1, metavar="N", help="batches that make up a step (1)")
    command.add_argument("--max-len", type=int, metavar="N", help="tokens of an example at most (the preset's)")
    command.add_argument("--tokenizer", metavar="T", help="word, wordpiece, a vocab.txt or a saved one (the preset's)")
    command.add_argument("--learning-rate", type=float, metavar="X", help="at its highest (the preset's)")
    command.add_argument("--backend", choices=BACKENDS, help="of every op (the best for the inputs)")
    command.add_argument("--dtype", default="fp32", help="fp32, bf16 or fp16 (fp32)")
    command.add_argument("--device", metavar="D", help="cpu, cuda, cuda:1 (a GPU if there is one)")
    command.add_argument("--seed", type=int, default=0, metavar="N", help="of data, parameters and dropout (0)")
    command.add_argument("--out", metavar="DIR", help="the run's directory (runs/<time>-<preset>)")
    command.add_argument("--save-every", type=int, metavar="N", help="steps between checkpoints (only the last)")
    command.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in --out")
    command.add_argument("--no-unpad", dest="unpad", action="store_false", help="keep padding in the batch")
    command.add_argument("--compile", action="store_true", help="run the model through torch.compile")
    command.add_argument("--cuda-graphs", action="store_true", help="capture the step; needs --batch-tokens and a GPU")

    command = commands.add_parser("bench", help="time the ops beside plain PyTorch and its peers (in a checkout)")
    command.set_defaults(run=_bench)
    command.add_argument("--out", metavar="FILE", help="JSON (bench/results/<machine>/<date>.json)")
    command.add_argument("--select", metavar="EXPRESSION", help="which benchmarks, as pytest -k has it")
    command.add_argument("--tune", action="store_true", help="measure Triton's configurations on the GPU at hand")

    command = commands.add_parser("info", help="versions, instruction set, and the state of every backend of every op")
    command.set_defaults(run=_info)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status. What a user can mend is one line on stderr, not a traceback."""
    arguments = _parser().parse_args(argv)
    try:
        arguments.run(arguments)
    except (ValueError, OSError, NotImplementedError) as error:
        message = f"{error.strerror}" if isinstance(error, OSError) and error.strerror else str(error)
        print(f"fastbert: error: {message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
