"""The model: masks, packing, dropout, losses, checkpoints. Numbers against foreign systems: test_adapters.py."""

import copy
import dataclasses
import json
from unittest import mock

import pytest
import safetensors.torch
import torch
from preferred import preferred
from torch import nn

import fastbert
from fastbert import (
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    BertForSequenceClassification,
    BertLayer,
    BertModel,
)
from fastbert.bert import ACTIVATIONS, BertEmbeddings, BertPreTrainedModel
from fastbert.ops import Packing

CONFIG = BertConfig(
    vocab_size=97,
    hidden_size=24,
    num_hidden_layers=3,
    num_attention_heads=3,
    intermediate_size=40,
    max_position_embeddings=32,
    hidden_dropout_prob=0.2,
    attention_probs_dropout_prob=0.3,
)
NO_DROPOUT = dataclasses.replace(CONFIG, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
B, S = 5, 17


def precision(backend):
    """dtype, tolerance and device of the numerical comparisons: float64 where the backend has it."""
    if backend in ("eager", "cpu"):
        return torch.float64, 1e-10, "cpu"
    return torch.float32, 1e-4, "cuda" if torch.cuda.is_available() else "cpu"


def build(cls, config=CONFIG, dtype=torch.float64, device="cpu"):
    """A model whose weights are large enough for masks and positions to matter."""
    model = cls(config).to(device, dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape).to(parameter) * 0.15)
    return model


def masks():
    right = torch.arange(S) < torch.tensor([S, 3, 1, 11, 16])[:, None]
    holes = torch.rand(B, S) < 0.6
    holes[:, 4] = True
    return {"right": right, "left": right.flip(1), "holes": holes}


def inputs(on, device="cpu"):
    """Ids and labels of a pretraining step; labels on real tokens alone, id 0 among them."""
    ids = torch.randint(1, CONFIG.vocab_size, (B, S))
    labels = torch.where((torch.rand(B, S) < 0.3) & on, torch.randint(0, CONFIG.vocab_size, (B, S)), -100)
    labels[0, on[0].nonzero()[0]] = 0
    given = {"input_ids": ids, "token_type_ids": torch.randint(0, 2, (B, S))}
    wanted = {"labels": labels, "next_sentence_label": torch.randint(0, 2, (B,))}
    return tuple({k: v.to(device) for k, v in d.items()} for d in (given, wanted))


def step(model, given, seed=3):
    """Loss and gradients of one step, its dropout seeds drawn from generator state ``seed``."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    output = model(**given)
    output.loss.backward()
    return output, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_step(first, second, tolerance):
    for name in ("loss", "mlm_loss", "nsp_loss"):
        torch.testing.assert_close(first[0][name], second[0][name], rtol=tolerance, atol=tolerance)
    assert first[1].keys() == second[1].keys()
    scale = max(g.abs().max() for g in first[1].values())
    for name, gradient in first[1].items():
        difference = (gradient - second[1][name]).abs().max()
        assert difference <= tolerance * scale, f"{name}: {difference:.2e} of {scale:.2e}"


# Masks and packing


@pytest.mark.parametrize("form", ["mask", "packing", "packed ids"])
def test_packed_step_is_the_padded_step(backend, form):
    """With dropout on everywhere: the same elements fall, so loss and every gradient agree."""
    dtype, tolerance, device = precision(backend)
    on = masks()["right"].to(device)
    # The CUDA kernels take heads of 32 elements.
    config = dataclasses.replace(CONFIG, hidden_size=96) if backend.startswith("cuda") else CONFIG
    model = build(BertForPreTraining, config, dtype, device).train()
    given, wanted = inputs(on.cpu(), device)
    with preferred(backend):
        model.unpad = False
        padded = step(model, {**given, **wanted, "attention_mask": on})
        model.unpad = True
        if form == "mask":
            given["attention_mask"] = on
        else:
            given["packing"] = Packing.from_lengths(on.sum(1), S)
            if form == "packed ids":
                given |= {k: v[on] for k, v in given.items() if k != "packing"}
                wanted["labels"] = wanted["labels"][on]
        packed = step(model, given | wanted)
    assert_same_step(padded, packed, tolerance)
    assert padded[1].keys() == dict(model.named_parameters()).keys()


@pytest.mark.parametrize("pattern", ["right", "left", "holes"])
def test_packed_is_padded_for_any_pattern(backend, pattern):
    """Fault 11. Hidden dropout stays on; places within attention count from each sequence's first token."""
    dtype, tolerance, device = precision(backend)
    config = dataclasses.replace(CONFIG, attention_probs_dropout_prob=0.0)
    model = build(BertForPreTraining, config, dtype, device).train()
    on = masks()[pattern].to(device)
    given, wanted = inputs(on.cpu(), device)
    given["attention_mask"] = on
    with preferred(backend):
        packed = step(model, given | wanted)
        model.unpad = False
        padded = step(model, given | wanted)
    assert_same_step(padded, packed, tolerance)


@pytest.mark.parametrize("pattern", ["right", "left", "holes"])
def test_hidden_states_depend_on_real_tokens_alone(pattern):
    model = build(BertModel).eval()
    on = masks()[pattern]
    given, _ = inputs(on)
    packed = model(**given, attention_mask=on)
    given["input_ids"] = torch.where(on, given["input_ids"], 5)
    model.unpad = False
    padded = model(**given, attention_mask=on)
    torch.testing.assert_close(packed.last_hidden_state[on], padded.last_hidden_state[on], rtol=0, atol=1e-12)
    torch.testing.assert_close(packed["pooler_output"], padded["pooler_output"], rtol=0, atol=1e-12)
    assert not packed.last_hidden_state[~on].any()
    first = padded.last_hidden_state[torch.arange(B), on.int().argmax(1)]
    torch.testing.assert_close(padded.pooler_output, model.pooler(first))
    alone = model(
        given["input_ids"][3:4, on[3]],
        position_ids=on[3].nonzero().T,
        token_type_ids=given["token_type_ids"][3:4, on[3]],
    )
    torch.testing.assert_close(alone.last_hidden_state[0], packed.last_hidden_state[3, on[3]], rtol=0, atol=1e-12)


@pytest.mark.parametrize("pattern", ["right", "holes"])
def test_mask_forms_agree(backend, pattern):
    """Faults 12 and 13: 1 and True mean attend, an additive mask is added, a packing is the same again."""
    dtype, tolerance, device = precision(backend)
    on = masks()[pattern].to(device)
    layer = build(BertLayer, dtype=dtype, device=device).eval()
    x = torch.randn(B, S, CONFIG.hidden_size, dtype=dtype, device=device)
    additive = torch.zeros(B, 1, 1, S, dtype=dtype, device=device).masked_fill(~on[:, None, None], float("-inf"))
    finite = additive.clamp(min=-1e6)
    per_query = on[:, None, :].expand(B, S, S)
    with preferred(backend):
        expected = layer(x, on)
        for mask in (on.long(), on.int(), on.byte(), on[:, None, None], additive, finite, per_query, per_query.int()):
            torch.testing.assert_close(layer(x, mask), expected, rtol=0, atol=tolerance)
        packed, packing = fastbert.ops.unpad(x, on)
        torch.testing.assert_close(layer(packed, packing), expected[on], rtol=0, atol=tolerance)
        changed = torch.where(on[..., None], x, x + 1)
        torch.testing.assert_close(layer(changed, on)[on], expected[on], rtol=0, atol=tolerance)
        assert (layer(x, ~on) - expected).abs().max() > 0.01
        torch.testing.assert_close(layer(x), layer(x, torch.ones_like(on)), rtol=0, atol=tolerance)


@pytest.mark.parametrize("module", ["layer", "model", "model without unpadding"])
def test_ambiguous_masks_are_refused(module):
    """Fault 13: a floating [B, S] mask may be 0/1 or additive; integers in four dimensions may be either too."""
    model = build(BertModel).eval()
    model.unpad = module == "model"
    given = torch.randn(B, S, 24, dtype=torch.float64) if module == "layer" else torch.zeros(B, S, dtype=torch.int64)
    called = build(BertLayer) if module == "layer" else model
    for dtype in (torch.float32, torch.float64, torch.float16):
        with pytest.raises(TypeError, match=r"attention_mask is torch.float.. of shape \(5, 17\).*pass mask.bool\(\)"):
            called(given, torch.ones(B, S, dtype=dtype))
    with pytest.raises(TypeError, match=r"attention_mask is torch.int64 of shape \(5, 1, 1, 17\).*0/1 or additive"):
        called(given, torch.ones(B, 1, 1, S, dtype=torch.int64))
    for shape in ((B, S + 1), (S,), (B, 1, 1, S - 1), (B + 1, 1, 1, S)):
        with pytest.raises(ValueError, match=r"attention_mask is torch.bool of shape .*; accepted are"):
            called(given, torch.ones(shape, dtype=torch.bool))


def test_the_batch_is_packed_once(monkeypatch):
    """Fault 17: once a forward, not at all with a packing; padded again once, or never where rows are enough."""
    counts = {"pack": 0, "pad": 0}
    build_packing, pad = Packing._build.__func__, fastbert.bert.pad

    def counting_build(*args):
        counts["pack"] += 1
        return build_packing(*args)

    def counting_pad(*args):
        counts["pad"] += 1
        return pad(*args)

    on = masks()["right"]
    packing = Packing.from_mask(on)
    given, wanted = inputs(on)
    monkeypatch.setattr(Packing, "_build", classmethod(counting_build))
    monkeypatch.setattr(fastbert.bert, "pad", counting_pad)
    for cls, labels, padded in (
        (BertModel, {}, 1),
        (BertForPreTraining, wanted, 0),
        (BertForPreTraining, {}, 1),
        (BertForSequenceClassification, {"labels": wanted["next_sentence_label"]}, 0),
    ):
        model = build(cls)
        for mask, packed in (({"attention_mask": on}, 1), ({"packing": packing}, 0)):
            counts.update(pack=0, pad=0)
            model(**given, **mask, **labels)
            assert counts == {"pack": packed, "pad": padded}, cls.__name__


def test_every_layer_works_on_packed_tokens(monkeypatch):
    on = masks()["holes"]
    shapes = []
    forward = BertLayer.forward
    monkeypatch.setattr(
        BertLayer, "forward", lambda self, x, *args: shapes.append(tuple(x.shape)) or forward(self, x, *args)
    )
    given, wanted = inputs(on)
    build(BertForPreTraining)(**given, **wanted, attention_mask=on)
    assert shapes == [(int(on.sum()), CONFIG.hidden_size)] * CONFIG.num_hidden_layers


def test_sequences_without_tokens():
    """They give zeros to the pooler, packed and padded, and nothing anywhere is NaN."""
    on = masks()["right"].clone()
    on[1] = on[4] = False
    model = build(BertForPreTraining).train()
    given, wanted = inputs(masks()["right"])
    wanted["labels"] = wanted["labels"].masked_fill(~on, -100)
    packed = step(model, {**given, **wanted, "attention_mask": on})
    model.unpad = False
    assert_same_step(step(model, {**given, **wanted, "attention_mask": on}), packed, 1e-10)
    assert all(gradient.isfinite().all() for gradient in packed[1].values())
    model = build(BertModel)
    output = model(given["input_ids"], torch.zeros(B, S, dtype=torch.bool))
    assert not output.last_hidden_state.any() and output.pooler_output.isfinite().all()


def test_mask_and_packing_exclude_each_other():
    on = masks()["right"]
    given, _ = inputs(on)
    with pytest.raises(ValueError, match="attention_mask and packing are both given"):
        build(BertModel)(**given, attention_mask=on, packing=Packing.from_mask(on))
    with pytest.raises(ValueError, match=r"have shape \(3,\); their packing holds"):
        build(BertModel)(torch.zeros(3, dtype=torch.int64), packing=Packing.from_mask(on))


def test_output_by_key_and_attribute():
    output = build(BertModel)(inputs(masks()["right"])[0]["input_ids"])
    assert output["pooler_output"] is output.pooler_output and set(output) == {"last_hidden_state", "pooler_output"}
    with pytest.raises(AttributeError, match="no 'loss'; it has last_hidden_state, pooler_output"):
        _ = output.loss
    assert "pooler_output" not in BertModel(CONFIG, add_pooling_layer=False)(torch.zeros(1, 3, dtype=torch.int64))


# Embeddings


def test_positions_count_in_the_padded_batch_or_are_given():
    model = build(BertEmbeddings).eval()
    on = masks()["left"]
    ids = torch.randint(0, 97, (B, S))
    expected = model(ids)
    torch.testing.assert_close(model(ids, packing=Packing.from_mask(on)), expected[on], rtol=0, atol=0)
    positions = torch.randint(0, 32, (B, S))
    shifted = model(ids, position_ids=positions)
    torch.testing.assert_close(model(ids, None, positions, Packing.from_mask(on)), shifted[on], rtol=0, atol=0)
    torch.testing.assert_close(model(ids, None, torch.arange(S)[None]), expected, rtol=0, atol=0)
    torch.testing.assert_close(
        model(ids, None, torch.arange(S)[None], Packing.from_mask(on)), expected[on], rtol=0, atol=0
    )


def test_sequence_first_embeddings_drop_the_same_elements():
    batch_first = build(BertEmbeddings).train()
    sequence_first = BertEmbeddings(CONFIG, batch_first=False).double().train()
    sequence_first.load_state_dict(batch_first.state_dict())
    ids, types = torch.randint(0, 97, (B, S)), torch.randint(0, 2, (B, S))
    seed = torch.tensor([7])
    expected = batch_first(ids, types, seed=seed)
    assert (expected == 0).any()
    for positions in (None, torch.arange(S)[None]):
        actual = sequence_first(ids.T, types.T, positions, seed=seed)
        assert torch.equal(actual, expected.transpose(0, 1))


def test_too_long_a_sequence_is_named():
    with pytest.raises(ValueError, match="sequences of 33; up to max_position_embeddings, 32"):
        BertModel(CONFIG)(torch.zeros(1, 33, dtype=torch.int64))


def test_padding_token_gets_no_gradient_as_an_input():
    for pad_token_id in (0, 7, None):
        model = build(BertModel, dataclasses.replace(NO_DROPOUT, pad_token_id=pad_token_id))
        model(torch.tensor([[3, 0, 7]])).last_hidden_state.square().sum().backward()
        zero = [i for i in (0, 3, 7) if not model.embeddings.word_embeddings.weight.grad[i].any()]
        assert zero == ([] if pad_token_id is None else [pad_token_id])


# Dropout


def test_eval_is_deterministic_and_draws_nothing():
    """Fault 19: equal to p = 0, twice the same, and the generator stays where it is."""
    on = masks()["right"]
    given, wanted = inputs(on)
    model = build(BertForPreTraining).eval()
    without = BertForPreTraining(NO_DROPOUT).double().train()
    without.load_state_dict(model.state_dict())
    state = torch.get_rng_state()
    first, second, third = (m(**given, **wanted, attention_mask=on) for m in (model, model, without))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first.loss, second.loss) and torch.equal(first.loss, third.loss)


def test_seeds_are_drawn_once_a_forward():
    on = masks()["right"]
    given, wanted = inputs(on)
    model = build(BertForPreTraining).train()
    with mock.patch("torch.randint", wraps=torch.randint) as randint:
        model(**given, **wanted, packing=Packing.from_mask(on))
    assert [call.args[2] for call in randint.call_args_list] == [(1 + 3 * CONFIG.num_hidden_layers,)]
    losses = [model(**given, **wanted, attention_mask=on).loss.item() for _ in range(3)]
    assert len(set(losses)) == 3
    layer = build(BertLayer).train()
    x = torch.randn(B, S, CONFIG.hidden_size, dtype=torch.float64)
    assert not torch.equal(layer(x), layer(x))
    seeds = torch.tensor([1, 2, 3])
    assert torch.equal(layer(x, None, seeds), layer(x, None, seeds))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_checkpointing_gives_the_same_gradients(backend, packed, frozen):
    """Fault 21: with dropout on; fault 35: with embeddings and two layers frozen, the rest still trains."""
    dtype, _, device = precision(backend)
    on = masks()["right"].to(device)
    given, wanted = inputs(on.cpu(), device)
    given["attention_mask"] = on
    model = build(BertForPreTraining, dtype=dtype, device=device).train()
    model.unpad = packed
    if frozen:
        for module in (model.bert.embeddings, *model.bert.encoder.layer[:2]):
            module.requires_grad_(False)
    with preferred(backend):
        plain = step(model, given | wanted)
        model.gradient_checkpointing_enable()
        with mock.patch("fastbert.bert.checkpoint", wraps=fastbert.bert.checkpoint) as called:
            kept = step(model, given | wanted)
    assert called.call_count == CONFIG.num_hidden_layers
    assert plain[1].keys() == {n for n, p in model.named_parameters() if p.requires_grad} == kept[1].keys()
    for name, gradient in plain[1].items():
        assert torch.equal(gradient, kept[1][name]), name


# Losses


def test_loss_is_that_of_the_logits():
    on = masks()["holes"]
    given, wanted = inputs(on)
    model = build(BertForPreTraining).eval()
    given["attention_mask"] = on
    logits = model(**given)
    output = model(**given, **wanted)
    assert set(logits) == {"prediction_logits", "seq_relationship_logits"}
    assert logits.prediction_logits.shape == (B, S, 97) and not logits.prediction_logits[~on].any()
    mlm = nn.functional.cross_entropy(logits.prediction_logits.flatten(0, 1), wanted["labels"].flatten())
    nsp = nn.functional.cross_entropy(logits.seq_relationship_logits, wanted["next_sentence_label"])
    torch.testing.assert_close(output.mlm_loss, mlm, rtol=1e-12, atol=0)
    torch.testing.assert_close(output.nsp_loss, nsp, rtol=1e-12, atol=0)
    torch.testing.assert_close(output.loss, mlm + nsp, rtol=1e-12, atol=0)
    for name, single in (("labels", "mlm_loss"), ("next_sentence_label", "nsp_loss")):
        alone = model(**given, **{name: wanted[name]})
        assert torch.equal(alone.loss, output[single]) and single in alone and "prediction_logits" not in alone
    masked = BertForMaskedLM(CONFIG).double().eval()
    masked.load_state_dict({k: v for k, v in model.state_dict().items() if k in masked.state_dict()})
    torch.testing.assert_close(masked(**given, labels=wanted["labels"]).loss, mlm, rtol=1e-12, atol=0)
    torch.testing.assert_close(masked(**given).logits, logits.prediction_logits, rtol=0, atol=1e-12)


def test_the_head_sees_labelled_rows_alone():
    on = masks()["right"]
    given, wanted = inputs(on)
    model = build(BertForPreTraining)
    seen = []
    model.cls.predictions.transform.register_forward_hook(lambda module, args, y: seen.append(tuple(y.shape)))
    model.cls.predictions.register_forward_hook(lambda module, args, y: seen.append("logits of all tokens"))
    model(**given, **wanted, attention_mask=on)
    assert seen == [(int((wanted["labels"] != -100).sum()), CONFIG.hidden_size)]


@pytest.mark.parametrize("unpad", [True, False])
@pytest.mark.parametrize("form", ["labels", "masked_positions"])
def test_nothing_labelled_is_zero_loss(form, unpad):
    """Fault 30: zero loss and zero gradients, not NaN."""
    on = masks()["right"]
    given, wanted = inputs(on)
    model = build(BertForPreTraining).train()
    model.unpad = unpad
    labels = {"labels": torch.full((B, S), -100)}
    if form == "masked_positions":
        labels = {"labels": torch.full((B, 4), -100), "masked_positions": torch.zeros(B, 4, dtype=torch.int64)}
    output, gradients = step(model, {**given, **labels, "attention_mask": on})
    assert output.loss == 0 and output.mlm_loss == 0
    assert gradients and all(torch.equal(g, torch.zeros_like(g)) for g in gradients.values())
    nothing = torch.full((B,), -100)
    assert model(**given, attention_mask=on, next_sentence_label=nothing).nsp_loss == 0
    output = model(**given, **wanted | {"next_sentence_label": nothing}, attention_mask=on)
    assert output.loss == output.mlm_loss > 0


def test_label_zero_counts():
    """Fault 31."""
    given, _ = inputs(masks()["right"])
    model = build(BertForPreTraining).eval()
    labels = torch.full((B, S), -100)
    labels[2, 0] = 0
    expected = -model(**given).prediction_logits[2, 0].log_softmax(-1)[0]
    torch.testing.assert_close(model(**given, labels=labels).mlm_loss, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("unpad", [True, False])
@pytest.mark.parametrize("pattern", ["right", "holes"])
def test_masked_positions_are_labels_by_position(pattern, unpad):
    on = masks()[pattern]
    given, wanted = inputs(on)
    model = build(BertForPreTraining).train()
    model.unpad = unpad
    given["attention_mask"] = on
    expected = step(model, given | wanted)
    labels, count = wanted["labels"], int((wanted["labels"] != -100).sum(1).max())
    positions = (labels == -100).int().argsort(dim=1, stable=True)[:, :count]
    by_position = {**wanted, "labels": labels.gather(1, positions), "masked_positions": positions}
    assert (by_position["labels"] == -100).any()
    assert_same_step(expected, step(model, given | by_position), 1e-10)


@pytest.mark.parametrize("form", ["mask", "padded", "packed ids"])
def test_masked_positions_are_places_among_all_labels(form):
    on = masks()["right"]
    given, wanted = inputs(on)
    model = build(BertForPreTraining).train()
    model.unpad = form != "padded"
    if form == "packed ids":
        given = {k: v[on] for k, v in given.items()} | {"packing": Packing.from_mask(on)}
        wanted["labels"] = wanted["labels"][on]
    else:
        given["attention_mask"] = on
    expected = step(model, given | wanted)
    places = (wanted["labels"].flatten() != -100).nonzero().flatten()
    unlabelled = (wanted["labels"].flatten() == -100).nonzero().flatten()
    for spare in (0, 7):
        wanted["masked_positions"] = torch.cat([places.flip(0), unlabelled[:spare]])
        assert_same_step(expected, step(model, given | wanted), 1e-10)


def test_padded_predictions_do_not_move_the_loss():
    """Fault 32: places without a label count neither in the sum nor in the number; nor does a label on padding."""
    on = masks()["right"]
    given, _ = inputs(on)
    model = build(BertForPreTraining).eval()
    given["attention_mask"] = on
    positions = torch.tensor([[1, 4], [2, 1], [0, 0], [3, 10], [5, 5]])
    labels = torch.randint(0, 97, (B, 2))
    expected = model(**given, labels=labels, masked_positions=positions).mlm_loss
    for spare in (1, 30):
        wider = {
            "labels": torch.cat([labels, torch.full((B, spare), -100)], 1),
            "masked_positions": torch.cat([positions, torch.zeros(B, spare, dtype=torch.int64)], 1),
        }
        torch.testing.assert_close(model(**given, **wider).mlm_loss, expected, rtol=1e-12, atol=0)
    on_padding = {
        "labels": torch.cat([labels, torch.tensor([[-100], [9], [9], [9], [9]])], 1),
        "masked_positions": torch.cat([positions, torch.full((B, 1), S - 1)], 1),
    }
    torch.testing.assert_close(model(**given, **on_padding).mlm_loss, expected, rtol=1e-12, atol=0)


def test_labels_of_other_shapes_are_refused():
    on = masks()["right"]
    given, _ = inputs(on)
    model = build(BertForPreTraining)
    with pytest.raises(ValueError, match=r"labels has shape \(5, 3\); \(5, 17\)"):
        model(**given, labels=torch.zeros(B, 3, dtype=torch.int64))
    positions = torch.zeros(B, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"labels has shape \(5, 3\); that of masked_positions, \(5, 4\)"):
        model(**given, labels=torch.zeros(B, 3, dtype=torch.int64), masked_positions=positions)
    with pytest.raises(ValueError, match="masked_positions is given without labels"):
        model(**given, masked_positions=positions)


def test_sequence_classification():
    on = masks()["right"]
    given, _ = inputs(on)
    config = dataclasses.replace(CONFIG, num_labels=3)
    model = build(BertForSequenceClassification, config)
    labels = torch.tensor([0, 2, 1, -100, 0])
    output = model.eval()(**given, attention_mask=on, labels=labels)
    assert output.logits.shape == (B, 3)
    torch.testing.assert_close(output.loss, nn.functional.cross_entropy(output.logits, labels), rtol=1e-12, atol=0)
    assert "loss" not in model(**given)
    model.train()
    packed = step(model, {**given, "labels": labels, "attention_mask": on})
    model.unpad = False
    padded = step(model, {**given, "labels": labels, "attention_mask": on})
    for name, gradient in packed[1].items():
        torch.testing.assert_close(gradient, padded[1][name], rtol=0, atol=1e-11)
    regression = build(BertForSequenceClassification, dataclasses.replace(NO_DROPOUT, num_labels=1))
    output = regression(**given, labels=torch.arange(5.0))
    torch.testing.assert_close(output.loss, (output.logits[:, 0] - torch.arange(5.0)).square().mean())


def test_embeddings_frozen_or_not_by_configuration():
    model = build(BertForPreTraining, dataclasses.replace(CONFIG, train_position_embeddings=False))
    given, wanted = inputs(masks()["right"])
    _, gradients = step(model, given | wanted)
    assert model.state_dict().keys() - gradients.keys() == {
        "bert.embeddings.position_embeddings.weight",
        "cls.predictions.decoder.weight",  # tied: named_parameters() has it once, as the word embeddings
    }


def test_autocast(backend):
    """Under bfloat16 autocast the model runs packed, stays near float32, and keeps float32 gradients."""
    device = precision(backend)[2]
    on = masks()["right"].to(device)
    given, wanted = inputs(on.cpu(), device)
    given["attention_mask"] = on
    model = build(BertForPreTraining, NO_DROPOUT, torch.float32, device)
    with preferred(backend):
        expected = step(model, given | wanted)
        with torch.autocast(device, torch.bfloat16):
            actual = step(model, given | wanted)
    torch.testing.assert_close(actual[0].loss, expected[0].loss, rtol=0.02, atol=0)
    for name, gradient in actual[1].items():
        assert gradient.dtype == torch.float32 and gradient.isfinite().all()
        if "key.bias" not in name:
            assert (gradient - expected[1][name]).norm() <= 0.1 * expected[1][name].norm() + 1e-3, name


# Configuration


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_attention_heads": 5}, "num_attention_heads is 5; accepted is a divisor of hidden_size, 24"),
        ({"hidden_act": "swish"}, "hidden_act is 'swish'; accepted is one of gelu, gelu_python, gelu_new"),
        ({"hidden_act": "quick_gelu"}, "hidden_act is 'quick_gelu'"),
        ({"hidden_dropout_prob": 1.5}, "hidden_dropout_prob is 1.5; accepted is a probability from 0 to 1"),
        ({"classifier_dropout": -0.1}, "classifier_dropout is -0.1; accepted is a probability"),
        ({"vocab_size": 0}, "vocab_size is 0; accepted is an int above 0"),
        ({"hidden_size": 24.0}, "hidden_size is 24.0; accepted is an int above 0"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1; accepted is an int from 0"),
        ({"layer_norm_eps": 0.0}, "layer_norm_eps is 0.0; accepted is a number above 0"),
        ({"pad_token_id": 97}, "pad_token_id is 97; accepted is None or a token id below vocab_size, 97"),
        (
            {"position_embedding_type": "relative_key"},
            "position_embedding_type is 'relative_key'; accepted is 'absolute'",
        ),
        ({"is_decoder": True}, "is_decoder is True; accepted is False"),
        ({"model_type": "roberta"}, "model_type is 'roberta'; accepted is 'bert'"),
    ],
    ids=str,
)
def test_configuration_errors(change, message):
    with pytest.raises(ValueError, match=message):
        BertConfig.from_dict({**CONFIG.to_dict(), **change})


def test_configuration_round_trip(tmp_path):
    for config in (CONFIG, dataclasses.replace(CONFIG, pad_token_id=None, ffn_add_norm=False, num_labels=4)):
        assert BertConfig.from_dict(config.to_dict()) == config
        (tmp_path / "config.json").write_text(json.dumps({**config.to_dict(), "transformers_version": "4.36.0"}))
        assert BertConfig.from_json(tmp_path / "config.json") == config
    assert BertConfig.from_dict({"id2label": {"0": "a", "1": "b", "2": "c"}}).num_labels == 3
    assert BertConfig.from_dict({"use_cache": True}) == BertConfig()


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation_is_honoured(name):
    """Fault 26."""
    layer = build(BertLayer, dataclasses.replace(NO_DROPOUT, hidden_act=name))
    x = torch.randn(40, 24, dtype=torch.float64) * 4
    dense = layer.intermediate.dense(x)
    expected = {
        "none": nn.functional.gelu(dense),
        "tanh": 0.5 * dense * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (dense + 0.044715 * dense**3))),
        "relu": dense.clamp(min=0),
    }
    for kind, value in expected.items():
        same = torch.allclose(layer.intermediate(x), value, rtol=0, atol=1e-10)
        assert same == (kind == ("none" if name in ("gelu", "gelu_python") else "relu" if name == "relu" else "tanh"))


@pytest.mark.parametrize("eps", [1e-12, 1e-5, 0.1])
def test_eps_of_every_layer_norm_is_the_configured_one(eps):
    """Fault 25: in the modules and in what they compute."""
    model = build(BertForPreTraining, dataclasses.replace(NO_DROPOUT, layer_norm_eps=eps))
    norms = [module for module in model.modules() if isinstance(module, nn.LayerNorm)]
    assert len(norms) == 2 + 2 * CONFIG.num_hidden_layers and all(norm.eps == eps for norm in norms)
    output = model.bert.encoder.layer[0].attention.output
    x, residual = torch.randn(2, 3, 24, dtype=torch.float64)
    expected = nn.functional.layer_norm(
        output.dense(x) + residual, (24,), output.LayerNorm.weight, output.LayerNorm.bias, eps
    )
    torch.testing.assert_close(output(x, residual, None, None), expected, rtol=0, atol=1e-12)


def test_initialisation():
    config = dataclasses.replace(CONFIG, hidden_size=96, vocab_size=2000, initializer_range=0.05)
    for cls in (BertForPreTraining, BertForSequenceClassification):
        for name, parameter in cls(config).named_parameters():
            if name.endswith("LayerNorm.weight"):
                assert (parameter == 1).all(), name
            elif name.endswith("bias"):
                assert (parameter == 0).all(), name
            elif parameter.numel() > 1000:
                assert abs(parameter.std() - 0.05) < 0.004, name
    assert not BertForPreTraining(config).bert.embeddings.word_embeddings.weight[0].any()


# Checkpoints


def test_position_ids_of_old_checkpoints():
    """Fault 33: strict loading with the buffer and without, and state_dict() does not hold it."""
    model = build(BertForPreTraining)
    state = model.state_dict()
    assert not any("position_ids" in name for name in state)
    state["bert.embeddings.position_ids"] = torch.arange(32)[None]
    for given in (state, model.state_dict()):
        fresh = BertForPreTraining(CONFIG).double()
        fresh.load_state_dict(given, strict=True)
        assert all(torch.equal(v, fresh.state_dict()[k]) for k, v in model.state_dict().items())
    assert "bert.embeddings.position_ids" in state
    state["bert.embeddings.position"] = torch.zeros(1)
    with pytest.raises(RuntimeError, match=r"bert\.embeddings\.position"):
        fresh.load_state_dict(state)


@pytest.mark.parametrize("tied", [True, False])
def test_save_and_load(tmp_path, tied):
    """Fault 34: tied weights are stored once and tied again, also after training has replaced nothing but values."""
    model = build(BertForPreTraining, dataclasses.replace(CONFIG, tie_word_embeddings=tied, num_labels=3))
    model.save_pretrained(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    stored = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert ("cls.predictions.decoder.weight" in stored) != tied
    settings = json.loads((tmp_path / "config.json").read_text())
    assert settings["architectures"] == ["BertForPreTraining"] and settings["model_type"] == "bert"
    again = BertForPreTraining.from_pretrained(tmp_path)
    assert type(again) is BertForPreTraining and not again.training and again.dtype == torch.float64
    assert again.config == model.config
    assert (again.cls.predictions.decoder.weight is again.bert.embeddings.word_embeddings.weight) == tied
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    assert len(list(again.parameters())) == len(list(model.parameters()))
    copied = copy.deepcopy(again)
    assert (copied.cls.predictions.decoder.weight is copied.bert.embeddings.word_embeddings.weight) == tied


def test_models_read_each_others_checkpoints(tmp_path):
    pretrained = build(BertForPreTraining, NO_DROPOUT).eval()
    pretrained.save_pretrained(tmp_path / "pretrained")
    ids = torch.randint(1, 97, (2, 9))
    encoder = BertModel.from_pretrained(tmp_path / "pretrained")
    assert torch.equal(encoder(ids).pooler_output, pretrained.bert(ids).pooler_output)
    encoder.save_pretrained(tmp_path / "encoder")
    assert torch.equal(BertModel.from_pretrained(tmp_path / "encoder")(ids).pooler_output, encoder(ids).pooler_output)
    masked = BertForMaskedLM.from_pretrained(tmp_path / "pretrained")
    assert torch.equal(masked(ids).logits, pretrained(ids).prediction_logits)
    for source in ("pretrained", "encoder"):
        classifier = BertForSequenceClassification.from_pretrained(tmp_path / source, num_labels=3)
        assert torch.equal(classifier.bert(ids).pooler_output, encoder(ids).pooler_output)
        assert classifier(ids).logits.shape == (2, 3)
    classifier.save_pretrained(tmp_path / "classifier")
    again = BertForSequenceClassification.from_pretrained(tmp_path / "classifier")
    assert torch.equal(again(ids).logits, classifier(ids).logits) and again.config.num_labels == 3
    with pytest.raises(ValueError, match=r"missing are \['cls.predictions.bias', .*unexpected are \[\]"):
        BertForPreTraining.from_pretrained(tmp_path / "encoder")
    with pytest.raises(FileNotFoundError):
        BertModel.from_pretrained(tmp_path)


def test_checkpoints_that_do_not_fit_are_named(tmp_path):
    build(BertForPreTraining).save_pretrained(tmp_path)
    stored = safetensors.torch.load_file(tmp_path / "model.safetensors")
    stored["bert.encoder.layer.1.attention.self.querry.weight"] = stored.pop(
        "bert.encoder.layer.1.attention.self.query.weight"
    )
    safetensors.torch.save_file(stored, tmp_path / "model.safetensors")
    for cls in (BertForPreTraining, BertModel):
        with pytest.raises(
            ValueError, match=r"missing are \['bert.*1.attention.self.query.weight'\].*querry.weight'\]"
        ):
            cls.from_pretrained(tmp_path)
    with pytest.raises(TypeError, match="number_of_labels"):
        BertModel.from_pretrained(tmp_path, number_of_labels=3)


def test_torch_files_and_old_names(tmp_path):
    model = build(BertForPreTraining)
    model.save_pretrained(tmp_path)
    state = safetensors.torch.load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in state.items()
    }
    old["bert.embeddings.position_ids"] = torch.arange(32)[None]
    old["cls.predictions.decoder.weight"] = old["bert.embeddings.word_embeddings.weight"]
    torch.save(old, tmp_path / "pytorch_model.bin")
    again = BertForPreTraining.from_pretrained(tmp_path)
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in model.state_dict().items())


def test_a_failed_save_leaves_the_last_checkpoint(tmp_path):
    model = build(BertForPreTraining)
    model.save_pretrained(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def half_way(state, path, metadata):
        path.write_bytes(b"half")
        raise OSError("disk full")

    with mock.patch("safetensors.torch.save_file", half_way), pytest.raises(OSError, match="disk full"):
        build(BertForPreTraining).save_pretrained(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


# Hugging Face


@pytest.fixture
def transformers(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return pytest.importorskip("transformers")


NAMES = ["BertModel", "BertForPreTraining", "BertForMaskedLM", "BertForSequenceClassification"]
OUTPUTS = ("last_hidden_state", "pooler_output", "prediction_logits", "seq_relationship_logits", "logits")


def theirs_and_ours(transformers, name, hidden_act):
    settings = {**NO_DROPOUT.to_dict(), "hidden_act": hidden_act, "layer_norm_eps": 1e-6}
    if name == "BertForSequenceClassification":
        settings["num_labels"] = 3
    theirs = getattr(transformers, name)(transformers.BertConfig(**settings)).double().eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    return theirs, getattr(fastbert, name)


def compare(theirs, ours):
    on = masks()["right"]
    given, wanted = inputs(on)
    if not isinstance(ours, BertForPreTraining):
        wanted = {}
    elif hasattr(theirs, "cls"):
        wanted = dict(wanted)
    with torch.no_grad():
        expected = theirs(**given, attention_mask=on.long())
        actual = ours(**given, attention_mask=on.long())
        for name in actual:
            a, e = actual[name], expected[name]
            if a.dim() == 3:
                a, e = a[on], e[on]
            torch.testing.assert_close(a, e, rtol=0, atol=1e-11)
        if wanted:
            expected, actual = (m(**given, attention_mask=on.long(), **wanted) for m in (theirs, ours))
            torch.testing.assert_close(actual.loss, expected.loss, rtol=0, atol=1e-11)
    assert set(actual) & {*OUTPUTS, "loss"}


@pytest.mark.parametrize("name", NAMES)
def test_reads_hugging_faces_checkpoints(transformers, tmp_path, name):
    theirs, cls = theirs_and_ours(transformers, name, "gelu")
    theirs.save_pretrained(tmp_path)
    compare(theirs, cls.from_pretrained(tmp_path))
    ours = cls(cls.from_pretrained(tmp_path).config).double().eval()
    ours.load_state_dict(theirs.state_dict(), strict=True)
    compare(theirs, ours)


@pytest.mark.parametrize("name", NAMES)
def test_hugging_face_reads_ours(transformers, tmp_path, name):
    theirs, cls = theirs_and_ours(transformers, name, "gelu_new")
    ours = build(cls, BertConfig.from_dict(theirs.config.to_dict())).eval()
    ours.save_pretrained(tmp_path)
    theirs, report = type(theirs).from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    compare(theirs.eval(), ours)


@pytest.mark.parametrize("name", ["BertModel", "BertForPreTraining"])
def test_reads_a_hugging_face_encoder_and_heads(transformers, tmp_path, name):
    theirs, _ = theirs_and_ours(transformers, name, "relu")
    theirs.save_pretrained(tmp_path)
    compare(theirs if name == "BertModel" else theirs.bert, BertModel.from_pretrained(tmp_path))


# torch.compile


@pytest.mark.parametrize(
    ("form", "name"),
    [("packing", "eager"), ("packing", None), ("none", None), ("mask", None), ("masked_positions", None)],
)
def test_compiles_into_one_graph(form, name):
    """The whole model and its loss, forward and backward, with dropout on; new batch shapes do not compile anew."""
    model = build(BertForPreTraining, dataclasses.replace(CONFIG, num_hidden_layers=1)).train()
    model.unpad = False
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    graphs = []
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for batch, seqlen in ((4, 12), (5, 14), (7, 23)):
        on = torch.arange(seqlen) < torch.randint(2, seqlen, (batch,))[:, None]
        on[0] = True
        labels = torch.where((torch.rand(batch, seqlen) < 0.4) & on, torch.randint(0, 97, on.shape), -100)
        given = {"input_ids": torch.randint(0, 97, on.shape), "next_sentence_label": torch.randint(0, 2, (batch,))}
        given["labels"] = labels
        if form in ("packing", "masked_positions"):
            given["packing"] = Packing.from_mask(on)
        if form == "mask":
            given["attention_mask"] = on
        if form == "masked_positions":
            given["masked_positions"] = torch.zeros(batch, 3, dtype=torch.int64)
            given["labels"] = labels[:, :3]
        with fastbert.use_backend(name):
            traced = step(compiled, given)
            direct = step(model, given)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        torch.testing.assert_close(traced[0].loss, direct[0].loss, rtol=1e-10, atol=0)
        for key, gradient in direct[1].items():
            torch.testing.assert_close(traced[1]["_orig_mod." + key], gradient, rtol=0, atol=1e-10)
    assert graphs[2] == graphs[1] <= 2, graphs


def test_every_model_is_exported():
    for name in NAMES:
        assert issubclass(getattr(fastbert, name), BertPreTrainedModel)
    assert fastbert.adapters.minbert.from_state_dict
