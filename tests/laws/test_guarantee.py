"""Bounds through the optimizer: every role, every step; writes from outside, resuming, a lower radius.

Twice: as on a CPU, and as on an accelerator, where nothing may be read on the host (`device.on_cpu` is made to say so).
"""

import copy

import torch
from torch import nn

import surefoot as sf
from combinations import combinations
from surefoot.experiment.data.sources import load
from surefoot.experiment.training.config import TrainConfig
from surefoot.experiment.training.run import Run

RADIUS = 1.5
FEW, MANY = 100, 200  # both have jumps of the rate and gradients of every kind
DTYPES = [torch.float32, torch.bfloat16]
DEVICES = ["cpu", "accelerator"]
CLIPS = [sf.PostClip(RADIUS), sf.PostClip(RADIUS, 1), sf.PostClip(RADIUS, 5), sf.Rescale(RADIUS)]


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


def train(model, optimizer, steps):
    """A jump to a larger rate now and then."""
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = 1.0 if step % 30 == 29 else 0.1
        pull(model, step, torch.Generator().manual_seed(step))
        optimizer.step()


def highest_norms(model, plan, optimizer, steps, after=lambda: None):
    """The largest norm of each parameter after any of these steps, each followed by `after`."""
    highest = dict.fromkeys(plan.placements, 0.0)
    for step in steps:
        train(model, optimizer, [step])
        after()
        highest = {name: max(highest[name], norm) for name, norm in norms(model, plan).items()}
    return highest


def float32_or_first(scheme, dtype, steps):
    return steps == FEW and (dtype == torch.float32 or scheme == CLIPS[0])


@combinations(float32_or_first, scheme=[*CLIPS, sf.PreDecay(1 / RADIUS)], dtype=DTYPES, steps=[FEW, MANY])
def test_every_role_is_inside_after_every_step(scheme, dtype, steps):
    model, plan, optimizer = build(scheme, lr=0.05, dtype=dtype)
    start = norms(model, plan)
    highest = highest_norms(model, plan, optimizer, range(steps))
    tolerance = 1e-3 if dtype == torch.float32 else 4e-3
    bound = {name: max(start[name], RADIUS) if isinstance(scheme, sf.PreDecay) else RADIUS for name in start}
    assert {n: h / bound[n] for n, h in highest.items() if h > bound[n] * (1 + tolerance)} == {}


@combinations(float32_or_first, scheme=CLIPS, dtype=DTYPES, steps=[FEW, MANY])
def test_every_role_is_inside_on_an_accelerator(accelerator, scheme, dtype, steps):
    model, plan, optimizer = build(scheme, lr=0.05, dtype=dtype)
    highest = highest_norms(model, plan, optimizer, range(steps))
    tolerance = 1e-3 if dtype == torch.float32 else 4e-3
    assert {name: norm for name, norm in highest.items() if norm > RADIUS * (1 + tolerance)} == {}
    assert min(highest.values()) > 0.9 * RADIUS, "scaled down for nothing"


@combinations(
    pairs=True,
    indirect=["device"],
    recipe=[sf.recipes.lion(), sf.recipes.moga_row(3.0), sf.recipes.moga_column(), sf.recipes.muon()],
    scheme=[sf.PostClip(RADIUS), sf.PreDecay(1 / RADIUS)],
    device=DEVICES,
)
def test_steps_of_another_norm_stay_inside(device, recipe, scheme):
    """Steps of unknown norm, with a problem for each row or entry: the radius is of the weight's norm all the same."""
    model, plan, optimizer = build(scheme, lr=0.05, recipe=recipe)
    start = norms(model, plan)
    for name, norm in highest_norms(model, plan, optimizer, range(31)).items():
        bound = max(start[name], RADIUS) if isinstance(scheme, sf.PreDecay) else RADIUS
        assert norm <= bound * (1 + 1e-3), name


def test_free_training_leaves_the_ball():
    model, plan, optimizer = build(sf.Free(), lr=0.05)
    assert min(highest_norms(model, plan, optimizer, range(FEW)).values()) > 1.2 * RADIUS


def test_a_weight_written_from_outside_is_bounded_at_the_next_step(device):
    model, plan, optimizer = build(sf.PostClip(RADIUS), lr=0.05)
    train(model, optimizer, range(3))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(100)
    highest = highest_norms(model, plan, optimizer, range(3, 5))
    assert max(highest.values()) <= RADIUS * (1 + 1e-3)


@combinations(
    pairs=True,
    indirect=["device"],
    device=DEVICES,
    order=["model first", "optimizer first"],
    scheme=[sf.PostClip(RADIUS), sf.StreamingPostClip(RADIUS, 3)],
)
def test_resuming_is_bit_exact(device, order, scheme):
    model, _, optimizer = build(scheme, lr=0.05)
    train(model, optimizer, range(21))
    saved = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    train(model, optimizer, range(21, 42))
    other, _, again = build(scheme, lr=0.05)
    loads = [lambda: other.load_state_dict(saved[0]), lambda: again.load_state_dict(saved[1])]
    for restore in loads if order == "model first" else loads[::-1]:
        restore()
    train(other, again, range(21, 42))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_a_bound_loaded_without_its_weights_is_revalidated(device):
    """An older state beside the present weights: its running bound is too low for them."""
    model, plan, optimizer = build(sf.PostClip(RADIUS, 10), lr=0.05)
    train(model, optimizer, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    highest = highest_norms(model, plan, optimizer, range(2, 32), lambda: optimizer.load_state_dict(saved))
    assert max(highest.values()) <= RADIUS * (1 + 1e-3)


def test_a_lower_radius_holds_from_the_next_step(device):
    model, plan, optimizer = build(sf.PostClip(RADIUS), lr=0.05)
    train(model, optimizer, range(30))
    plan = sf.Plan.of(model, stabiliser=sf.PostClip(RADIUS / 2), overrides=[("experts", "experts")])
    highest = highest_norms(model, plan, sf.SteepestDescent(model, plan, lr=0.05), range(30, 40))
    assert max(highest.values()) <= RADIUS / 2 * (1 + 1e-3)


def test_scaling_instead_of_clipping_is_logged_once(accelerator, caplog):
    model, _, optimizer = build(sf.PostClip(RADIUS), lr=0.05)
    train(model, optimizer, range(3))
    assert [record.name for record in caplog.records] == ["surefoot"]
    assert "scaled down by a proven bound" in caplog.text


@combinations(
    lambda stabiliser, log2_lr: log2_lr == -1 and stabiliser != "post_clip:1.5:1",
    stabiliser=["post_clip:1.5", "post_clip:1.5:1", "pre_decay:0.5"],
    log2_lr=[-4, -3, -2, -1],
)
def test_real_training_stays_inside_at_every_rate(stabiliser, log2_lr):
    """The reference GPT on the integer language, at rates from the usual to eight times that."""
    config = TrainConfig(width=32, lr=2.0**log2_lr, steps=25, stabiliser=stabiliser, batch_size=4, context=16)
    training = Run(config, load("markov:32"))
    plan = sf.Plan.of(training.model)
    start = norms(training.model, plan)
    for _ in range(config.steps):
        training.advance()
        for name, norm in norms(training.model, plan).items():
            bound = max(start[name], 2.0) if stabiliser.startswith("pre") else RADIUS
            assert norm <= bound * (1 + 1e-3), (name, training.step)
