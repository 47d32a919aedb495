"""A model of your own as a function of its width: where is its best learning rate, and does it stay?

surefoot transfer --model examples.own_width:build --recipe beyond_mup --widths 32 64 --data my_texts/
"""

from torch import nn


class NextByte(nn.Sequential):
    """Predicts the next byte from the present one."""

    def __init__(self, width: int) -> None:
        up, down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        body = (nn.RMSNorm(width), up, nn.GELU(), down, nn.RMSNorm(width))
        super().__init__(nn.Embedding(256, width), *body, nn.Linear(width, 256, bias=False))

    def get_output_embeddings(self) -> nn.Module:
        """The LM head; at width 64 `up` has its shape, so the shapes alone cannot tell."""
        return self[-1]


build = NextByte
