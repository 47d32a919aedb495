"""Triton's symmetric products against torch's: by its interpreter without a GPU, by the real kernels with one."""

import importlib
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

import surefoot
from laws.inputs import gaussian
from surefoot.linalg import polar
from surefoot.linalg.onednn_ops import VARIABLE
from surefoot.linalg.ops import TORCH
from surefoot.linalg.polar import polar_express_fp16

SHAPES = ((1, 1), (5, 9), (31, 40), (32, 32), (33, 100), (70, 130))


@pytest.fixture
def interpreted(monkeypatch):
    """The kernels as Python on the CPU, with small tiles so that small matrices have several."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("in a process of its own, see test_by_the_interpreter")
    module = pytest.importorskip("surefoot.linalg.triton_ops")
    monkeypatch.setattr(module, "TILE", 32)
    monkeypatch.setattr(module, "DEPTH", 16)
    module.LAUNCHED.clear()
    return module


@pytest.mark.skipif(not find_spec("triton"), reason="triton is not installed")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="is in that process")
def test_by_the_interpreter():
    """Triton decides when it is imported whether it interprets: the tests below, in another process."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout
    assert "11 passed" in done.stdout


def relative(value: torch.Tensor, truth: torch.Tensor) -> float:
    return float((value.double() - truth).abs().max() / truth.abs().max())


def compare(triton, shape, dtype, device="cpu"):
    """Gram, quadratic and product, against float64; symmetric bit for bit."""
    x = (gaussian((3, *shape), 0) / shape[1] ** 0.5).to(dtype).to(device)
    wide = x.double()
    eps = torch.finfo(dtype).eps
    gram = triton.TRITON.gram(x)
    assert gram.dtype == dtype
    assert relative(gram, wide @ wide.mT) < eps
    a = gram.double()
    for result, truth in (
        (triton.TRITON.quadratic(gram, -2.5, 0.5), -2.5 * a + 0.5 * a @ a),
        (triton.TRITON.product(gram, TORCH.quadratic(gram, 1.0, 1.0)), a @ TORCH.quadratic(gram, 1.0, 1.0).double()),
    ):
        assert relative(result, truth) < 4 * eps
        assert torch.equal(result, result.mT)
    assert torch.equal(gram, gram.mT)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_interpreted_kernels(interpreted, shape):
    """In float16: the interpreter of Triton 3.9 multiplies the bits of bfloat16 numbers as integers."""
    compare(interpreted, shape, torch.float16)
    assert interpreted.LAUNCHED == {"gram": 1, "quadratic": 1, "product": 1}


def test_strided_inputs(interpreted):
    x = gaussian((2, 70, 40)).half().mT / 8
    assert not x.is_contiguous()
    assert relative(interpreted.TRITON.gram(x), x.double() @ x.double().mT) < 1e-3


def test_float32_goes_to_torch(interpreted):
    x = gaussian((2, 40, 50))
    gram = interpreted.TRITON.gram(x)
    assert torch.equal(gram, TORCH.gram(x))
    assert torch.equal(interpreted.TRITON.product(gram, gram), TORCH.product(gram, gram))
    assert torch.equal(interpreted.TRITON.quadratic(gram, 1.0, 2.0), TORCH.quadratic(gram, 1.0, 2.0))
    assert not interpreted.LAUNCHED


@pytest.mark.parametrize("shape", [(40, 44), (40, 90)], ids=str)
def test_the_matrix_sign_by_kernels(interpreted, shape):
    x = gaussian((2, *shape))
    x = x / x.abs().amax((-2, -1), keepdim=True)
    sign = polar_express_fp16(x, interpreted.TRITON)
    torch.testing.assert_close(sign, polar_express_fp16(x, TORCH), atol=2e-2, rtol=0)
    assert set(interpreted.LAUNCHED) == {"gram", "quadratic"} | ({"product"} if shape[1] == 90 else set())


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is compiled then")
@pytest.mark.parametrize("dtype", ["*fp16", "*bf16"])
@pytest.mark.parametrize("adds", [True, False])
def test_the_kernel_compiles_for_hopper(monkeypatch, tmp_path, dtype, adds):
    """Without a GPU, by the compiler that Triton brings: matrix units, copies that run ahead, nothing spilled."""
    triton = pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    module = importlib.import_module("surefoot.linalg.triton_ops")
    names = module._lower.arg_names
    constants = {"ADDS": adds, "TILE": module.TILE, "DEPTH": module.DEPTH, "col_a": 1, "col_b": 1, "col_c": 1}
    tensors = dict.fromkeys(("a", "b", "c", "out"), dtype)
    types = dict.fromkeys(("alpha", "beta"), "fp32") | tensors | dict.fromkeys(constants, "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if types.get(name, dtype) == dtype}
    source = triton.compiler.ASTSource(
        module._lower, {name: types.get(name, "i32") for name in names}, constants, aligned
    )
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    kernel = triton.compile(source, target, {"num_warps": module.WARPS, "num_stages": module.STAGES})
    code = kernel.asm["ptx"]
    assert code.count("wgmma.mma_async") >= 4
    assert kernel.metadata.shared == module.STAGES * 2 * module.TILE * module.DEPTH * 2
    assert ".local" not in code


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is compiled then")
def test_a_graph_holds_the_kernels(monkeypatch):
    """`torch.compile` of the matrix sign is one graph with every symmetric product in it."""
    pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setattr(polar, "_large_on_a_gpu", lambda x: True)
    kernels = []

    def stop(graph, inputs):
        kernels.extend(node.target for node in graph.graph.nodes if "surefoot.symmetric" in str(node.target))
        return lambda *inputs: (inputs[0],)  # the kernels cannot run here

    torch.compile(lambda x: surefoot.msign(x, "polar_express_fp16"), fullgraph=True, backend=stop)(
        gaussian((2, 40, 90))
    )
    assert len(kernels) == 14


def test_matrices_of_a_cpu_never_go_to_triton(monkeypatch):
    monkeypatch.setenv(VARIABLE, "torch")
    assert polar.choose_ops(torch.zeros(1, 2 * polar.TRITON_MIN_ROWS, 2 * polar.TRITON_MIN_ROWS)) is TORCH


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
class TestOnAGpu:
    @pytest.fixture
    def kernels(self):
        return pytest.importorskip("surefoot.linalg.triton_ops", reason="triton is not installed")

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("shape", [(1, 1), (63, 2000), (256, 256), (257, 1001), (768, 3072)], ids=str)
    def test_kernels(self, kernels, shape, dtype):
        compare(kernels, shape, dtype, "cuda")

    def test_msign_takes_them(self, kernels):
        x = gaussian((2, 512, 1024)).cuda()
        kernels.LAUNCHED.clear()
        sign = surefoot.msign(x)
        assert kernels.LAUNCHED == {"gram": 3, "quadratic": 5, "product": 6}
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            surefoot.msign(x)
        assert sum(event.count for event in profile.key_averages() if "_lower" in event.key) == 14
        values = torch.linalg.svdvals(sign.double())
        assert float(values.max()) <= 1 + 5e-4
        assert float((sign * x).sum((-2, -1)).div(torch.linalg.svdvals(x).sum(-1)).min()) > 0.93

    def test_small_matrices_go_to_torch(self):
        rows = polar.TRITON_MIN_ROWS
        assert polar.choose_ops(torch.zeros(1, rows - 1, rows, device="cuda")) is TORCH
        assert polar.choose_ops(torch.zeros(1, rows, rows, device="cuda")) is not TORCH
