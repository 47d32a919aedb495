"""Small models with attention, and their largest logits as a control measures them."""

import torch
import torch.nn.functional as F
from torch import nn

import surefoot as sf
from surefoot.experiment.models.decoder import Decoder, GPTConfig, LlamaConfig, Size

SIZE = Size(width=32, depth=2, head_dim=8, vocab=16)
TOKENS = torch.randint(16, (3, 12), generator=torch.Generator().manual_seed(0))


def llama(**options):
    torch.manual_seed(1)
    return Decoder(LlamaConfig(SIZE, **options))


def gpt():
    torch.manual_seed(1)
    model = Decoder(GPTConfig(SIZE, biases="all"))
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(p)
    return model


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def train(model, control, steps=1, **options):
    optimizer = sf.SteepestDescent(model, **options)
    control.hold(optimizer)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(TOKENS)[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten()).backward()
        optimizer.step()
    return optimizer


def measured(model, control):
    """The largest logits of one batch, as a control measures them."""
    handles = control.hold(sf.SteepestDescent(model, lr=0.0))
    control.largest = {}
    model(TOKENS)
    for handle in handles:
        handle.remove()
    return control.largest


class Eager(nn.Module):
    """Attention that forms its logits itself."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.head_dim, self.scaling = nn.Linear(4, 4), nn.Linear(4, 4), 4, 0.5

    def forward(self, x):
        return torch.softmax(self.q_proj(x) @ self.k_proj(x).mT, -1) @ x
