"""The four reference systems: outputs, losses and every gradient of the golden files, and exact round trips."""

import json

import pytest
import torch
from preferred import preferred

import fastbert
from fastbert import adapters
from fastbert.ops import Packing

# Largest relative difference of a tensor, by norm. Backends without float64 are held to float32's.
TOLERANCE = {"eager": 1e-10, "cpu": 1e-10}
SYSTEMS = {
    "minbert": (adapters.minbert.from_state_dict, adapters.minbert.to_state_dict),
    "minbert_layer": (adapters.minbert.layer_from_state_dict, adapters.minbert.layer_to_state_dict),
    "graykode": (adapters.graykode.from_state_dict, adapters.graykode.to_state_dict),
    "moonhotel_embeddings": (adapters.moonhotel.from_state_dict, adapters.moonhotel.to_state_dict),
    "d2l": (adapters.d2l.from_state_dict, adapters.d2l.to_state_dict),
}


class Case:
    """One golden file: its native model, its inputs, and the differences found so far."""

    def __init__(self, golden, name, backend="eager"):
        tensors, metadata = golden(name)
        self.config = json.loads(metadata["config"])
        self.dtype = torch.float64 if backend in TOLERANCE else torch.float32
        self.tolerance = TOLERANCE.get(backend, 1e-4)
        self.device = "cuda" if backend in ("triton", "cuda") and torch.cuda.is_available() else "cpu"
        groups = {"in": {}, "out": {}, "param": {}, "grad": {}}
        for key, tensor in tensors.items():
            group, _, rest = key.partition("/")
            groups[group][rest] = tensor
        self.param, self.expected, self.grad = groups["param"], groups["out"], groups["grad"]
        self.given = {k: self.cast(v) for k, v in groups["in"].items()}
        self.from_state_dict, self.to_state_dict = SYSTEMS[name]
        self.model = self.from_state_dict(self.param, self.config).to(self.device, self.dtype)
        self.differences = {}

    def cast(self, tensor):
        return tensor.to(self.device, self.dtype if tensor.is_floating_point() else tensor.dtype)

    def compare(self, name, actual, expected, rows=None):
        """Norm of the difference over the norm of what is expected.

        A gradient that is zero but for rounding, such as that of a key's bias, is measured against a thousandth of
        the largest gradient.
        """
        actual, expected = actual.detach().double().cpu(), expected.double().reshape(actual.shape)
        if rows is not None:
            actual, expected = actual[rows.cpu()], expected[rows.cpu()]
        floor = 1e-3 * max(grad.norm().item() for grad in self.grad.values())
        self.differences[name] = ((actual - expected).norm() / expected.norm().clamp(min=floor)).item()

    def compare_gradients(self):
        """Every parameter's, under its foreign name: what to_state_dict gives, filled with the gradients."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                assert (parameter.grad is not None) == parameter.requires_grad
                parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        found = self.to_state_dict(self.model)
        assert self.grad.keys() <= found.keys()
        for name, expected in self.grad.items():
            self.compare("grad/" + name, found[name], expected)

    def finish(self):
        worst = max(self.differences, key=self.differences.get)
        print(f"largest relative difference {self.differences[worst]:.2e} ({worst})")
        assert self.differences[worst] <= self.tolerance, {
            k: v for k, v in self.differences.items() if not v <= self.tolerance
        }


@pytest.mark.parametrize("unpad", [True, False])
def test_minbert(golden, backend, unpad):
    case = Case(golden, "minbert", backend)
    given, model = case.given, case.model
    model.unpad = unpad
    with preferred(backend):
        output = model(given["input_ids"], given["attention_mask"], given["token_type_ids"])
        loss = (output["last_hidden_state"] * given["cotangent"]).sum()
        loss = loss + (output.pooler_output * given["cotangent_pooler"]).sum()
        loss.backward()
    rows = given["attention_mask"].bool() if unpad else None
    case.compare("last_hidden_state", output.last_hidden_state, case.expected["last_hidden_state"], rows)
    case.compare("pooler_output", output["pooler_output"], case.expected["pooler_output"])
    case.compare("loss", loss, case.expected["loss"])
    case.compare_gradients()
    case.finish()
    if unpad:
        assert not output.last_hidden_state[~rows].any()


@pytest.mark.parametrize("form", ["additive", "bool"])
def test_minbert_layer(golden, backend, form):
    case = Case(golden, "minbert_layer", backend)
    given, mask = case.given, case.given["attention_mask"]
    hidden_states = given["hidden_states"].requires_grad_()
    on = mask[:, 0, 0] > -1
    with preferred(backend):
        output = case.model(hidden_states, mask if form == "additive" else on)
        loss = (output * given["cotangent"]).sum()
        loss.backward()
        packed, packing = fastbert.ops.unpad(hidden_states, on)
        packed = fastbert.ops.pad(case.model(packed, packing), packing)
    case.compare("hidden_states", output, case.expected["hidden_states"])
    case.compare("packed hidden_states", packed, case.expected["hidden_states"], on)
    case.compare("loss", loss, case.expected["loss"])
    case.compare("grad_hidden_states", hidden_states.grad, case.expected["grad_hidden_states"])
    case.compare_gradients()
    case.finish()


def test_minbert_adds_its_mask_before_scaling(golden):
    """A mask of moderate values tells the two orders apart: here (q k + mask) / sqrt(d)."""
    case = Case(golden, "minbert_layer")
    attention = case.model.attention.self
    hidden_states = case.given["hidden_states"]
    mask = torch.randn(5, 1, 1, 23, dtype=torch.float64) * 3
    q, k, v = (
        projection(hidden_states).unflatten(-1, (4, 16)).transpose(1, 2)
        for projection in (attention.query, attention.key, attention.value)
    )
    expected = (((q @ k.transpose(2, 3) + mask) / 4).softmax(-1) @ v).transpose(1, 2).flatten(2)
    torch.testing.assert_close(attention(hidden_states, mask), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("unpad", [True, False])
def test_graykode(golden, backend, unpad):
    case = Case(golden, "graykode", backend)
    given, model = case.given, case.model
    model.unpad = unpad
    inputs = (given["input_ids"], given["input_ids"] != 0, given["segment_ids"])
    with preferred(backend):
        output = model(
            *inputs,
            labels=given["masked_tokens"],
            next_sentence_label=given["is_next"],
            masked_positions=given["masked_pos"],
        )
        output.loss.backward()
        logits = model(*inputs).prediction_logits
    index = given["masked_pos"][..., None].expand(-1, -1, logits.shape[-1])
    case.compare("logits_lm", logits.gather(1, index), case.expected["logits_lm"])
    case.compare("logits_clsf", output.seq_relationship_logits, case.expected["logits_clsf"])
    case.compare("loss", output.loss, case.expected["loss"])
    case.compare_gradients()
    case.finish()


@pytest.mark.parametrize("token_types", [True, False])
def test_moonhotel(golden, backend, token_types):
    case = Case(golden, "moonhotel_embeddings", backend)
    given = case.given
    with preferred(backend):
        if not token_types:
            output = case.model(given["input_ids"])
            case.compare("embeddings", output, case.expected["embeddings_without_token_types"])
            case.finish()
            return
        output = case.model(given["input_ids"], given["token_type_ids"])
        loss = (output * given["cotangent"]).sum()
        loss.backward()
        positions = torch.arange(output.shape[0], device=output.device)[None]
        assert torch.equal(output, case.model(given["input_ids"], given["token_type_ids"], positions))
    case.compare("embeddings", output, case.expected["embeddings"])
    case.compare("loss", loss, case.expected["loss"])
    case.compare_gradients()
    case.finish()


def test_moonhotel_has_its_own_eps(golden):
    """Fault 25: 1e-5, though a configuration may say otherwise."""
    case = Case(golden, "moonhotel_embeddings")
    model = case.from_state_dict(case.param, {**case.config, "layer_norm_eps": 1e-12})
    assert model.LayerNorm.eps == 1e-5


@pytest.mark.parametrize("unpad", [True, False])
def test_d2l(golden, backend, unpad):
    """Some of its predictions share a position; those of weight 0 have the label -100 (fault 32)."""
    case = Case(golden, "d2l", backend)
    given, model = case.given, case.model
    tokens = given["tokens"]
    packing = Packing.from_lengths(given["valid_lens"], tokens.shape[1])
    on = torch.arange(tokens.shape[1], device=tokens.device) < given["valid_lens"][:, None]
    model.unpad = unpad
    inputs = {"input_ids": tokens, "token_type_ids": given["segments"]}
    inputs |= {"packing": packing} if unpad else {"attention_mask": on}
    with preferred(backend):
        output = model(
            **inputs,
            labels=torch.where(given["mlm_weights"] > 0, given["mlm_labels"], -100),
            next_sentence_label=given["nsp_labels"],
            masked_positions=given["pred_positions"],
        )
        output.loss.backward()
        encoded = model.bert(**inputs).last_hidden_state
        index = given["pred_positions"][..., None].expand(-1, -1, encoded.shape[-1])
        logits = model.cls.predictions(encoded.gather(1, index))
    case.compare("encoded", encoded, case.expected["encoded"], on if unpad else None)
    case.compare("mlm_logits", logits, case.expected["mlm_logits"])
    case.compare("nsp_logits", output.seq_relationship_logits, case.expected["nsp_logits"])
    for name in ("mlm_loss", "nsp_loss", "loss"):
        case.compare(name, output[name], case.expected[name])
    assert not model.bert.embeddings.position_embeddings.weight.requires_grad
    case.compare_gradients()
    case.finish()


@pytest.mark.parametrize("name", SYSTEMS)
def test_round_trip_is_exact(golden, name):
    case = Case(golden, name)
    for dtype in (torch.float64, torch.float32):
        state = {k: v.to(dtype) if v.is_floating_point() else v for k, v in case.param.items()}
        back = case.to_state_dict(case.from_state_dict(state, case.config))
        assert back.keys() == state.keys()
        for key, tensor in state.items():
            assert back[key].dtype == tensor.dtype and torch.equal(back[key], tensor), key
        case.from_state_dict(back, case.config)


@pytest.mark.parametrize("name", SYSTEMS)
def test_keys_that_do_not_fit_are_named(golden, name):
    case = Case(golden, name)
    state = dict(case.param)
    lost = next(key for key in state if key != "position_ids")
    state["extra.weight"] = state.pop(lost)
    with pytest.raises(ValueError, match=rf"missing are \['{lost}'\], unexpected are \['extra.weight'\]"):
        case.from_state_dict(state, case.config)


@pytest.mark.parametrize("name", ["minbert", "moonhotel_embeddings"])
def test_position_ids_need_not_be_there(golden, name):
    """Fault 33."""
    case = Case(golden, name)
    state = {k: v for k, v in case.param.items() if k != "position_ids"}
    back = case.to_state_dict(case.from_state_dict(state, case.config))
    assert torch.equal(back["position_ids"], case.param["position_ids"])


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("graykode", {"d_k": 16}, "d_k is 16; accepted is 8"),
        ("d2l", {"key_size": 96}, "key_size is 96; accepted is 48"),
        ("d2l", {"norm_shape": [21, 48]}, r"norm_shape is \[21, 48\]; accepted is \[48\]"),
    ],
)
def test_settings_that_do_not_fit_are_named(golden, name, change, message):
    case = Case(golden, name)
    with pytest.raises(ValueError, match=message):
        case.from_state_dict(case.param, {**case.config, **change})


def test_graykode_stays_tied(golden):
    model = Case(golden, "graykode").model
    assert model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight
