"""What AdamW began goes on: its averages in each role's layout, a rate by independent maths, and clear refusals."""

import copy
import io
import math

import pytest
import torch
from torch import nn

import surefoot as sf
from surefoot.views import Fused

F64 = torch.float64


class Net(nn.Module):
    """Embedding, a fused projection, a square matrix, a gain and a head."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.table, self.qkv, self.out = nn.Embedding(11, 6), nn.Linear(6, 18, bias=False), nn.Linear(6, 6, bias=False)
        self.norm, self.head = nn.LayerNorm(6, bias=False), nn.Linear(6, 11, bias=False)
        self.to(dtype)

    def forward(self, tokens):
        q, k, v = self.qkv(self.table(tokens)).chunk(3, -1)
        return self.head(self.norm(self.out((q * k).tanh() + v)))


def plan_of(net, recipe=None, **options):
    """The default plan, `qkv` as three matrices."""

    def three(role):
        return sf.roles.replace(role, view=Fused(3))

    return sf.Plan.of(net, recipe, head="head", overrides=[("qkv.weight", three)], **options)


def begun(dtype=torch.float32, steps=4, kind=torch.optim.AdamW, net=None, **options):
    """A model that AdamW has trained for some steps."""
    torch.manual_seed(0)
    net = net or Net(dtype)
    adamw = kind([p for p in net.parameters() if p.requires_grad], **{"lr": 0.01, "betas": (0.8, 0.97)} | options)
    train(net, adamw, range(steps))
    return net, adamw


def train(net, optimizer, steps):
    for step in steps:
        tokens = torch.randint(11, (4, 7), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(tokens).flatten(0, 1), tokens.roll(1, 1).flatten()).backward()
        optimizer.step()


def test_momentum_is_the_mean_without_its_bias_and_tables_keep_their_rows_history():
    net, adamw = begun()
    ours = sf.from_adamw(net, adamw, plan_of(net))
    for name in ("qkv", "out", "norm"):
        p = getattr(net, name).weight
        torch.testing.assert_close(ours.state[p]["momentum"], adamw.state[p]["exp_avg"] / (1 - 0.8**4))
    for p in (net.table.weight, net.head.weight):
        old, new = adamw.state[p], ours.state[p]
        first = old["exp_avg"].double() / (1 - 0.8**4) * (1 - 0.9**4)  # of RowAdam(.9, .98)
        second = old["exp_avg_sq"].double().mean(-1) / (1 - 0.97**4) * (1 - 0.98**4)
        torch.testing.assert_close(new["exp_avg"].double(), first, rtol=1e-5, atol=1e-9)
        torch.testing.assert_close(new["row_sq"].double().flatten(), second, rtol=1e-5, atol=1e-12)
        assert new["step"] == 4


@pytest.mark.parametrize("recipe", [sf.recipes.steady, sf.recipes.muon])
def test_squares_that_adamw_forgot_more_slowly_break_no_bound_of_a_step(recipe):
    """A gradient that grew a thousandfold: with its .999, m is 7 times the root of v, where the recipe promises 1.7."""
    table = nn.Embedding(4, 8)
    adamw = torch.optim.AdamW(table.parameters(), lr=1e-3)
    for step in range(2000):
        table.weight.grad = torch.full((4, 8), 1e-3 if step < 1995 else 1.0)
        adamw.step()
    ours = sf.from_adamw(table, adamw, sf.Plan.of(table, recipe(), head=()), lr=2**-4)
    for _ in range(3):
        before, bound = table.weight.detach().clone(), ours.stability()["weight"]["update_upper"]
        table.weight.grad = torch.full((4, 8), 0.3)
        ours.step()
        assert ours.stability({"weight": before})["weight"]["update_measured"] <= bound


def test_parts_that_stay_with_adam_keep_all_of_it_and_own_memory():
    net, adamw = begun(betas=(0.9, 0.95))
    plan = plan_of(net, sf.recipes.muon(adam_lr=0.1))
    ours = sf.from_adamw(net, adamw, plan, lr=0.02)
    assert plan["table.weight"].role.momentum == sf.Adam(0.9, 0.95)
    for name in ("exp_avg", "exp_avg_sq", "step"):
        torch.testing.assert_close(
            ours.state[net.table.weight][name], adamw.state[net.table.weight][name], rtol=0, atol=0
        )
    before = copy.deepcopy(adamw.state_dict()["state"])
    train(net, ours, range(4, 6))
    assert all(torch.equal(x, adamw.state_dict()["state"][i][n]) for i, own in before.items() for n, x in own.items())


def reach(beta, ahead):
    """By a sum over the weights of independent gradients of one average, far from its start."""
    weights = [1 - ahead] + [ahead * (1 - beta) * beta**i for i in range(2000)]
    return sum(weights) / math.sqrt(sum(x * x for x in weights))


@pytest.mark.parametrize("amsgrad", [False, True])
def test_the_rate_of_a_role_is_that_at_which_it_moves_as_far(amsgrad):
    """Two groups of different rates; matrices by singular value decomposition in float64, rows by RowAdam's formula."""
    torch.manual_seed(0)
    net = Net(F64)
    rest = [net.table.weight, net.norm.weight, net.head.weight, net.out.weight]
    adamw = torch.optim.AdamW(
        [{"params": [net.qkv.weight], "lr": 0.03}, {"params": rest}], lr=0.01, betas=(0.8, 0.97), amsgrad=amsgrad
    )
    train(net, adamw, range(4))
    plan, logs = plan_of(net), []
    for name, lr in (("qkv.weight", 0.03), ("out.weight", 0.01)):
        state, placement = adamw.state[net.get_parameter(name)], plan[name]
        mean = state["exp_avg"] / (1 - 0.8**4)
        second = state["max_exp_avg_sq" if amsgrad else "exp_avg_sq"] / (1 - 0.97**4)
        theirs = lr * (mean / (second.sqrt() + 1e-8)).norm() * reach(0.8, 0.8)
        pairs = zip(placement.role.view.split(mean), placement.lr_scales, strict=True)
        matrices = [(matrix, scale) for block, scale in pairs for matrix in block]
        assert len(matrices) == (3 if name == "qkv.weight" else 1)
        square = 0.0
        for block, scale in matrices:
            u, values, v = torch.linalg.svd(block, full_matrices=False)
            v = v * (values > 1e-9 * values[0])[:, None]  # of `out` one is 0: LayerNorm takes its direction away
            square += (scale * math.sqrt(block.shape[0] / block.shape[1]) * (u @ v)).square().sum()
        logs.append(math.log(theirs / (math.sqrt(square) * reach(0.9, 0.5))))
    ours = sf.from_adamw(net, adamw, plan)
    rates = {group["role"]: group["lr"] for group in ours.param_groups}
    assert rates["linear"] == pytest.approx(math.exp(sum(logs) / 2), rel=1e-3)
    state, placement = adamw.state[net.table.weight], plan["table.weight"]
    mean, second = state["exp_avg"] / (1 - 0.8**4), state["exp_avg_sq"] / (1 - 0.97**4)
    largest = state["max_exp_avg_sq"] / (1 - 0.97**4) if amsgrad else second
    update = 0.01 * (mean / (largest.sqrt() + 1e-8)).norm() * reach(0.8, 0.8)
    count, square = 5, 0.02 * mean.square().mean(-1) + 0.98 * (1 - 0.98**4) * second.mean(-1)
    first = (0.1 + 0.9 * (1 - 0.9**4)) / (1 - 0.9**count)  # its next step, along the same mean once more
    row = first * mean / (square / (1 - 0.98**count)).sqrt().clamp_min(1e-150)[:, None]
    expected = update / (placement.lr_scales[0] * row.norm() * reach(0.9, 0.9))
    assert rates["embedding"] == pytest.approx(float(expected), rel=1e-3)


def test_under_hyperball_the_rate_is_relative_to_the_weights():
    """Its steps are `eta |w|` long, whatever the direction: of fused blocks together, too."""
    net, adamw = begun(F64)
    net.out.weight.data.mul_(50)
    logs = []
    for p in (net.qkv.weight, net.out.weight):
        mean, second = adamw.state[p]["exp_avg"] / (1 - 0.8**4), adamw.state[p]["exp_avg_sq"] / (1 - 0.97**4)
        theirs = 0.01 * (mean / (second.sqrt() + 1e-8)).norm() * reach(0.8, 0.8)
        logs.append(math.log(theirs / (p.detach().norm() * reach(0.95, 0.95**2))))
    ours = sf.from_adamw(net, adamw, plan_of(net, sf.recipes.hyperball()))
    assert next(group["lr"] for group in ours.param_groups if group["role"] == "linear") == pytest.approx(
        math.exp(sum(logs) / 2), rel=1e-3
    )


def test_what_adamw_held_still_stays_so():
    """A role of rate 0 keeps it; a part of one is refused by name; so are groups of which only one maximizes."""
    torch.manual_seed(0)
    net = Net()

    def continued(still, **options):
        groups = [
            {"params": still, **options},
            {"params": [p for p in net.parameters() if all(p is not q for q in still)]},
        ]
        adamw = torch.optim.AdamW(groups, lr=0.01)
        train(net, adamw, range(3))
        return sf.from_adamw(net, adamw, plan_of(net))

    ours = continued([net.table.weight], lr=0.0)
    rates, before = {group["role"]: group["lr"] for group in ours.param_groups}, net.table.weight.detach().clone()
    assert [role for role, lr in rates.items() if not lr] == ["embedding"]
    train(net, ours, range(3, 6))
    assert torch.equal(net.table.weight, before)
    with pytest.raises(ValueError, match=r"rate is 0 for qkv\.weight but not for out\.weight, both linear: freeze qkv"):
        continued([net.qkv.weight], lr=0.0)
    with pytest.raises(ValueError, match="the optimizer's groups differ in maximize"):
        continued([net.table.weight], maximize=True)


@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.RAdam])
def test_other_adams_whose_steps_have_another_length_are_refused(kind):
    net, other = begun(kind=kind)
    with pytest.raises(ValueError, match=f"from_adamw reads AdamW or Adam, not {kind.__name__}"):
        sf.from_adamw(net, other, plan_of(net))


def test_it_resumes_through_a_state_dict():
    net, adamw = begun()
    plan = plan_of(net)
    ours = sf.from_adamw(net, adamw, plan)
    saved, other = io.BytesIO(), copy.deepcopy(net)
    torch.save(ours.state_dict(), saved)
    again = sf.SteepestDescent(other, plan, lr=1.0)
    again.load_state_dict(torch.load(io.BytesIO(saved.getvalue())))
    train(net, ours, range(4, 7))
    train(other, again, range(4, 7))
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), other.parameters(), strict=True))


def test_momentum_in_eight_bits_is_that_of_float32_rounded():
    net, adamw = begun()
    ours = sf.from_adamw(net, adamw, plan_of(net), precision=sf.Precision(torch.int8))
    full = sf.from_adamw(net, adamw, plan_of(net)).state[net.out.weight]["momentum"]
    state = ours.state[net.out.weight]
    packed = sf.optim.precision.average(state, "momentum", torch.float32)
    assert state["momentum"].dtype == torch.int8
    torch.testing.assert_close(packed, full, rtol=0.0, atol=float(full.abs().max()) / 50)
    train(net, ours, range(4, 6))


def test_frozen_tied_and_untouched_parameters():
    class Tied(Net):
        def __init__(self):
            super().__init__()
            self.head.weight = self.table.weight
            self.out.requires_grad_(False)
            self.idle = nn.Linear(6, 6, bias=False)

    net, adamw = begun(net=Tied())
    ours = sf.from_adamw(net, adamw, plan_of(net))
    assert ours.state[net.table.weight]["step"] == 4
    assert not ours.state.get(net.out.weight)
    assert not ours.state.get(net.idle.weight)
    frozen = net.out.weight.clone()
    train(net, ours, range(4, 6))
    assert torch.equal(net.out.weight, frozen)


def test_what_a_bound_would_cut_is_logged_in_one_line_with_the_remedy(caplog):
    net, adamw = begun()
    net.out.weight.data.mul_(50)
    plan = plan_of(net, stabiliser=sf.PostClip(4.0))
    sf.from_adamw(net, adamw, plan)
    (record,) = caplog.records
    assert "out.weight from" in record.message
    assert "to 4;" in record.message
    assert "relative_to(model)" in record.message
    assert "qkv" not in record.message
    caplog.clear()
    sf.from_adamw(net, adamw, plan.relative_to(net))
    sf.from_adamw(net, adamw, plan_of(net))
    sf.from_adamw(net, adamw, plan_of(net, stabiliser=sf.Normalise()))  # its radius is the norm at the start
    assert not caplog.records


def test_what_it_cannot_continue_is_refused_by_name():
    net, adamw = begun()
    other = Net()
    with pytest.raises(ValueError, match=r"shape \(11, 6\) that is not the model's"):
        sf.from_adamw(other, adamw, plan_of(other))
    net.late = nn.Linear(6, 6)
    with pytest.raises(ValueError, match=r"late\.weight is trainable"):
        sf.from_adamw(net, adamw)
    for momentum in (0.9, 0.0):
        net, sgd = begun(kind=lambda params, lr, betas, momentum=momentum: torch.optim.SGD(params, lr, momentum))
        with pytest.raises(ValueError, match=r"SGD keeps no 'exp_avg' for table\.weight"):
            sf.from_adamw(net, sgd, plan_of(net))
    for steps, lr in ((0, 0.01), (2, 0.0)):
        net, adamw = begun(steps=steps, lr=lr)
        with pytest.raises(ValueError, match=r"it has taken no step, or its rate is 0 now; give lr="):
            sf.from_adamw(net, adamw, plan_of(net))
        assert sf.from_adamw(net, adamw, plan_of(net), lr=0.1).param_groups[0]["lr"] == 0.1


def test_climbing_goes_on_climbing():
    net, adamw = begun(maximize=True)
    assert sf.from_adamw(net, adamw, plan_of(net)).param_groups[0]["maximize"]


def test_numbers_are_converted_as_before_with_a_warning():
    with pytest.warns(DeprecationWarning, match="convert"):
        found = sf.from_adamw(1e-3, 0.1, 400, 100)
    assert found == sf.convert(sf.Setting(1e-3, 0.1), "adamw", "natural", d_in=400, d_out=100)
