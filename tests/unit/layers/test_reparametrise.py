"""Weights as `tau w / |w|`: the formula, gradients, the plan on the parametrised model, training, checkpoints."""

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import gradcheck
from torch.nn.utils import parametrize

import surefoot as sf
from surefoot.experiment.models.decoder import reference
from surefoot.layers import InNormLinear, normalise_
from surefoot.stabilise.reparametrise import Reparametrised
from surefoot.views import Fused, Matrix, Stack, Vector


def spectral(w):
    return math.sqrt(w.shape[1] / w.shape[0]) * np.linalg.svd(w)[1][0]


def largest_row(w):
    return max(math.sqrt(sum(v * v for v in row) / len(row)) for row in w)


NORMS = {
    "linear": (sf.Spectral(), spectral),
    "table": (sf.RowRMS(), largest_row),
    "head": (sf.HeadRMS(), lambda w: w.shape[1] * largest_row(w)),
    "column": (sf.MeanOperator(1, 2), lambda w: w.shape[1] / math.sqrt(len(w)) * np.linalg.norm(w, axis=0).max()),
    "frobenius": (sf.Frobenius(), lambda w: np.linalg.norm(w) / math.sqrt(len(w))),
}


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("shape", [(3, 7), (7, 3), (4, 4), (1, 5), (5, 1)])
def test_it_is_the_formula_for_each_matrix_with_its_gradient(name, shape):
    geometry, norm = NORMS[name]
    torch.manual_seed(0)
    w = torch.randn(3, *shape, dtype=torch.float64)
    part = Reparametrised(geometry, Stack(), (1.7,))
    expected = np.array([1.7 * matrix / norm(matrix) for matrix in w.numpy()])
    assert torch.allclose(part(w), torch.tensor(expected), rtol=1e-6)
    assert gradcheck(part, (w.requires_grad_(True),), atol=1e-5)


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_zero_tiny_and_huge_weights(name, dtype):
    torch.manual_seed(0)
    geometry, _ = NORMS[name]
    part, w = Reparametrised(geometry, Stack(), (2.0,)), torch.randn(2, 4, 6)
    w[1] = 0
    for size in (1e-30, 1.0, 1e30):
        y = part((size * w).to(dtype))
        assert y.dtype == dtype
        assert torch.allclose(geometry.norm(y[0].double()), torch.tensor(2.0, dtype=torch.float64), rtol=0.02)
        assert not y[1].any()
    zero = w.to(dtype).requires_grad_(True)
    part(zero).backward(torch.ones_like(zero))
    assert zero.grad.isfinite().all()
    assert (zero.grad[1] == 2).all()  # as of tau w
    assert part(torch.zeros(0, 4, 6)).shape == (0, 4, 6)


def test_blocks_have_norms_and_radii_of_their_own():
    torch.manual_seed(0)
    w = torch.randn(12, 4) * torch.tensor([1.0, 5.0, 0.1]).repeat_interleave(4)[:, None]
    thirds = Reparametrised(sf.Spectral(), Fused(3), (1.5,))(w).chunk(3)
    assert [float(sf.Spectral().norm(part)) for part in thirds] == pytest.approx([1.5] * 3, rel=1e-5)
    rank_one = torch.outer(torch.ones(4), torch.ones(4))
    assert torch.allclose(Reparametrised(sf.Spectral(), Matrix(), (1.0,))(rank_one), rank_one / 4)
    with pytest.raises(ValueError, match="must be positive, not 0"):
        Reparametrised(sf.RMS(), Vector(), (0.0,))


class Tokens(nn.Module):
    """An embedding, In Norm, a recurrent layer, torch's attention, and a head."""

    def __init__(self):
        super().__init__()
        self.embedding, self.hidden = nn.Embedding(11, 8), InNormLinear(8, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 11)

    def forward(self, tokens):
        x = self.hidden(self.embedding(tokens))
        return self.head(x + self.attention(x, x, x, need_weights=False)[0])


def images():
    return nn.Sequential(nn.Conv2d(2, 8, 3, groups=2), nn.ReLU(), nn.ConvTranspose2d(8, 4, 2, stride=2), nn.Flatten())


MODELS = {
    "gpt": lambda: reference("gpt", 32),
    "tied": lambda: reference("gpt", 32, head="tied"),
    "scaled tie": lambda: reference("tied", 32),
    "in norm": lambda: reference("llama", 32, norm="in"),
    "experts": lambda: reference("moe", 32),
    "tokens": Tokens,
    "lstm": lambda: nn.LSTM(3, 4),
    "images": images,
}
INPUTS = {"lstm": torch.randn(5, 2, 3), "images": torch.randn(2, 2, 6, 6)}


def output(model, name):
    y = model(INPUTS.get(name, torch.arange(8).reshape(2, 4)))
    return y[0] if isinstance(y, tuple) else y


@pytest.mark.parametrize("name", MODELS)
def test_the_plan_works_on_the_normalised_model(name):
    torch.manual_seed(0)
    model = MODELS[name]()
    before = sf.Plan.of(model)
    old_names = dict.fromkeys(before)
    plan = normalise_(model, before, radius=1.5)
    again = sf.Plan.of(model)
    assert list(plan) == list(again) == [n for n, _ in model.named_parameters()]
    assert plan.hash == again.hash
    assert {n.replace("parametrizations.", "").removesuffix(".original") for n in plan} == old_names.keys()
    for parameter in plan:
        origin = parameter.replace("parametrizations.", "").removesuffix(".original")
        role, was = plan[parameter].role, before[origin].role
        assert role == was == again[parameter].role
        assert (parameter != origin) == (was.geometry.ndim == 2)
        if parameter != origin:
            owner, _, attribute = origin.rpartition(".")
            weight = getattr(model.get_submodule(owner), attribute).detach().double()
            for block, shape in zip(role.view.split(weight), plan[parameter].blocks, strict=True):
                radius = 1.5 * role.radius_unit(shape)
                assert torch.allclose(role.weight_geometry.norm(block).float(), torch.tensor(radius), rtol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_training_keeps_the_norms_and_checkpoints_come_back(name):
    torch.manual_seed(0)
    model = MODELS[name]()
    plan = normalise_(model, sf.Plan.of(model))
    optimizer = sf.SteepestDescent(model, plan, lr=0.05)
    losses = []
    for _ in range(5):
        y = output(model, name)
        loss = F.cross_entropy(y.flatten(0, -2), torch.zeros(y[..., 0].numel(), dtype=torch.int64))
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0]
    for module in model.modules():
        if parametrize.is_parametrized(module):
            for attribute, parts in module.parametrizations.items():
                (blocks,) = (parts[0].view.split(getattr(module, attribute).detach()),)
                for block, radius in zip(blocks, parts[0].radii, strict=True):
                    assert torch.allclose(parts[0].geometry.norm(block), torch.tensor(radius), rtol=1e-4)
    torch.manual_seed(1)
    other = MODELS[name]()
    normalise_(other, sf.Plan.of(other))
    assert not torch.equal(output(other, name), output(model, name))
    other.load_state_dict(model.state_dict())
    assert torch.equal(output(other, name), output(model, name))
    if name != "lstm":  # torch keeps the weights in use in a list, which cannot be copied
        copied = copy.deepcopy(model).double().float()
        assert torch.allclose(output(copied, name), output(model, name), atol=1e-5)
    fresh = sf.SteepestDescent(other, sf.Plan.of(other), lr=0.05)
    fresh.load_state_dict(optimizer.state_dict())


def test_a_tied_table_stays_tied():
    model = reference("gpt", 32, head="tied")
    normalise_(model, sf.Plan.of(model), radius=0.5)
    assert torch.equal(model.head.weight, model.embedding.weight)
    assert model.head.parametrizations.weight.original is model.embedding.parametrizations.weight.original
    model.to(torch.float64)
    assert torch.equal(model.head.weight, model.embedding.weight)


def test_a_tied_head_is_found_among_others_of_its_shape():
    model = nn.ModuleDict({"tokens": nn.Embedding(9, 4), "other": nn.Linear(4, 9), "out": nn.Linear(4, 9)})
    model["out"].weight = model["tokens"].weight
    plan = normalise_(model, sf.Plan.of(model))
    again = sf.Plan.of(model)
    assert again.hash == plan.hash
    assert again["tokens.parametrizations.weight.original"].role.name == "head"
    assert again["other.parametrizations.weight.original"].role.name == "linear"


def test_the_plan_stays_that_of_its_run():
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    plan = sf.Plan.of(model, run=sf.Run(100, 1024))
    same = normalise_(model, plan)
    assert (same.run, same.rate) == (plan.run, plan.rate)
    assert sf.SteepestDescent(model, same).param_groups[0]["lr"] == plan.rate


def test_named_parameters_present_norms_and_the_way_back():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    norms = [float(sf.Spectral().norm(model[i].weight.detach())) for i in (0, 2)]
    x = torch.randn(3, 4)
    y = model(x)
    plan = sf.Plan.of(model)
    same = normalise_(model, plan.relative_to(model), names=["0.weight", "1.weight", "2.weight"])
    assert torch.allclose(model(x), y, atol=1e-3)  # relative_to keeps four digits
    assert "1.parametrizations.weight.original" in same
    assert "0.bias" in same
    for i in (0, 1, 2):
        parametrize.remove_parametrizations(model[i], "weight")
    assert torch.allclose(model(x), y, atol=1e-3)
    assert [float(sf.Spectral().norm(model[i].weight.detach())) for i in (0, 2)] == pytest.approx(norms, rel=1e-3)
    assert list(sf.Plan.of(model)) == [name for name, _ in model.named_parameters()]


def test_fused_projections_keep_their_norms():
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model.self_attn.in_proj_weight.data[8:16] *= 10
    whole = ("*.in_proj_weight", lambda role: replace(role, view=Fused(3)))
    x, plan = torch.randn(2, 5, 8), sf.Plan.of(model, overrides=[whole])
    y = model(x)
    normalise_(model, plan.relative_to(model), names=["self_attn.in_proj_weight"])
    torch.testing.assert_close(model(x), y, rtol=0, atol=1e-3)


def test_wrong_calls_are_refused():
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    plan = sf.Plan.of(model)
    with pytest.raises(ValueError, match=r"no parameter '2\.weight'"):
        normalise_(model, plan, names=["2.weight"])
    with pytest.raises(ValueError, match="must be positive, not -1"):
        normalise_(model, plan, radius=-1.0)
    assert not any(parametrize.is_parametrized(m) for m in model)  # nothing was written
    new = normalise_(model, plan, names=["0.weight"])
    with pytest.raises(ValueError, match=r"0\.weight is missing in the model"):
        normalise_(model, plan)
    with pytest.raises(ValueError, match=r"0\.parametrizations\.weight\.original is reparametrised already"):
        normalise_(model, new)
    assert "1.parametrizations.weight.original" in normalise_(model, new, names=["1.weight"])
    parametrize.register_parametrization(model[0], "weight", nn.Identity())
    with pytest.raises(ValueError, match="computes the layer's weight from it"):
        sf.Plan.of(model)  # another one behind it


def test_measured_numbers_and_bounds_are_those_of_the_weights_in_use():
    torch.manual_seed(0)
    model = reference("gpt", 32)
    tokens = torch.arange(8).reshape(2, 4)
    plan = normalise_(model, sf.Plan.of(model), radius=2.0)
    before = copy.deepcopy(model)
    optimizer = sf.SteepestDescent(model, plan, lr=0.1)
    model(tokens).logsumexp(-1).sum().backward()
    optimizer.step()
    numbers = sf.measure(model, tokens, before=before, plan=plan, names=["blocks.0.mlp"])
    assert not [name for name in numbers if "parametrizations" in name]
    query, value = (numbers[f"blocks.0.attention.{name}"] for name in ("query", "value"))
    assert query["forward_bound"] <= 2.0 + 1e-5  # each head has norm 2
    assert value["forward_bound"] == pytest.approx(2.0, rel=1e-5)
    assert 0 < query["update"] <= query["update_bound"] * query["input"]
    assert numbers["blocks.0.mlp"]["forward"] <= numbers["blocks.0.mlp"]["forward_bound"] * 1.2
    assert numbers["head"]["loss_dependency_bound"] == pytest.approx(4 * 2.0 * math.log(256), rel=1e-5)
