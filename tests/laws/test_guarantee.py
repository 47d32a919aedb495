"""Bounds through the optimizer: every role, every step; outside writes, resuming, a lower radius.

Twice: as on a CPU, and as on an accelerator, where nothing may be read on the host (`device.on_cpu` is made to say so).
"""

import copy

import pytest
import torch
from torch import nn

import surefoot as sf
from surefoot.experiment.data.corpus import load
from surefoot.experiment.training.config import TrainConfig
from surefoot.experiment.training.run import Run
from surefoot.geometry import spectral
from surefoot.stabilise.running_bound import RunningBound

RADIUS = 1.5
STEPS = 120


class Everything(nn.Module):
    """One parameter of each role."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.linear = nn.Linear(16, 24)
        self.norm = nn.LayerNorm(24)
        self.conv = nn.Conv2d(4, 6, 3, groups=2)
        self.experts = nn.Parameter(torch.randn(3, 8, 24))
        self.head = nn.Linear(24, 20, bias=False)

    def get_output_embeddings(self) -> nn.Module:
        """The LM head."""
        return self.head


def build(stabiliser, lr, dtype=torch.float32, recipe=sf.recipes.beyond_mup()):  # noqa: B008
    torch.manual_seed(0)
    model = Everything().to(dtype)
    plan = sf.Plan.of(model, recipe, stabiliser=stabiliser, overrides=[("experts", "experts")])
    plan.initialise_(model, seed=0)
    return model, plan, sf.SteepestDescent(model, plan, lr=lr)


def pull(model, step, generator):
    """Outward along the weight, in a few directions, anywhere, exploding: in turn."""
    for p in model.parameters():
        noise = torch.randn(p.shape, generator=generator).to(p.dtype)
        p.grad = (-p.detach() - 0.1, -torch.ones_like(p), noise, noise * 1e6)[step % 4 if step % 50 < 25 else 0]


def norms(model, plan):
    """Each parameter's norm over its role's unit of radius, by float64."""
    return {
        name: float(plan[name].role.weight_geometry.norm(plan[name].role.view.split(p.detach().double())[0]).max())
        / plan[name].role.radius_unit(plan[name].blocks[0])
        for name, p in model.named_parameters()
    }


def run(model, plan, optimizer, steps=range(STEPS), watch=lambda step: None):
    """The largest norm of each parameter after any of these steps."""
    highest = dict.fromkeys(plan.placements, 0.0)
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for group in optimizer.param_groups:
            group["lr"] = 1.0 if step % 30 == 29 else 0.1  # a jump to a larger rate now and then
        pull(model, step, generator)
        optimizer.step()
        watch(step)
        highest = {name: max(highest[name], norm) for name, norm in norms(model, plan).items()}
    return highest


@pytest.mark.parametrize("scheme", [sf.PostClip(RADIUS), sf.PostClip(RADIUS, 1), sf.PostClip(RADIUS, 5),
                                    sf.PreDecay(1 / RADIUS), sf.Rescale(RADIUS)], ids=repr)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_role_is_inside_after_every_step(scheme, dtype):
    model, plan, optimizer = build(scheme, lr=0.05, dtype=dtype)
    start = norms(model, plan)
    highest = run(model, plan, optimizer)
    tolerance = 1e-3 if dtype == torch.float32 else 4e-3
    bound = {name: max(start[name], RADIUS) if isinstance(scheme, sf.PreDecay) else RADIUS for name in start}
    assert {n: h / bound[n] for n, h in highest.items() if h > bound[n] * (1 + tolerance)} == {}


@pytest.mark.parametrize("scheme", [sf.PostClip(RADIUS), sf.PostClip(RADIUS, 1), sf.PostClip(RADIUS, 5),
                                    sf.Rescale(RADIUS)], ids=repr)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_role_is_inside_on_an_accelerator(accelerator, scheme, dtype):
    model, plan, optimizer = build(scheme, lr=0.05, dtype=dtype)
    highest = run(model, plan, optimizer)
    tolerance = 1e-3 if dtype == torch.float32 else 4e-3
    assert {name: norm for name, norm in highest.items() if norm > RADIUS * (1 + tolerance)} == {}
    assert min(highest.values()) > 0.9 * RADIUS, "scaled down for nothing"


@pytest.mark.parametrize("recipe", [sf.recipes.lion(), sf.recipes.moga_row(3.0), sf.recipes.moga_column(),
                                    sf.recipes.muon()], ids=lambda recipe: recipe.name)  # fmt: skip
@pytest.mark.parametrize("scheme", [sf.PostClip(RADIUS), sf.PreDecay(1 / RADIUS)], ids=repr)
def test_steps_of_another_norm_stay_inside(device, recipe, scheme):
    """Of unknown length, and for each row or entry its own: the bound is the weight's norm's all the same."""
    model, plan, optimizer = build(scheme, lr=0.05, recipe=recipe)
    start = norms(model, plan)
    for name, norm in run(model, plan, optimizer, range(40)).items():
        bound = max(start[name], RADIUS) if isinstance(scheme, sf.PreDecay) else RADIUS
        assert norm <= bound * (1 + 1e-3), name


def test_free_training_leaves_the_ball():
    model, plan, optimizer = build(sf.Free(), lr=0.05)
    assert min(run(model, plan, optimizer).values()) > 1.2 * RADIUS


def test_a_weight_written_from_outside_is_looked_at_again(device):
    model, plan, optimizer = build(sf.PostClip(RADIUS), lr=0.05)
    run(model, plan, optimizer, range(3))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(100)
    highest = run(model, plan, optimizer, range(3, 5))
    assert max(highest.values()) <= RADIUS * (1 + 1e-3)


@pytest.mark.parametrize("scheme", [sf.PostClip(RADIUS), sf.StreamingPostClip(RADIUS, 3)], ids=repr)
@pytest.mark.parametrize("order", ["model first", "optimizer first"])
def test_resuming_is_bit_exact(device, order, scheme):
    model, plan, optimizer = build(scheme, lr=0.05)
    run(model, plan, optimizer, range(37))
    saved = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    run(model, plan, optimizer, range(37, 80))
    other, plan, again = build(scheme, lr=0.05)
    loads = [lambda: other.load_state_dict(saved[0]), lambda: again.load_state_dict(saved[1])]
    for restore in loads if order == "model first" else loads[::-1]:
        restore()
    run(other, plan, again, range(37, 80))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_a_bound_loaded_without_its_weights_is_not_believed(device):
    """An older state beside the present weights: its running bound is proven anew, or it would let them walk out."""
    model, plan, optimizer = build(sf.PostClip(RADIUS, 10), lr=0.05)
    run(model, plan, optimizer, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    highest = run(model, plan, optimizer, range(2, 60), lambda step: optimizer.load_state_dict(saved))
    assert max(highest.values()) <= RADIUS * (1 + 1e-3)


def test_a_lower_radius_takes_hold_at_the_next_step(device):
    model, plan, optimizer = build(sf.PostClip(RADIUS), lr=0.05)
    run(model, plan, optimizer, range(30))
    plan = sf.Plan.of(model, stabiliser=sf.PostClip(RADIUS / 2), overrides=[("experts", "experts")])
    highest = run(model, plan, sf.SteepestDescent(model, plan, lr=0.05), range(30, 40))
    assert max(highest.values()) <= RADIUS / 2 * (1 + 1e-3)


@pytest.mark.parametrize("radius", [100.0, RADIUS])
def test_costly_projections_are_rare(monkeypatch, radius):
    """A matrix is looked at once in `period` steps, whether it is far from its bound or held at it."""
    looked = []
    monkeypatch.setattr(spectral, "mclip", lambda x, limit: looked.append(len(x)) or sf.mclip(x, limit))
    torch.manual_seed(0)
    layer = nn.Linear(16, 16, bias=False)
    plan = sf.Plan.of(layer, stabiliser=sf.PostClip(radius, 10))
    optimizer = sf.SteepestDescent(layer, plan, lr=0.01)
    for _ in range(100):
        layer.weight.grad = -layer.weight.detach().clone()
        optimizer.step()
    assert 8 <= sum(looked) <= 12


@pytest.mark.parametrize(("scheme", "each"), [(sf.PostClip(RADIUS, 10), 10), (sf.PostClip(RADIUS, 1), 1),
                                              (sf.PostClip(RADIUS), 16)], ids=repr)  # fmt: skip
def test_proofs_on_an_accelerator_are_rare(monkeypatch, accelerator, scheme, each):
    certified = []
    certificate = sf.Spectral.certificate
    monkeypatch.setattr(sf.Spectral, "certificate", lambda self, w: certified.append(1) or certificate(self, w))
    layer = nn.Linear(16, 16, bias=False)
    optimizer = sf.SteepestDescent(layer, sf.Plan.of(layer, stabiliser=scheme), lr=0.01)
    counts = []
    for _ in range(61):
        layer.weight.grad = -layer.weight.detach().clone()
        optimizer.step()
        counts.append(len(certified))
    rises = [step for step in range(1, 61) if counts[step] > counts[step - 1]]
    assert rises == list(range(each, 61, each))


def test_after_a_step_of_unknown_length_the_norm_is_proven_at_once(accelerator):
    """An orthogonal matrix: by its Frobenius norm, four times the other, it would be scaled down for nothing."""
    w = torch.linalg.qr(torch.randn(1, 16, 16, generator=torch.Generator().manual_seed(0))).Q
    geometry = sf.Spectral()
    state = RunningBound.init_state(w, geometry)
    enforced, cache = RunningBound.enforce(w, state, geometry, RADIUS, 0.1, float("inf"), 1)
    assert torch.equal(enforced, w)
    assert 1 <= float(cache["upper"]) < 1.02


def test_scaling_instead_of_clipping_is_said_once(accelerator, caplog):
    model, plan, optimizer = build(sf.PostClip(RADIUS), lr=0.05)
    run(model, plan, optimizer, range(3))
    assert [record.name for record in caplog.records] == ["surefoot"]
    assert "scaled down by a proven bound" in caplog.text


@pytest.mark.parametrize("stabiliser", ["post_clip:1.5", "post_clip:1.5:1", "pre_decay:0.5"])
def test_real_training_stays_inside_at_every_rate(stabiliser):
    """The reference GPT on the integer language, at rates from the usual to four times that."""
    corpus = load("markov:32")
    for log2_lr in (-4, -3, -2, -1):
        config = TrainConfig.of(width=32, lr=2.0**log2_lr, steps=25, stabiliser=stabiliser, batch_size=4, context=16)
        training = Run(config, corpus)
        plan = sf.Plan.of(training.model)
        start = norms(training.model, plan)
        for _ in range(config.schedule.steps):
            training.advance()
            for name, norm in norms(training.model, plan).items():
                bound = max(start[name], 2.0) if stabiliser.startswith("pre") else RADIUS
                assert norm <= bound * (1 + 1e-3), (name, training.step)


@pytest.mark.parametrize("period", [1, 4, 32, None])
@pytest.mark.parametrize("recipe", [sf.recipes.moga_row(3.0), sf.recipes.beyond_mup()], ids=lambda r: r.name)
def test_any_period_holds_the_bound_and_leaves_the_matrix(recipe, period):
    """Steps whose length in the weight's norm nobody knows (p = 3), and periods that would eat the whole radius."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(16, 16, bias=False)
    plan = sf.Plan.of(layer, recipe, stabiliser=sf.PostClip(2.0, period))
    plan.initialise_(layer)
    optimizer = sf.SteepestDescent(layer, plan, lr=0.3)
    pull = torch.randn(16, 16)
    norms = []
    for _ in range(30):
        layer.weight.grad = pull.clone()
        optimizer.step()
        norms.append(float(sf.Spectral().norm(layer.weight.detach())))
    assert max(norms) <= 2 * (1 + 1e-3)
    assert min(norms[10:]) >= 0.99
