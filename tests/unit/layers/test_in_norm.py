"""In Norm, Out Norm and residual blocks against loops in float64, at every size of input, forward and backward."""

import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import gradcheck, gradgradcheck

import surefoot as sf
from surefoot.layers import InNormLinear, OutNormLinear, PostInNorm, PostNorm, PreNorm, rms_norm

SHAPES = [(24, 7), (7, 24), (8, 8), (1, 3), (3, 1)]
SIZES = [1e-30, 1e-20, 1e-5, 1.0, 1e5, 1e30]


def norm(x):
    """`x / rms(x)`, 0 for 0: one vector, in float64, its entries scaled by the largest before they are squared."""
    top = np.abs(x).max()
    return x if top == 0 else (x / top) / math.sqrt(sum((float(v) / float(top)) ** 2 for v in x) / len(x))


def expected(layer, x):
    """`W Norm(x) + b`, vector by vector."""
    weight = layer.weight.detach().double().numpy()
    bias = 0 if layer.bias is None else layer.bias.detach().double().numpy()
    rows = [weight @ norm(row) + bias for row in x.detach().double().reshape(-1, x.shape[-1]).numpy()]
    return torch.tensor(np.array(rows).reshape(*x.shape[:-1], len(weight)))


def inputs(d, dtype, size=1.0):
    """Vectors of one size but for the last, which is 0."""
    x = size * torch.randn(2, 3, d, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x[-1, -1] = 0
    return x.to(dtype)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-13), (torch.float32, 3e-6), (torch.bfloat16, 0.03)])
def test_in_norm_is_the_formula_at_every_size_of_input(shape, bias, dtype, error):
    torch.manual_seed(0)
    layer = InNormLinear(*shape, bias=bias, dtype=dtype)
    assert (layer.bias is None) != bias
    assert tuple(layer.weight.shape) == (shape[1], shape[0])
    for size in SIZES:
        x = inputs(shape[0], dtype, size)
        assert layer(x).dtype == dtype
        assert (layer(x).double() - expected(layer, x)).abs().max() <= error * 3
        mixed = torch.cat([x, inputs(shape[0], dtype)])  # sizes far apart in one batch
        assert (layer(mixed).double() - expected(layer, mixed)).abs().max() <= error * 3


def test_no_bias_and_no_epsilon_by_default():
    layer = InNormLinear(16, 4)
    x = torch.randn(5, 16)
    assert layer.bias is None
    assert torch.equal(layer(x * 2.0**-30), layer(x))  # powers of two round nothing
    assert not InNormLinear(3, 2)(torch.zeros(4, 3)).any()
    assert InNormLinear(3, 2)(torch.zeros(0, 3)).shape == (0, 2)
    assert InNormLinear(3, 2)(torch.ones(3)).shape == (2,)


def test_a_gain_folds_into_the_weight():
    torch.manual_seed(0)
    pair = nn.Sequential(nn.RMSNorm(12, eps=0.0), nn.Linear(12, 5, bias=False)).double()
    nn.init.uniform_(pair[0].weight, 0.5, 2.0)
    layer, x = InNormLinear(12, 5, dtype=torch.float64), torch.randn(7, 12, dtype=torch.float64)
    layer.weight.data = pair[1].weight.data * pair[0].weight.data
    assert torch.allclose(layer(x), pair(x), rtol=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_of_first_and_second_order(shape):
    torch.manual_seed(0)
    weight = torch.randn(shape[1], shape[0], dtype=torch.float64, requires_grad=True)
    layer, x = InNormLinear(*shape, dtype=torch.float64), inputs(shape[0], torch.float64)[:1].requires_grad_(True)

    def f(x, weight):
        return torch.func.functional_call(layer, {"weight": weight}, (x,))

    assert gradcheck(f, (x, weight))
    assert gradgradcheck(f, (x, weight))


@pytest.mark.parametrize("size", [1e-30, 1e-5, 1e20])
@pytest.mark.parametrize("kind", [InNormLinear, lambda *shape: nn.Sequential(Normed(), nn.Linear(*shape, bias=False))])
def test_gradients_scale_inversely_with_the_input(size, kind):
    torch.manual_seed(0)
    layer, x = kind(6, 4), inputs(6, torch.float32)[0]
    near, far = x.clone().requires_grad_(True), (size * x).requires_grad_(True)
    g = torch.randn(3, 4)
    layer(near).backward(g)
    weight_gradient = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    layer(far).backward(g)
    assert torch.allclose(size * far.grad, near.grad, rtol=1e-4, atol=1e-6)
    for p, before in zip(layer.parameters(), weight_gradient, strict=True):
        assert torch.allclose(p.grad, before, rtol=1e-4, atol=1e-5)


class Normed(nn.Module):
    def forward(self, x):
        return rms_norm(x)


def test_zero_gives_zero_and_the_gradient_of_the_product():
    layer, x = InNormLinear(8, 4), torch.zeros(2, 8, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert not y.any()
    assert torch.allclose(x.grad, layer.weight.sum(0).expand(2, 8))


def test_the_output_may_be_written_to_and_half_of_the_gradients_left_out():
    layer, x = InNormLinear(6, 4), torch.randn(3, 6)
    F.relu_(layer(x)).sum().backward()  # the input needs no gradient, the output is overwritten
    frozen, x = copy.deepcopy(layer).requires_grad_(False), x.requires_grad_(True)
    F.relu_(frozen(x)).sum().backward()
    assert layer.weight.grad.any()
    assert frozen.weight.grad is None
    assert x.grad.any()


def test_autocast_gives_low_precision_products_and_full_precision_gradients():
    torch.manual_seed(0)
    layer, x = InNormLinear(32, 16, bias=True), torch.randn(4, 32, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(1e-10 * x)
    assert y.dtype == torch.bfloat16
    assert torch.allclose(y.float(), layer(x), atol=0.03)
    y.float().square().sum().backward()
    low = layer.weight.grad.clone()
    layer.zero_grad()
    layer(x).square().sum().backward()
    assert layer.weight.grad.dtype == torch.float32
    assert torch.allclose(low, layer.weight.grad, atol=0.05 * float(layer.weight.grad.abs().max()))


@pytest.mark.skipif(torch.__version__ < "2.10", reason="torch 2.9 cannot trace whether a device has autocast")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own, on tracing
def test_a_compiled_layer_is_the_layer():
    layer, x = InNormLinear(6, 4), torch.randn(3, 6, requires_grad=True)
    fast = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert torch.allclose(fast(x), layer(x), atol=1e-6)
    (ours,) = torch.autograd.grad(fast(x).square().sum(), x)
    (plain,) = torch.autograd.grad(layer(x).square().sum(), x)
    assert torch.allclose(ours, plain, atol=1e-5)


def test_the_plan_knows_the_layers():
    model = nn.Sequential(InNormLinear(8, 16, bias=True), OutNormLinear(16, 8))
    plan = sf.Plan.of(model)
    assert [plan[name].role.name for name in plan] == ["linear", "bias", "linear"]
    plan.initialise_(model, seed=0)
    assert 0.5 < float(sf.Spectral().norm(model[0].weight.detach())) < 1.5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_out_norm_is_the_formula(dtype):
    torch.manual_seed(0)
    layer = OutNormLinear(24, 7, bias=True, dtype=dtype)
    assert OutNormLinear(3, 2).bias is None
    x = inputs(24, dtype)
    weight, bias = (p.detach().double().numpy() for p in (layer.weight, layer.bias))
    rows = [norm(weight @ row + bias) for row in x.double().reshape(-1, 24).numpy()]
    assert torch.allclose(layer(x).double(), torch.tensor(np.array(rows)).reshape(2, 3, 7), atol=1e-5)
    tiny = OutNormLinear(24, 7, dtype=dtype)
    assert torch.allclose(tiny(1e-30 * x), tiny(x), atol=1e-5)
    assert not tiny(x)[-1, -1].any()


def test_rms_norm_is_the_formula_with_gradients():
    for size in SIZES:
        x = inputs(9, torch.float64, size)
        rows = np.array([norm(row) for row in x.reshape(-1, 9).numpy()]).reshape(2, 3, 9)
        assert torch.allclose(rms_norm(x), torch.tensor(rows), rtol=1e-12)
    x = inputs(9, torch.float64)[:1].requires_grad_(True)
    assert gradcheck(rms_norm, (x,))
    assert rms_norm(x.detach().bfloat16()).dtype == torch.bfloat16
    zero = torch.zeros(3, requires_grad=True)
    rms_norm(zero).sum().backward()
    assert torch.equal(zero.grad, torch.ones(3))


# --- residual blocks ---------------------------------------------------------------------------------------


def mlp(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6)).double()


def test_residual_blocks_are_their_formulas():
    x, f = torch.randn(4, 6, dtype=torch.float64), mlp(0)
    unit = torch.tensor(np.array([norm(row) for row in x.numpy()]))
    assert torch.allclose(PreNorm(f)(x), x + f(unit))
    after = x + f(x)
    assert torch.allclose(PostNorm(f)(x), torch.tensor(np.array([norm(row) for row in after.detach().numpy()])))
    assert torch.allclose(PostInNorm(f)(x), unit + f(unit))
    assert torch.allclose(PreNorm(f)(x + 0.0), PreNorm(Scaled(f))(x, 1.0))
    assert torch.allclose(PostNorm(Scaled(f))(x, scale=1.0), PostNorm(f)(x))


class Scaled(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x, scale):
        return scale * self.block(x)


def test_a_stack_of_post_norms_is_one_of_in_norms_with_a_norm_behind_it():
    blocks = [mlp(seed) for seed in range(4)]
    x = rms_norm(torch.randn(5, 6, dtype=torch.float64))
    post, inner = x, x
    for block in blocks:
        post, inner = PostNorm(block)(post), PostInNorm(block)(inner)
    assert torch.allclose(post, rms_norm(inner), rtol=1e-10)
    assert not torch.allclose(post, inner, atol=0.1)


def test_gradients_under_torch_func_are_those_of_backward():
    torch.manual_seed(0)
    layer, x = InNormLinear(6, 4, bias=True), torch.randn(3, 5, 6)
    parameters = {name: p.detach() for name, p in layer.named_parameters()}

    def loss(parameters, x):
        return torch.func.functional_call(layer, parameters, (x,)).square().sum()

    loss(dict(layer.named_parameters()), x).backward()
    each = torch.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
    for name, g in torch.func.grad(loss)(parameters, x).items():
        torch.testing.assert_close(g, layer.get_parameter(name).grad)
        torch.testing.assert_close(each[name].sum(0), g)
    assert torch.vmap(OutNormLinear(6, 4))(x).shape == (3, 5, 4)
