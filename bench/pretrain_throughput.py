"""Full pretraining steps, data to optimizer, of this package and its peers, in turns on the same batches.

    python bench/pretrain_throughput.py --layers 4 --batch-size 16 --max-len 128 --dtype fp32

Each contender lives in a process of its own (so that its peak memory is its own) and takes a step when it is told to,
one contender at a time. All see the same batches; fastbert and Hugging Face start from the same parameters. The floor
is the step's matrix products alone, on valid tokens only, through torch.mm.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import platform
import resource
import statistics
import time
from pathlib import Path

import torch

from fastbert.bert import BertConfig, BertForPreTraining
from fastbert.data import make_loader, prepare
from fastbert.ops.registry import BACKENDS
from fastbert.training.presets import PRESETS
from fastbert.training.pretrain import DTYPES, PretrainConfig, Trainer

ROWS = (
    "floor",
    "fastbert",
    "fastbert, padded",
    *(f"fastbert, {name} backend" for name in BACKENDS),
    "notebook eager",
    "hf eager",
    "hf sdpa",
    "hf sdpa + compile",
    "hf flash_attention_2",  # a GPU, 16 bits, and flash-attn installed
)


def model_config(args: argparse.Namespace, vocab_size: int) -> BertConfig:
    config = PRESETS[args.preset].config(vocab_size, args.max_len)
    return dataclasses.replace(config, num_hidden_layers=args.layers) if args.layers else config


def load(args: argparse.Namespace):
    preset = PRESETS[args.preset]
    tokenizer = args.tokenizer or preset.tokenizer
    return prepare(args.corpus, tokenizer=tokenizer, max_len=args.max_len, static_masking=preset.static_masking)


class Contender:
    """Makes the model and takes steps; subclasses say how."""

    def __init__(self, args: argparse.Namespace, row: str):
        self.args = args
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        data = load(args)
        self.vocab_size = data.tokenizer.vocab_size
        # fastbert's batches leave the loader packed: the same examples, without their padding
        packed = isinstance(self, Fastbert) and not row.endswith("padded")
        self.loader = make_loader(
            data, args.batch_size, packed=packed, drop_last=True, pad_to_max_len=args.pad_to_max_len
        )
        torch.manual_seed(0)
        config = model_config(args, self.vocab_size)
        model = BertForPreTraining(config)
        if PRESETS[args.preset].torch_initialization:
            model = PRESETS[args.preset].build(self.vocab_size, args.max_len)
        self.prepare(model, row)

    def autocast(self):
        return torch.autocast(self.device.type, DTYPES[self.args.dtype], enabled=self.args.dtype != "fp32")

    def steps(self):
        """Yields after each step: seconds, losses, valid tokens, sentence pairs."""
        for number, batch in enumerate(self.loader, 1):
            start = time.perf_counter()
            losses = self.step(number, batch.to(self.device))
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - start
            yield seconds, [float(loss) for loss in losses], batch.valid_tokens, batch.packing.batch


class Fastbert(Contender):
    def prepare(self, model, row):
        settings = PretrainConfig(
            preset=self.args.preset,
            steps=10_000,
            batch_size=self.args.batch_size,
            max_len=self.args.max_len,
            dtype=self.args.dtype,
            backend=row.split()[1] if row.endswith("backend") else None,
            unpad=not row.endswith("padded"),
        )
        self.trainer = Trainer(model, settings, self.device)

    def step(self, number, batch):
        return self.trainer.step(number, batch)


class HuggingFace(Contender):
    def prepare(self, model, row):
        import transformers

        config = model_config(self.args, self.vocab_size)
        settings = {k: v for k, v in config.to_dict().items() if k in transformers.BertConfig().to_dict()}
        implementation = row.split()[1]
        peer = transformers.BertForPreTraining(transformers.BertConfig(**settings, attn_implementation=implementation))
        missing, unexpected = peer.load_state_dict(model.state_dict(), strict=False)
        assert not unexpected and set(missing) <= {"cls.predictions.decoder.bias"}, (missing, unexpected)
        self.model = peer.to(self.device).train()
        preset = PRESETS[self.args.preset]
        self.optimizer = preset.optimizer(self.model, preset.learning_rate)
        self.forward = torch.compile(self.model) if row.endswith("compile") else self.model

    def step(self, number, batch):
        for group in self.optimizer.param_groups:  # the same warm-up as fastbert's: 1,000 of 10,000 steps
            group["lr"] = PRESETS[self.args.preset].learning_rate * number / 1000
        self.optimizer.zero_grad(set_to_none=True)
        with self.autocast():
            output = self.forward(
                input_ids=batch.input_ids,
                attention_mask=batch.attention_mask,
                token_type_ids=batch.token_type_ids,
                labels=batch.labels,
                next_sentence_label=batch.next_sentence_label,
            )
        output.loss.backward()
        self.optimizer.step()
        return (output.loss.detach(),)


class Notebook(Contender):
    def prepare(self, model, row):
        from plain import NotebookBert

        torch.manual_seed(0)
        self.model = NotebookBert(self.vocab_size).to(self.device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)

    def step(self, number, batch):
        slots = round(self.args.max_len * 0.15)
        chosen = (batch.labels != -100).int().topk(min(slots, batch.labels.shape[1]), dim=1)
        labels = batch.labels.gather(1, chosen.indices)
        self.optimizer.zero_grad()
        with self.autocast():
            losses = self.model(
                batch.input_ids,
                batch.token_type_ids,
                batch.attention_mask.sum(1),
                chosen.indices,
                labels,
                batch.next_sentence_label,
            )
        sum(losses).backward()
        self.optimizer.step()
        return losses


class Floor(Contender):
    """The products of a step: each linear layer's output, input gradient and weight gradient, and attention's."""

    def prepare(self, model, row):
        self.config = model.config

    def step(self, number, batch):
        c = self.config
        tokens = batch.valid_tokens
        labelled = int((batch.labels != -100).sum())
        hidden, wide = c.hidden_size, c.intermediate_size
        layer = [(tokens, hidden, 3 * hidden), (tokens, hidden, hidden), (tokens, hidden, wide), (tokens, wide, hidden)]
        head = [
            (labelled, hidden, hidden),
            (labelled, hidden, c.vocab_size),
            (batch.input_ids.shape[0], hidden, hidden),
        ]
        lengths = batch.attention_mask.sum(1).tolist()
        for shapes, times in ((layer, c.num_hidden_layers), (head, 1)):
            for n, k, m in shapes:
                x, w, y = self.random(n, k), self.random(m, k), self.random(n, m)
                for _ in range(times):
                    x @ w.t()
                    y @ w
                    y.t() @ x
        for length in lengths:
            q = self.random(c.num_attention_heads, length, c.head_size)
            p = self.random(c.num_attention_heads, length, length)
            for _ in range(c.num_hidden_layers):
                for _ in range(2):
                    q @ q.transpose(1, 2)  # q k^T and do v^T
                for _ in range(2):
                    p @ q  # p v and ds k
                    p.transpose(1, 2) @ q  # p^T do and ds^T q
        return ()

    def random(self, *shape):
        """Made once for each shape, so that the floor times products and nothing else."""
        cache = self.__dict__.setdefault("cache", {})
        if shape not in cache:
            cache[shape] = torch.randn(shape, device=self.device, dtype=DTYPES[self.args.dtype])
        return cache[shape]


KINDS = {"floor": Floor, "fastbert": Fastbert, "notebook": Notebook, "hf": HuggingFace}


def serve(args: argparse.Namespace, row: str, pipe) -> None:
    """A contender's process: one step each time the parent asks, its peak memory at the end."""
    torch.set_num_threads(args.threads)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    steps = KINDS[row.replace(",", " ").split()[0]](args, row).steps()
    pipe.send("ready")
    while pipe.recv() == "step":
        pipe.send(next(steps))
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated()
    else:
        peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    pipe.send(peak)


def run(args: argparse.Namespace) -> list[dict]:
    context = multiprocessing.get_context("spawn")
    children = {}
    for row in args.rows:
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(args, row, theirs), daemon=True)
        process.start()
        assert ours.recv() == "ready"
        children[row] = (process, ours)
    found = {row: [] for row in args.rows}
    for number in range(args.warmup + args.steps):
        for row, (_, pipe) in children.items():
            pipe.send("step")
            result = pipe.recv()
            if number >= args.warmup:
                found[row].append(result)
    table = []
    for row, (process, pipe) in children.items():
        pipe.send("stop")
        peak = pipe.recv()
        process.join()
        seconds, losses, tokens, pairs = zip(*found[row], strict=True)
        total = sum(seconds)
        table.append(
            {
                "row": row,
                "step_s": statistics.median(seconds),
                "valid_tokens_per_s": sum(tokens) / total,
                "sentence_pairs_per_s": sum(pairs) / total,
                "loss": [statistics.mean(column) for column in zip(*losses, strict=True)] if losses[0] else None,
                "peak_memory_gib": peak / 2**30,
                "seconds": seconds,
            }
        )
    steps = {r["row"]: r["seconds"] for r in table}
    for r in table:
        # Ratios step by step, of the same batch: the median is robust against a machine that is not ours alone.
        for name in ("floor", "fastbert"):
            if name in steps:
                r[f"over_{name}"] = statistics.median(a / b for a, b in zip(r["seconds"], steps[name], strict=True))
    return table


def markdown(args: argparse.Namespace, table: list[dict]) -> str:
    layers = args.layers or model_config(args, 10).num_hidden_layers
    lines = [
        f"{args.preset}, {layers} layers, batch {args.batch_size} x {args.max_len}, {args.dtype}, "
        f"{args.steps} steps in turns, {args.threads} threads",
        "",
        "| | step, s | valid tokens/s | pairs/s | times fastbert | times floor | loss | peak memory, GiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in table:
        loss = "" if r["loss"] is None else f"{sum(r['loss']):.3f}"
        ratios = [f"{r[k]:.2f}" if k in r else "" for k in ("over_fastbert", "over_floor")]
        lines.append(
            f"| {r['row']} | {r['step_s']:.3f} | {r['valid_tokens_per_s']:,.0f} | {r['sentence_pairs_per_s']:,.1f} | "
            f"{ratios[0]} | {ratios[1]} | {loss} | {r['peak_memory_gib']:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", default="builtin")
    parser.add_argument("--tokenizer", help="word, wordpiece or a vocab.txt (the preset's)")
    parser.add_argument("--preset", default="bert-base", choices=PRESETS)
    parser.add_argument("--layers", type=int, help="encoder layers (the preset's)")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--max-len", type=int, default=128)
    parser.add_argument("--dtype", default="fp32", choices=DTYPES)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--pad-to-max-len", action="store_true", help="pad to --max-len, not the batch's longest")
    parser.add_argument("--rows", nargs="+", default=None, choices=ROWS, metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--out", type=Path, help="write the results here as JSON too")
    args = parser.parse_args()
    if args.rows is None:
        peers = ("notebook eager",) if args.preset == "notebook" else ("hf eager", "hf sdpa", "hf sdpa + compile")
        args.rows = ["floor", "fastbert", "fastbert, eager backend", *peers]
    load(args)  # into the cache, before the contenders look for it
    table = run(args)
    print(markdown(args, table))
    if args.out:
        settings = {k: Path(v).name if k in ("corpus", "tokenizer") and v else str(v) for k, v in vars(args).items()}
        del settings["out"]
        machine = {"machine": platform.processor() or platform.machine(), "torch": torch.__version__}
        args.out.write_text(json.dumps({**machine, "settings": settings, "rows": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
