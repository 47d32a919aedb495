"""A convolutional network on scikit-learn's digits: the same learning rate for narrow and for wide layers.

You should see: AdamW's best learning rate falls when the layers get 4 times as many channels, and the narrow
network's best rate costs the wide one 0.4 nats. Surefoot's best rate is the same for both, so it costs nothing.
"""

import torch
from picture import Picture
from sklearn.datasets import load_digits
from torch import nn

import surefoot as sf

picture = Picture(__doc__)
digits = load_digits()  # 1,797 pictures of 8 x 8 pixels
images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1
labels = torch.tensor(digits.target)
batches = torch.randint(len(labels), (40, 64), generator=torch.Generator().manual_seed(0))


def network(channels: int) -> nn.Module:
    body = (nn.Conv2d(1, channels, 3), nn.ReLU(), nn.Conv2d(channels, channels, 3), nn.ReLU())
    return nn.Sequential(*body, nn.AvgPool2d(2), nn.Flatten(), nn.Linear(4 * channels, 10))


def train(method: str, channels: int, lr: float) -> float:
    """Return the mean loss of 40 steps."""
    torch.manual_seed(0)
    model = network(channels)
    if method == "Surefoot":
        plan = sf.Plan.of(model, head="6")  # the layer before the loss; a language model's is found
        plan.initialise_(model, seed=0)
        optimizer = sf.SteepestDescent(model, plan, lr=lr)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    losses = []
    for batch in batches:
        loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses) / len(losses)


curves = {}
for method, octaves in {"Surefoot": [-4.5, -3.5, -2.5, -1.5], "AdamW": [-7, -6, -5, -4, -3]}.items():
    rates = [2.0**octave for octave in octaves]
    narrow, wide = ([train(method, channels, lr) for lr in rates] for channels in (8, 32))
    best, wide_best = narrow.index(min(narrow)), wide.index(min(wide))
    print(f"{method}: best rate 2^{octaves[best]} for 8 channels, 2^{octaves[wide_best]} for 32, loss {min(wide):.2f};")
    print(f"  with the narrow network's best rate the wide one has {wide[best]:.2f}")
    curves |= {f"{method}, 8 channels": [rates, narrow], f"{method}, 32 channels": [rates, wide]}
picture.draw("learning rate", "mean loss of 40 steps", curves, "o-", xscale="log")
