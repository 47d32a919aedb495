"""What the host may know of a tensor without waiting for an accelerator, and how it hands a number over."""

from __future__ import annotations

import torch
from torch import Tensor


def on_cpu(x: Tensor) -> bool:
    """Whether x lies in the host's memory: a branch on its values waits for nobody.

    >>> on_cpu(torch.zeros(2)), on_cpu(torch.zeros(2, device="meta"))
    (True, False)
    """
    return x.device.type == "cpu"


def may_branch(x: Tensor) -> bool:
    """Whether a shortcut may go by x's values: where the host holds them, and not while `torch.compile` traces."""
    return on_cpu(x) and not torch.compiler.is_compiling()


def keep_freed() -> None:
    """Have the C library keep what is freed, instead of fetching it anew, page by page, for the next temporary.

    glibc takes blocks above a limit from the system one by one, and gives the free end of its heap back above another;
    both follow the largest block freed so far, up to 32 MB. So one is freed, its pages never touched.
    """
    torch.empty(31 << 20, dtype=torch.uint8)


def scalar_like(value: float | Tensor, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A number as a tensor beside `like`, filled in there: a copy from the host would wait. A tensor is converted.

    >>> scalar_like(0.5, torch.zeros(2), torch.float64)
    tensor(0.5000, dtype=torch.float64)
    """
    if isinstance(value, Tensor) or on_cpu(like):
        return torch.as_tensor(value, dtype=dtype, device=like.device)
    wide = torch.full(
        (), value, dtype=torch.float64, device=like.device
    )  # what is too large for dtype becomes infinite
    return wide.to(dtype or torch.get_default_dtype())
