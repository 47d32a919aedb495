"""The matrices that every benchmark steps, and what it ran on."""

from __future__ import annotations

import datetime
import os
import platform
from pathlib import Path

import torch
from torch import Tensor

GPT2_SMALL = ((768, 768),) * 4 + ((3072, 768), (768, 3072))
SMALL = ((128, 128),) * 4 + ((512, 128), (128, 512))
MODELS = {"GPT-2 Small, 12 layers": (GPT2_SMALL, 12), "d = 128, 24 layers": (SMALL, 24)}


def parameters(shapes: tuple[tuple[int, int], ...], layers: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    params = []
    for _ in range(layers):
        for shape in shapes:
            p = torch.nn.Parameter(torch.randn(shape, generator=generator) * 0.02)
            p.grad = torch.randn(shape, generator=generator) * 1e-3
            params.append(p)
    return params


def environment(threads: int) -> dict[str, object]:
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    model = next((line.split(":")[1].strip() for line in text.splitlines() if line.startswith("model name")), "")
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": model or platform.processor(),
        "bf16_units": ("avx512_bf16" in text or "amx_bf16" in text) and not os.environ.get("ONEDNN_MAX_CPU_ISA"),
        "torch_isa": torch.backends.cpu.get_cpu_capability(),
        "threads": threads,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
