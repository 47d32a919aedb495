"""Attention scaled by `1/d_head`, in models that scale by `1/sqrt(d_head)`."""

from __future__ import annotations

import math

from torch import nn

from surefoot.discovery.heads import head_dim_of


def scale_attention_(model: nn.Module, base_head_dim: int) -> list[str]:
    """Make attention scale its logits by `sqrt(d0)/d_head` instead of `1/sqrt(d_head)`, for transfer across head sizes.

    Trained queries and keys are aligned, so that their product grows as `d_head`: under the usual scale logits grow
    with its root, and with them the best learning rate moves. At `d_head = d0` nothing changes. The modules are those
    with an attribute `scaling` equal to `1/sqrt(d_head)`, as most of `transformers` have it; it is not part of a
    checkpoint, so call this whenever the model is built. Not for pretrained models, which were trained with theirs.

    Args:
        model: written to.
        base_head_dim: d0, the head dimension of the model at which the learning rate is tuned.

    Returns:
        The names of the modules that changed.

    Raises:
        ValueError: a dimension below 1, or a model without such a module.

    Source: G. Yang et al., "Tensor Programs V", definition 4.1; "Beyond MuP 3".

    >>> layer = nn.Module()
    >>> layer.head_dim, layer.scaling = 64, 0.125
    >>> scale_attention_(layer, base_head_dim=16), layer.scaling
    ([''], 0.0625)
    """
    if base_head_dim < 1:
        raise ValueError(f"base_head_dim is a positive number of features, not {base_head_dim}")
    found = usually_scaled(model)
    if not found:
        raise ValueError(
            "no module has an attribute scaling of 1/sqrt(its head dimension): scale the queries by "
            f"sqrt({base_head_dim} / d_head) in the model's own code"
        )
    for module, size in found.values():
        module.scaling = math.sqrt(base_head_dim) / size  # type: ignore[assignment]
    return list(found)


def usually_scaled(model: nn.Module) -> dict[str, tuple[nn.Module, int]]:
    """Modules whose attribute `scaling` is `1/sqrt(d_head)`: name -> module and head dimension."""
    found: dict[str, tuple[nn.Module, int]] = {}
    for name, module in model.named_modules():
        size, scale = head_dim_of(module), getattr(module, "scaling", None)
        if size and isinstance(scale, float) and math.isclose(scale, size**-0.5, rel_tol=1e-6):
            found[name] = module, size
    return found
