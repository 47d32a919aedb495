"""Attention logits: measured against loops in float64, bounded, scaled back, and held while a model trains."""

import math
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import surefoot as sf
from surefoot.attention import logits
from surefoot.attention.qk_clip import LogitControl
from surefoot.attention.qk_pairs import Projection, QueryKey, find_pairs
from surefoot.experiment.models.decoder import GPT, GPTConfig, Llama, LlamaConfig, Size
from surefoot.views import Fused, Interleaved, Projections

SIZE = Size(width=32, depth=2, head_dim=8, vocab=16)
TOKENS = torch.randint(16, (3, 12), generator=torch.Generator().manual_seed(0))


def llama(**options):
    torch.manual_seed(1)
    return Llama(LlamaConfig(SIZE, **options))


def gpt():
    torch.manual_seed(1)
    model = GPT(GPTConfig(SIZE, biases="all"))
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(p)
    return model


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def train(model, control, steps=1, **options):
    optimizer = sf.SteepestDescent(model, **options)
    control.hold(optimizer)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(TOKENS)[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten()).backward()
        optimizer.step()
    return optimizer


def seen(model, control):
    """The largest logits of one batch, as a control sees them."""
    handles = control.hold(sf.SteepestDescent(model, lr=0.0))
    control.largest = {}
    model(TOKENS)
    for handle in handles:
        handle.remove()
    return control.largest


# --- measured


def by_loops(q, k, scale, allowed):
    heads, group = q.shape[1], q.shape[1] // k.shape[1]
    largest = [0.0] * heads
    for b, h, i, j in torch.cartesian_prod(*map(torch.arange, (q.shape[0], heads, q.shape[2], k.shape[2]))).tolist():
        if allowed(b, h, i, j):
            logit = scale * float(q[b, h, i].double() @ k[b, h // group, j].double())
            largest[h] = max(largest[h], abs(logit))
    return torch.tensor(largest)


@pytest.mark.parametrize("chunk", [2, 512])
def test_logits_are_those_of_every_pair_that_may_attend(monkeypatch, chunk):
    monkeypatch.setattr(logits, "CHUNK", chunk)
    q, k = random(2, 4, 5, 3), random(2, 2, 7, 3, seed=1)
    mask = random(2, 1, 5, 7, seed=2) > 0
    added = torch.where(mask, random(2, 1, 5, 7, seed=3), -math.inf)
    lowest = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
    masked = by_loops(q, k, 0.5, lambda b, h, i, j: bool(mask[b, 0, i, j]))
    torch.testing.assert_close(logits.largest_logits(q, k, 0.5), by_loops(q, k, 0.5, lambda *_: True))
    causal = by_loops(q, k, 0.5, lambda b, h, i, j: j <= i)
    torch.testing.assert_close(logits.largest_logits(q, k, 0.5, causal=True), causal)
    for given in (mask, added, lowest):
        torch.testing.assert_close(logits.largest_logits(q, k, 0.5, given), masked)
    assert not torch.allclose(masked, causal)
    assert logits.largest_logits(q[:, :, :0], k, 0.5).tolist() == [0.0] * 4


# --- bounded


@pytest.mark.parametrize("width", [16, 64, 256])
def test_the_bound_is_attained_and_the_same_at_every_width(width):
    layer = nn.Linear(width, 32, bias=False)
    generator = torch.Generator().manual_seed(0)
    for rows in layer.weight.data.split(8):
        nn.init.orthogonal_(rows, gain=math.sqrt(8 / width), generator=generator)  # norm 1 in natural units
    pair = QueryKey(Projection(layer), Projection(layer), head_dim=8, scale=1 / math.sqrt(8))
    torch.testing.assert_close(pair.bound(), torch.full((4,), math.sqrt(8)))
    torch.testing.assert_close(pair.bound(input_rms=2.0), torch.full((4,), 4 * math.sqrt(8)))
    for head in range(4):
        rows = layer.weight.detach()[8 * head : 8 * head + 8]
        x = rows.T @ random(8) / math.sqrt(8 / width)
        x = x / x.square().mean().sqrt()
        logit = (rows @ x) @ (rows @ x) / math.sqrt(8)
        torch.testing.assert_close(float(logit), math.sqrt(8), rtol=1e-5, atol=0)


@pytest.mark.parametrize("build", [lambda: llama(kv_heads=2), gpt], ids=["grouped, rotated", "biases"])
def test_no_logit_of_a_batch_is_above_the_bound(build):
    model = build()
    control = LogitControl(model)
    inputs = {}
    for name in control.pairs:
        model.get_submodule(name).register_forward_pre_hook(
            lambda _, x, name=name: inputs.update({name: x[0].detach()})
        )
    largest = seen(model, control)
    assert largest.keys() == control.pairs.keys()
    for name, seen_logits in largest.items():
        r = float(inputs[name].square().mean(-1).amax().sqrt())
        bound = control.pairs[name].bound(r)
        assert (seen_logits <= bound).all()
        assert (seen_logits > 0.02 * bound).all(), "a bound so loose is of another thing"


# --- scaled back


def test_factors_multiply_to_what_each_head_needs_and_raise_nothing():
    largest = torch.tensor([400.0, 50.0, 200.0, 800.0, math.inf, math.nan, 0.0, 100.0])
    for key_heads in (8, 4, 2, 1):
        query, key = logits.logit_factors(largest, 100.0, key_heads)
        wanted = torch.tensor([0.25, 1, 0.5, 0.125, 1, 1, 1, 1])
        torch.testing.assert_close(query * key.repeat_interleave(8 // key_heads), wanted)
        assert query.max() <= 1
        assert key.max() <= 1
    torch.testing.assert_close(*logits.logit_factors(largest, 100.0, 8))


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("build", [llama, None], ids=["llama", "gpt with biases"])
def test_logits_of_the_same_batch_come_back_to_the_threshold(build, kv_heads):
    model = build(kv_heads=kv_heads) if build else gpt()
    first = "blocks.0.attention"  # what it reads does not depend on any W_q
    before = seen(model, LogitControl(model))[first]
    threshold = float(before.median())
    control = LogitControl(model, threshold)
    optimizer = sf.SteepestDescent(model, lr=0.0)
    optimizer.scale_(control.factors({first: before}))
    torch.testing.assert_close(seen(model, control)[first], before.clamp(max=threshold), rtol=1e-5, atol=0)
    assert before.max() > 1.1 * threshold


def test_layers_that_share_their_weights_get_what_the_larger_logits_need():
    layer = nn.Linear(6, 8, bias=False)
    pair = QueryKey(Projection(layer, Fused(2), 0), Projection(layer, Fused(2), 1), head_dim=4, scale=1.0)
    control = LogitControl(nn.ModuleDict({"a": nn.Identity(), "b": nn.Identity()}), 1.0, {"a": pair, "b": pair})
    for order in (("a", "b"), ("b", "a")):
        largest = dict(zip(order, (torch.tensor([16.0]), torch.tensor([4.0])), strict=True))
        assert control.factors(largest)[layer.weight].unique().tolist() == [0.25]


def test_bounds_taken_for_measurements_make_a_guarantee():
    model = gpt()
    control = LogitControl(model, threshold=0.5)
    assert all((bound > 0.5).any() for bound in control.bounds().values())
    sf.SteepestDescent(model, lr=0.0).scale_(control.factors(control.bounds()))
    assert all((bound <= 0.5 * (1 + 1e-5)).all() for bound in control.bounds().values())


@pytest.mark.parametrize(
    ("view", "rows"),
    [
        (Fused(3), [(0, 8), (8, 16)]),
        (Projections((8, 4, 4)), [(0, 8), (8, 12)]),
        (Interleaved(2, 3), None),
    ],
    ids=repr,
)
def test_fused_projections_are_scaled_where_their_rows_are(view, rows):
    layer = nn.Linear(6, 24 if rows is None or rows[1][1] == 16 else 16)
    pair = QueryKey(Projection(layer, view, 0), Projection(layer, view, 1), head_dim=4, scale=1.0)
    heads = 2
    factors = pair.factors(torch.tensor([4.0, 1.0]), 1.0)
    query, key = logits.logit_factors(torch.tensor([4.0, 1.0]), 1.0, len(pair.key.rows()["bias"]) // 4)
    wanted = torch.ones(layer.out_features)
    if rows is None:  # (heads, parts, head_dim)
        wanted = wanted.view(heads, 3, 4)
        wanted[:, 0] *= query[:, None]
        wanted[:, 1] *= key[:, None]
        wanted = wanted.flatten()
    else:
        for (start, end), by_head in zip(rows, (query, key), strict=True):
            wanted[start:end] *= by_head.repeat_interleave(4)
    torch.testing.assert_close(factors[layer.bias], wanted)
    torch.testing.assert_close(factors[layer.weight], wanted[:, None].expand_as(layer.weight))
    assert wanted.min() < 1


# --- held


def test_training_far_too_fast_keeps_its_logits_near_the_threshold():
    held, free = llama(), llama()
    control = LogitControl(held, threshold=4.0)
    train(held, control, steps=30, lr=0.25)
    assert control.largest == {}, "old maxima would hold heads back for ever"
    train(free, LogitControl(free, threshold=1e9), steps=30, lr=0.25)
    grown = max(float(x.max()) for x in seen(free, LogitControl(free)).values())
    kept = max(float(x.max()) for x in seen(held, control).values())
    assert grown > 40
    assert kept < 16  # the threshold, and what one step of this size may add


def replica(rank, file, results):
    """One of two data-parallel processes: the same model, a batch of its own, gradients averaged."""
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    model = llama()
    optimizer = sf.SteepestDescent(model, lr=0.05)
    control = LogitControl(model, threshold=1.0)
    control.hold(optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        model(TOKENS[rank : rank + 1]).square().mean().backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, dist.ReduceOp.SUM)
        optimizer.step()
    torch.save((model.state_dict(), seen(model, control)), f"{results}/{rank}.pt")
    dist.destroy_process_group()


def test_another_process_may_have_seen_more(monkeypatch):
    model = llama()
    control = LogitControl(model, threshold=3.0)
    seen_elsewhere = torch.tensor([0.0, 6.0, 0.0, 0.0, 0.0, 0.0, 0.0, 12.0])  # 4 heads of each layer
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "all_reduce", lambda x, op, group: x.copy_(torch.maximum(x, seen_elsewhere)))
    optimizer = sf.SteepestDescent(model, lr=0.0)
    control.hold(optimizer)
    control.largest = {"blocks.0.attention": torch.tensor([1.0, 1.0, 4.0, 1.0])}  # the other layer saw no batch here
    before = control.bounds()
    optimizer.step()
    for name, factors in (("blocks.0.attention", [1, 0.5, 0.75, 1]), ("blocks.1.attention", [1, 1, 1, 0.25])):
        torch.testing.assert_close(control.bounds()[name], before[name] * torch.tensor(factors))


@pytest.mark.slow
def test_replicas_with_batches_of_their_own_stay_replicas(tmp_path):
    torch.multiprocessing.spawn(replica, (tmp_path / "meeting", tmp_path), nprocs=2)
    (one, logits_one), (other, logits_other) = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert all(torch.equal(logits_one[name], logits_other[name]) for name in logits_one)
    assert max(float(x.max()) for x in logits_one.values()) < 2


def test_a_head_below_the_threshold_is_left_bit_for_bit():
    one, other = llama(), llama()
    train(one, LogitControl(one, threshold=1e6), steps=3, lr=0.05)
    plain = sf.SteepestDescent(other, lr=0.05)
    for _ in range(3):
        plain.zero_grad()
        F.cross_entropy(other(TOKENS)[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten()).backward()
        plain.step()
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))


def test_scaling_changes_the_parameter_and_no_state():
    model = llama()
    optimizer = train(model, LogitControl(model), lr=0.05)
    before = {p: {name: x.clone() for name, x in state.items()} for p, state in optimizer.state.items()}
    weight = model.blocks[0].attention.query.weight
    halved = weight.detach() / 2
    optimizer.scale_({weight: torch.full_like(weight, 0.5)})
    assert torch.equal(weight, halved)
    for p, state in optimizer.state.items():
        assert all(torch.equal(before[p][name], x) for name, x in state.items())
    assert before.keys() == optimizer.state.keys() != set()


def test_norm_bounds_stay_true_beside_it():
    model = llama()
    plan = sf.Plan.of(model, stabiliser=sf.PostClip(1.0))
    plan.initialise_(model)
    optimizer = train(model, LogitControl(model, threshold=0.5), steps=25, plan=plan, lr=0.2)
    norms = [
        float(plan[name].role.weight_geometry.norm(block).max()) / plan[name].stabilisers[0].bound
        for name, p in model.named_parameters()
        for block in plan[name].role.view.split(p.detach())
    ]
    assert max(norms) <= 1 + 1e-3
    assert optimizer.skipped() == {}


def test_batches_since_the_last_step_count_and_evaluation_does_not():
    model = llama()
    control = LogitControl(model)
    handles = control.hold(sf.SteepestDescent(model, lr=0.0))
    single = []
    for tokens in (TOKENS, TOKENS.flip(0) * 3 % 16):
        control.largest = {}
        model(tokens)
        single.append(control.largest)
    control.largest = {}
    model(TOKENS)
    model(TOKENS.flip(0) * 3 % 16)
    for name, both in control.largest.items():
        assert torch.equal(both, torch.maximum(single[0][name], single[1][name]))
        assert not torch.equal(single[0][name], single[1][name])
    control.largest = {}
    with torch.no_grad():
        model(TOKENS)
    assert control.largest == {}
    for handle in handles:
        handle.remove()
    model(TOKENS)
    assert control.largest == {}


def test_the_code_of_the_page():
    page = (Path(__file__).parents[3] / "docs" / "stability.md").read_text(encoding="utf-8")
    section = page.split("\n## Attention logits\n")[1].split("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    model = llama()
    names = {"sf": sf, "model": model, "optimizer": sf.SteepestDescent(model, lr=0.1)}
    exec(code, names)
    model(TOKENS)
    assert names["control"].largest.keys() == names["control"].bounds().keys() != set()


# --- refused


def test_what_cannot_be_controlled_is_refused():
    with pytest.raises(ValueError, match="norm's gain bounds their logits"):
        LogitControl(llama(qk_norm=True))
    for threshold in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="must be positive and finite"):
            LogitControl(llama(), threshold)
    with pytest.raises(ValueError, match="is not this optimizer's"):
        sf.SteepestDescent(llama(), lr=0.1).scale_({nn.Parameter(torch.ones(2)): torch.ones(2)})


def test_half_precision_that_overflows_is_the_largest_number_and_not_nothing():
    q = torch.full((1, 1, 2, 64), 60.0, dtype=torch.float16)
    assert logits.largest_logits(q, q, 1.0).tolist() == [torch.finfo(torch.float16).max]
    assert logits.largest_logits(q, q, 0.125).tolist() == [28800.0]  # the product alone, 230400, is no float16
    assert logits.largest_logits(q[0], q[0], 0.125).tolist() == [28800.0]


def test_a_batch_that_is_not_finite_leaves_the_others_measured():
    model = llama()
    control = LogitControl(model)
    control.hold(sf.SteepestDescent(model, lr=0.0))
    model(TOKENS)
    before = {name: x.clone() for name, x in control.largest.items()}
    kept = model.embedding.weight.data.clone()
    model.embedding.weight.data.fill_(math.nan)
    model(TOKENS)
    model.embedding.weight.data.copy_(kept)
    assert all(torch.equal(before[name], x) for name, x in control.largest.items())


def test_evaluation_with_gradients_is_no_training():
    model = llama()
    control = LogitControl(model)
    control.hold(sf.SteepestDescent(model, lr=0.0))
    model.eval()(TOKENS)
    assert control.largest == {}


def test_what_the_optimizer_does_not_hold_is_refused_before_anything_is_written():
    model = llama()
    frozen = model.blocks[1].attention.key.weight.requires_grad_(False)
    optimizer = sf.SteepestDescent(model, lr=0.1)
    with pytest.raises(ValueError, match=r"W_k of blocks\.1\.attention is not the optimizer's"):
        LogitControl(model).hold(optimizer)
    query = model.blocks[1].attention.query.weight
    before = query.detach().clone()
    with pytest.raises(ValueError, match="is not this optimizer's"):
        optimizer.scale_({query: torch.full_like(query, 0.5), frozen: torch.full_like(frozen, 0.5)})
    assert torch.equal(query, before)
    with pytest.raises(ValueError, match="no pairs"):
        LogitControl(model, pairs={})


class Eager(nn.Module):
    """Attention that forms its logits itself."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.head_dim, self.scaling = nn.Linear(4, 4), nn.Linear(4, 4), 4, 0.5

    def forward(self, x):
        return torch.softmax(self.q_proj(x) @ self.k_proj(x).mT, -1) @ x


def test_attention_that_is_not_seen_is_an_error_and_no_silence():
    model = nn.Sequential(Eager())
    control = LogitControl(model)
    assert list(control.pairs) == ["0"]
    control.hold(sf.SteepestDescent(model, sf.Plan.of(model), lr=0.1))
    with pytest.raises(RuntimeError, match="logits of 0 cannot be measured"):
        model(random(1, 3, 4))
    model.eval()(random(1, 3, 4))


def test_a_layer_that_does_not_say_its_heads_is_not_passed_over():
    model = nn.ModuleDict({"known": Eager(), "unknown": Eager()})
    del model["unknown"].scaling
    with pytest.raises(ValueError, match=r"unknown \(Eager\) has W_q and W_k"):
        LogitControl(model)


def test_a_forward_that_fails_leaves_no_trace():
    model = llama()
    control = LogitControl(model)
    control.hold(sf.SteepestDescent(model, lr=0.1))
    with pytest.raises((RuntimeError, AttributeError, TypeError)):
        model.blocks[0].attention(None, None)
    control.largest = {}
    F.scaled_dot_product_attention(*(random(1, 1, 2, 4) for _ in range(3)))
    assert control.largest == {}


def test_layers_are_found_by_what_they_hold():
    assert list(find_pairs(llama())) == ["blocks.0.attention", "blocks.1.attention"]
    pair = find_pairs(llama(kv_heads=2))["blocks.0.attention"]
    assert (pair.head_dim, pair.key.layer.out_features, pair.scale) == (8, 16, pytest.approx(8**-0.5))
