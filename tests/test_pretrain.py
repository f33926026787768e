import dataclasses
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise

import pytest
import torch

from fastbert import BertForPreTraining, BertModel, cli
from fastbert.data import make_loader, prepare
from fastbert.training import checkpoint
from fastbert.training.metrics import running_mean
from fastbert.training.presets import PRESETS
from fastbert.training.pretrain import PretrainConfig, Trainer, pretrain

WORDS = ("the", "cat", "sat", "on", "mat", "while", "dogs", "ran", "far", "over", "hills", "to", "find", "bones")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FASTBERT_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def corpus(tmp_path):
    """A small text of 60 paragraphs."""
    generator = torch.Generator().manual_seed(0)

    def sentence():
        picks = torch.randint(len(WORDS), (6,), generator=generator).tolist()
        return " ".join(WORDS[i] for i in picks).capitalize() + "."

    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(" ".join(sentence() for _ in range(6)) for _ in range(60)))
    return path


def config(corpus, **settings):
    return PretrainConfig(**{"corpus": str(corpus), "steps": 8, "batch_size": 32, "max_len": 24} | settings)


def lines(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_run_directory_holds_what_it_should(corpus, tmp_path):
    run = tmp_path / "run"
    summary = pretrain(config(corpus, steps=30), run)
    records = lines(run)
    assert [r["step"] for r in records] == list(range(1, 31))
    keys = {"step", "mlm_loss", "nsp_loss", "sentence_pairs_per_s", "tokens_per_s", "valid_fraction"}
    assert set(records[0]) == keys
    assert all(0 < r["valid_fraction"] <= 1 and r["tokens_per_s"] > r["sentence_pairs_per_s"] > 0 for r in records)
    assert sum(r["mlm_loss"] for r in records[-5:]) < sum(r["mlm_loss"] for r in records[:5])
    assert json.loads((run / "summary.json").read_text()) == summary
    assert summary["mlm_loss"] == pytest.approx(sum(r["mlm_loss"] for r in records) / 30)
    assert (run / "loss.png").read_bytes()[:4] == b"\x89PNG"
    model = BertModel.from_pretrained(run / "checkpoint-30")
    whole = BertForPreTraining.from_pretrained(run / "checkpoint-30")
    assert torch.equal(model.state_dict()["pooler.dense.weight"], whole.bert.pooler.dense.weight)
    assert model(torch.tensor([[3, 7, 4]])).last_hidden_state.isfinite().all()


def test_same_losses_on_every_backend(corpus, tmp_path):
    """The dropout contract makes a whole run comparable: eager and the kernels drop the same elements."""
    runs = {}
    for backend in ("eager", "cpu"):
        pretrain(config(corpus, backend=backend), tmp_path / backend)
        runs[backend] = [r["mlm_loss"] for r in lines(tmp_path / backend)]
    assert runs["cpu"] == pytest.approx(runs["eager"], rel=1e-4)


@pytest.mark.parametrize("unpad", [True, False])
def test_accumulated_batches_are_the_step_of_one_batch(corpus, unpad):
    """Losses are means over all labels and pairs of a step, however they are shared among its batches."""
    data = prepare(str(corpus), tokenizer="word", max_len=24, static_masking=True)

    def batches(size):
        return iter(make_loader(data, size, packed=unpad, pad_to_max_len=True))

    found = {}
    for size, count in ((48, 1), (16, 3)):
        torch.manual_seed(0)
        settings = config(corpus, batch_size=size, accumulate=count, unpad=unpad)
        model = PRESETS["notebook"].build(data.tokenizer.vocab_size, 24)
        model.config.hidden_dropout_prob = model.config.attention_probs_dropout_prob = 0.0
        trainer = Trainer(model, settings, torch.device("cpu"))
        losses = trainer.step(1, *itertools.islice(batches(size), count))
        found[count] = losses, [p.grad for p in model.parameters() if p.requires_grad]
    assert torch.stack(found[1][0]).tolist() == pytest.approx(torch.stack(found[3][0]).tolist(), rel=1e-5)
    for one, three in zip(found[1][1], found[3][1], strict=True):
        assert torch.allclose(one, three, rtol=1e-4, atol=1e-6)


def test_accumulation_counts_every_batch_once(corpus, tmp_path):
    """A run that is resumed, too; and what is reported is of all batches of a step."""
    settings = config(corpus, batch_size=8, accumulate=4, steps=6)
    pretrain(settings, tmp_path / "whole")
    pretrain(dataclasses.replace(settings, steps=3), tmp_path / "run")
    pretrain(settings, tmp_path / "run", resume=True)
    whole, parts = lines(tmp_path / "whole"), lines(tmp_path / "run")
    assert [r["mlm_loss"] for r in whole] == [r["mlm_loss"] for r in parts]
    assert [r["valid_fraction"] for r in whole] == [r["valid_fraction"] for r in parts]


def test_a_run_that_began_before_a_setting_existed_goes_on(corpus, tmp_path):
    settings, run = config(corpus, steps=2), tmp_path / "run"
    pretrain(settings, run)
    written = run / "config.json"
    older = {name: value for name, value in json.loads(written.read_text()).items() if name != "accumulate"}
    written.write_text(json.dumps(older))
    with pytest.raises(ValueError, match="accumulate was 1, is 2"):
        pretrain(dataclasses.replace(settings, steps=3, accumulate=2), run, resume=True)
    assert pretrain(dataclasses.replace(settings, steps=3), run, resume=True)["steps"] == 3


def test_a_filled_batch_gives_the_same_step(corpus):
    """What CUDA graphs are given: fixed numbers of tokens, sequences and labels. Dropout on."""
    data = prepare(str(corpus), tokenizer="word", max_len=24)
    capacity = data.capacity(600)
    found, sizes = {}, set()
    for filled in (False, True):
        torch.manual_seed(0)
        model = PRESETS["notebook"].build(data.tokenizer.vocab_size, 24).double()
        trainer = Trainer(model, config(corpus, batch_size=None, batch_tokens=600), torch.device("cpu"))
        found[filled] = []
        batches = make_loader(data, batch_tokens=600, packed=True, pad_to_max_len=True)
        for step, batch in enumerate(itertools.islice(batches, 3), 1):
            if filled:
                batch = batch.filled(*capacity)
                sizes.add((batch.sizes, len(batch.input_ids), len(batch.labels), batch.packing.max_seqlen))
            losses = trainer.step(step, batch)
            found[filled] += [torch.stack(losses), *(p.grad for p in model.parameters() if p.requires_grad)]
    assert sizes == {(capacity, 600, 600, 24)}
    for plain, other in zip(found[False], found[True], strict=True):
        assert torch.allclose(plain, other, rtol=1e-9, atol=1e-12)


def test_a_batch_that_does_not_fit_is_not_filled(corpus):
    data = prepare(str(corpus), tokenizer="word", max_len=24)
    batch = next(iter(make_loader(data, batch_tokens=600, packed=True, pad_to_max_len=True)))
    tokens, sequences, labels = batch.sizes
    for sizes in ((tokens - 1, 99, 999), (tokens, sequences - 1, labels), (tokens, sequences, labels - 1)):
        with pytest.raises(ValueError, match="does not fit"):
            batch.filled(*sizes)
    with pytest.raises(ValueError, match="does not fit"):  # as many tokens more need two sequences more
        batch.filled(tokens + 25, sequences + 1, labels)
    assert batch.filled(tokens + 25, sequences + 2, labels).packing.cu_seqlens[-1] == tokens + 25


def test_cuda_graphs_need_what_they_need(corpus):
    for settings in ({}, {"batch_tokens": 600, "unpad": False}, {"batch_tokens": 600, "accumulate": 2}):
        with pytest.raises(ValueError, match="cuda_graphs is True"):
            config(corpus, **{"batch_size": None} | settings, cuda_graphs=True)
    model = PRESETS["notebook"].build(100, 24)
    settings = config(corpus, batch_size=None, batch_tokens=600, cuda_graphs=True)
    with pytest.raises(ValueError, match="a CUDA device is needed"):
        Trainer(model, settings, torch.device("cpu"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_a_captured_step_trains_as_any_other(corpus, tmp_path, dtype):
    runs = {}
    for graphs in (False, True):
        settings = config(corpus, batch_size=None, batch_tokens=600, cuda_graphs=graphs, steps=12, dtype=dtype)
        pretrain(settings, tmp_path / str(graphs))
        runs[graphs] = [r["mlm_loss"] for r in lines(tmp_path / str(graphs))]
    assert runs[True] == pytest.approx(runs[False], rel=1e-2)


def test_padding_kept_or_dropped_is_the_same_training(corpus, tmp_path):
    runs = {}
    for unpad in (True, False):
        pretrain(config(corpus, unpad=unpad), tmp_path / str(unpad))
        runs[unpad] = [r["mlm_loss"] for r in lines(tmp_path / str(unpad))]
    assert runs[True] == pytest.approx(runs[False], rel=1e-4)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_sixteen_bit_runs_follow_float32(corpus, tmp_path, dtype):
    runs = {}
    for name in ("fp32", dtype):
        pretrain(config(corpus, dtype=name), tmp_path / name)
        runs[name] = [r["mlm_loss"] for r in lines(tmp_path / name)]
    # The loss scale of float16 starts too high and costs the first step or two.
    assert runs[dtype] == pytest.approx(runs["fp32"], rel=1e-2 if dtype == "bf16" else 8e-2)
    assert runs[dtype] != runs["fp32"]


def test_bert_preset_with_word_pieces(corpus, tmp_path):
    settings = {"preset": "bert-mini", "steps": 4, "batch_size": 8, "max_len": None}
    summary = pretrain(config(corpus, **settings), tmp_path / "run")
    assert summary["learning_rate"] == 5e-4 and summary["tokenizer"] == "wordpiece" and summary["max_len"] == 128


def test_notebook_preset_is_the_notebooks_model():
    from fastbert.training.presets import PRESETS

    torch.manual_seed(0)
    model = PRESETS["notebook"].build(4271, 64)
    c = model.config
    sizes = (c.hidden_size, c.intermediate_size, c.num_attention_heads, c.num_hidden_layers, c.hidden_dropout_prob)
    assert sizes == (128, 256, 2, 2, 0.2)
    assert (c.hidden_act, c.layer_norm_eps, c.embedding_layer_norm) == ("relu", 1e-5, False)
    positions = model.bert.embeddings.position_embeddings.weight
    assert positions.shape == (1000, 128) and not positions.requires_grad and abs(positions.std() - 1) < 0.02
    assert abs(model.bert.embeddings.word_embeddings.weight.std() - 1) < 0.02
    (group, biases) = PRESETS["notebook"].optimizer(model, 1e-3).param_groups
    assert group["lr"] == 1e-3 and group["weight_decay"] == biases["weight_decay"] == 0 and group["eps"] == 1e-8
    tensors = sum(len(g["params"]) for g in (group, biases))
    assert tensors == sum(p.requires_grad for p in model.parameters())


def test_resume_gives_the_numbers_of_an_uninterrupted_run(corpus, tmp_path):
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    pretrain(config(corpus, steps=10), whole)
    pretrain(config(corpus, steps=6), halves)
    pretrain(config(corpus, steps=10), halves, resume=True)
    assert [r["mlm_loss"] for r in lines(halves)] == [r["mlm_loss"] for r in lines(whole)]
    a, b = (BertModel.from_pretrained(run / "checkpoint-10").state_dict() for run in (whole, halves))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_killed_run_resumes(corpus, tmp_path):
    """kill -9 while it trains and saves: what is on disk is complete, and the run goes on from there."""
    run = tmp_path / "run"
    arguments = ["--corpus", str(corpus), "--batch-size", "32", "--max-len", "24", "--save-every", "2"]
    command = [sys.executable, "-m", "fastbert.cli", "pretrain", *arguments, "--steps", "2000", "--out", str(run)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while checkpoint.latest(run) is None or int(checkpoint.latest(run).name.rpartition("-")[2]) < 6:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.01)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    saved = checkpoint.latest(run)
    step = checkpoint.load_state(saved)["step"]
    BertForPreTraining.from_pretrained(saved)
    pretrain(config(corpus, steps=step + 3), run, resume=True)
    assert [r["step"] for r in lines(run)] == list(range(1, step + 4))


def test_a_torn_save_is_never_read(corpus, tmp_path):
    run = tmp_path / "run"
    pretrain(config(corpus, steps=3), run)
    torn = run / "checkpoint-5.tmp"
    torn.mkdir()
    (torn / "model.safetensors").write_bytes(b"half")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "mlm_l')
    assert checkpoint.latest(run).name == "checkpoint-3"
    pretrain(config(corpus, steps=5), run, resume=True)
    assert [r["step"] for r in lines(run)] == [1, 2, 3, 4, 5] and not torn.exists()


def test_only_the_newest_checkpoints_stay(corpus, tmp_path):
    pretrain(config(corpus, steps=7, save_every=2), tmp_path / "run")
    assert sorted(p.name for p in (tmp_path / "run").glob("checkpoint-*")) == ["checkpoint-6", "checkpoint-7"]


def test_learning_rate_rises_and_falls(corpus):
    from fastbert.training.presets import PRESETS
    from fastbert.training.pretrain import Trainer

    settings = config(corpus, preset="bert-mini", steps=100, batch_size=None, max_len=None)
    trainer = Trainer(PRESETS["bert-mini"].build(50, 24), settings, torch.device("cpu"))
    rates = [trainer.learning_rate(step) / 5e-4 for step in range(1, 101)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == 1.0 and max(rates) == 1.0
    assert rates[99] == pytest.approx(1 / 91) and all(a > b for a, b in pairwise(rates[9:]))


def test_running_mean():
    assert running_mean([4.0, 2.0]) == [4.0, 2.0]
    values = [float(i) for i in range(30)]
    assert running_mean(values)[:4] == [0.0, 0.5, 1.0, 2.0] and running_mean(values)[-1] == 28.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "missing.txt"),
        (b"", "empty"),
        (b"one sentence only.", "two sentences"),
        (b"fine. and fine.\n\n\xff\xfe broken", "UTF-8"),
    ],
    ids=["missing", "empty", "too short", "not UTF-8"],
)
def test_a_bad_corpus_is_one_clear_line(tmp_path, capsys, text, message):
    path = tmp_path / "missing.txt"
    if text is not None:
        path.write_bytes(text)
    assert cli.main(["pretrain", "--corpus", str(path), "--out", str(tmp_path / "run")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("fastbert: error: ") and message in error and "Traceback" not in error
    assert error.count("\n") == 1
    path.write_text("\n\n".join(f"A cat sat on mat {i}. A dog ran far." for i in range(8)))
    again = ["pretrain", "--corpus", str(path), "--out", str(tmp_path / "run"), "--steps", "1", "--batch-size", "2"]
    assert cli.main(again) == 0


def test_an_unwritable_run_directory_is_one_clear_line(corpus, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert cli.main(["pretrain", "--corpus", str(corpus), "--out", str(tmp_path / "file" / "run")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("fastbert: error: out is ") and "cannot be written: Not a directory" in error


def test_another_run_is_never_overwritten(corpus, tmp_path, capsys):
    run = tmp_path / "run"
    pretrain(config(corpus, steps=2), run)
    before = (run / "metrics.jsonl").read_bytes()
    arguments = ["pretrain", "--corpus", str(corpus), "--out", str(run), "--batch-size", "32", "--max-len", "24"]
    assert cli.main(arguments) == 1
    assert "is not empty; pass --resume" in capsys.readouterr().err
    assert cli.main([*arguments, "--resume", "--seed", "5"]) == 1
    assert "a run with other settings: seed was 0, is 5" in capsys.readouterr().err
    assert (run / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--preset", "bert-tiny", "preset is 'bert-tiny'; accepted are notebook, bert-mini"),
        ("--dtype", "fp8", "dtype is 'fp8'; accepted are fp32, bf16, fp16"),
        ("--steps", "0", "steps is 0; 1 or more is accepted"),
        ("--batch-size", "-1", "batch_size is -1"),
        ("--learning-rate", "0", "learning_rate is 0.0; a number above 0"),
        ("--backend", "cuda", "no backend serves this call"),
    ],
)
def test_bad_options_are_one_clear_line(corpus, tmp_path, capsys, option, value, message):
    assert cli.main(["pretrain", "--corpus", str(corpus), "--out", str(tmp_path / "run"), option, value]) == 1
    assert message in capsys.readouterr().err


def test_info_runs(capsys):
    assert cli.main(["info"]) == 0
    assert "attention" in capsys.readouterr().out
