"""A small language model, bare parameters, and the roles of a plan, for the plan's tests."""

import torch
from torch import nn

from surefoot import Plan


class Language(nn.Module):
    """Embedding, one hidden layer, head; what differs between tests is given."""

    def __init__(self, head=None, vocab=50, width=8):
        super().__init__()
        self.table = nn.Embedding(vocab, width)
        self.hidden = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.out = head or nn.Linear(width, vocab, bias=False)


def tied(**attributes):
    model = Language()
    model.out.weight = model.table.weight
    for name, value in attributes.items():
        setattr(model, name, value)
    return model


def roles(model, *args, **kwargs):
    return {row["name"]: row["role"] for row in Plan.of(model, *args, **kwargs).rows()}


class Bare(nn.Module):
    def __init__(self, *shape):
        super().__init__()
        self.layer_scale = nn.Parameter(torch.full(shape, 0.5))
