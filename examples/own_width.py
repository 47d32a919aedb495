"""A model of your own as a function of its width, for the search of its best learning rate at several widths.

surefoot transfer --model examples.own_width:build --recipes steady --widths 32 64 --data my_texts/
"""

from torch import nn


class NextByte(nn.Sequential):
    """Predicts the next byte from the present one."""

    def __init__(self, width: int) -> None:
        up, down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        body = (nn.RMSNorm(width), up, nn.GELU(), down, nn.RMSNorm(width))
        super().__init__(nn.Embedding(256, width), *body, nn.Linear(width, 256, bias=False))

    def get_output_embeddings(self) -> nn.Module:
        """Return the LM head; at width 64 `up` has the same shape, so that shapes alone are ambiguous."""
        return self[-1]


build = NextByte
