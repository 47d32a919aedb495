"""Sizes of decoders, and those of published models by name. Nothing here imports torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Size:
    """Size of a decoder, from which every shape follows.

    Args:
        width: features of the residual stream, a multiple of `head_dim`.
        depth: number of residual blocks.
        head_dim: features of an attention head.
        vocab: number of tokens.

    Raises:
        ValueError: a number below 1, or a width that is no multiple of the head dimension.

    >>> Size(width=64, depth=2, head_dim=16, vocab=256).heads
    4
    """

    width: int
    depth: int
    head_dim: int
    vocab: int

    def __post_init__(self) -> None:
        for name in ("width", "depth", "head_dim", "vocab"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.width % self.head_dim:
            below = self.width // self.head_dim * self.head_dim
            near = ", ".join(str(w) for w in (below, below + self.head_dim) if w > 0)
            text = f"width {self.width} is not a multiple of the head dimension {self.head_dim}"
            raise ValueError(f"{text}: use width {near}, or a head dimension that divides it")

    @property
    def heads(self) -> int:
        """Number of attention heads."""
        return self.width // self.head_dim


REFERENCES = ("gpt", "llama", "qwen", "moe", "tied")
"""The names of the reference models, which have any size (those of `decoder.REFERENCES`: a test compares them)."""

PUBLISHED = {
    "gpt2-small": Size(768, 12, head_dim=64, vocab=50257),
    "gpt2-medium": Size(1024, 24, head_dim=64, vocab=50257),
    "gpt2-large": Size(1280, 36, head_dim=64, vocab=50257),
    "gpt2-xl": Size(1600, 48, head_dim=64, vocab=50257),
    "llama-130m": Size(768, 12, head_dim=64, vocab=32000),
}
"""Sizes of published models, see `configs.published_config`."""

MODELS = (*REFERENCES, *PUBLISHED)
"""The models that have a name."""


def published_name(name: str) -> str:
    """The name with hyphens if it is a published model's, else as it is.

    >>> published_name("gpt2_xl"), published_name("my_package:build")
    ('gpt2-xl', 'my_package:build')
    """
    hyphens = name.replace("_", "-")
    return hyphens if hyphens in PUBLISHED else name


def is_user_model(name: str) -> bool:
    """Whether a model's name is `module:function`, of the user's own.

    >>> is_user_model("my_package.model:build"), is_user_model("gpt")
    (True, False)
    """
    return ":" in name


def refuse_other(name: str, **given: int | None) -> None:
    """Refuse a size that contradicts a published model's.

    Args:
        name: of a published model.
        **given: of "width", "depth", "head_dim" and "vocab"; None where nothing was asked for.

    Raises:
        ValueError: a size that is not the model's.

    >>> refuse_other("gpt2-xl", width=1600, depth=None)
    """
    for field, value in given.items():
        if value is not None and value != (actual := getattr(PUBLISHED[name], field)):
            other = f"leave it out, or use a reference model of any size ({', '.join(REFERENCES)})"
            raise ValueError(f"{name} has {field} {actual}, not {value}: {other}")
