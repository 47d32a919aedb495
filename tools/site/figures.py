"""Draws the pictures of docs/explanation: `python tools/site/figures.py [FOLDER]` (seconds; docs/images by default)."""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

import surefoot as sf

WIDTHS = (32, 64, 128, 256, 512)
NORM = sf.Spectral(method="svd")
BLUE, ORANGE, GREEN, RED, GREY = "#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#7f7f7f"


def gradient(d_out: int, d_in: int, generator: torch.Generator) -> Tensor:
    """A sum of 32 outer products, as a batch gives it."""
    return torch.randn(d_out, 32, generator=generator) @ torch.randn(32, d_in, generator=generator) / 32


def natural_units() -> Figure:
    """How far a step of one rate changes the output, and what initial values have norm 1, by width."""
    generator = torch.Generator().manual_seed(0)
    figure, (steps, initial) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    gradients = [gradient(width, width, generator) for width in WIDTHS]
    entries = [float(NORM.norm(g.sign() / WIDTHS[0])) for g in gradients]
    lengths = [float(NORM.norm(g / g.norm() * WIDTHS[0] ** 0.5)) for g in gradients]
    natural = [float(NORM.norm(NORM.direction(g))) for g in gradients]
    steps.plot(WIDTHS, entries, "o-", color=RED, label="entries of one size (sign, Adam)")
    steps.plot(WIDTHS, lengths, "s-", color=ORANGE, label="matrices of one length (normalised SGD)")
    steps.plot(WIDTHS, natural, "D-", color=BLUE, label="norm 1 in natural units")
    _axes(steps, "one step of one rate", "largest change of the output (RMS)")
    steps.set_yscale("log")
    shapes = {"square": (1, 1), "up": (4, 1), "down": (1, 4)}
    for (name, (out, into)), marker in zip(shapes.items(), "osD", strict=True):
        plain, ours = [], []
        for width in WIDTHS:
            drawn = torch.randn(out * width, into * width, generator=generator)
            plain.append(float(NORM.norm(drawn * (into * width) ** -0.5)))
            ours.append(float(NORM.norm(drawn * sf.LinearNormal().std((1, out * width, into * width)))))
        initial.plot(WIDTHS, plain, f"{marker}--", color=GREY, label=f"std $1/\\sqrt{{d_{{in}}}}$, {name}")
        initial.plot(WIDTHS, ours, f"{marker}-", color=BLUE, label=f"natural, {name}")
    _axes(initial, "initial values", "norm in natural units")
    initial.set_ylim(0, 5.5)
    return figure


def _axes(axes: Axes, title: str, label: str) -> None:
    axes.set(xscale="log", title=title, xlabel="width", ylabel=label)
    axes.set_xticks(WIDTHS, [str(width) for width in WIDTHS])
    axes.minorticks_off()
    axes.legend(fontsize=7)


def three_numbers() -> Figure:
    """Inputs of RMS 1 in two dimensions, and where a matrix takes them before and after a step."""
    w = torch.tensor([[1.3, 0.5], [0.1, 0.7]])
    dw = -0.35 * NORM.direction(torch.tensor([[1.0, -0.4], [0.6, 0.9]]))
    angles = torch.linspace(0, 2 * torch.pi, 361)
    x = 2**0.5 * torch.stack([angles.cos(), angles.sin()])
    y, moved = w @ x, (w + dw) @ x
    figure, panels = plt.subplots(1, 3, figsize=(9.6, 3.4), layout="constrained", sharex=True, sharey=True)
    names = ("forward: the longest output", "dependency: the largest stretch", "update: the largest change")
    for axes, name in zip(panels, names, strict=True):
        axes.plot(*x, color=GREY, lw=1, ls="--", label="inputs x, RMS 1")
        axes.plot(*y, color=BLUE, label="W x")
        axes.set_aspect("equal")
        axes.set_title(name, fontsize=10)
    longest = int(y.norm(dim=0).argmax())
    _arrow(panels[0], torch.zeros(2), y[:, longest], RED)
    other = (longest + 180) % 360
    _arrow(panels[1], x[:, other], x[:, longest], GREY)
    _arrow(panels[1], y[:, other], y[:, longest], RED)
    panels[2].plot(*moved, color=GREEN, label="(W + dW) x")
    furthest = int((moved - y).norm(dim=0).argmax())
    _arrow(panels[2], y[:, furthest], moved[:, furthest], RED)
    panels[2].legend(fontsize=7, loc="lower right")
    return figure


def _arrow(axes: Axes, start: Tensor, end: Tensor, colour: str) -> None:
    axes.annotate("", xy=end.tolist(), xytext=start.tolist(), arrowprops={"arrowstyle": "->", "color": colour, "lw": 2})


def norms_under(stabiliser: sf.Stabiliser, steps: int = 200) -> list[float]:
    """The norm of a 64 x 64 matrix that is pulled one way, along eight directions, with noise."""
    generator = torch.Generator().manual_seed(1)
    layer = nn.Linear(64, 64, bias=False)
    plan = sf.Plan.of(layer, sf.recipes.beyond_mup(), stabiliser=stabiliser, head=())
    plan.initialise_(layer, seed=0)
    optimizer = sf.SteepestDescent(layer, plan, lr=0.05)
    pull = torch.randn(64, 8, generator=generator) @ torch.randn(8, 64, generator=generator)
    norms = []
    for _ in range(steps):
        layer.weight.grad = -pull - torch.randn(64, 64, generator=generator)
        optimizer.step()
        norms.append(float(NORM.norm(layer.weight.detach())))
    return norms


def bounds() -> Figure:
    """Norms over steps under five schemes, and what three ways into a ball make of the singular values."""
    schemes = {"Free()": sf.Free(), "WeightDecay(1/2)": sf.WeightDecay(0.5), "PostClip(2)": sf.PostClip(2.0)}
    schemes |= {"PreDecay(1/2)": sf.PreDecay(0.5), "Normalise(2)": sf.Normalise(2.0)}
    figure, (over, values) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for (name, scheme), colour in zip(schemes.items(), (GREY, ORANGE, BLUE, GREEN, RED), strict=True):
        over.plot(norms_under(scheme), color=colour, label=name, lw=1.5)
    over.axhline(2, color="black", ls=":", lw=1)
    over.set(title="a steady pull", xlabel="step", ylabel="norm", ylim=(0, 5))
    over.legend(fontsize=7)
    sizes = torch.tensor([3.2, 2.6, 1.9, 1.4, 1.0, 0.7, 0.45, 0.2])
    places = torch.arange(len(sizes))
    ways = {
        "before": sizes,
        "PostClip(2): nearest point": sizes.clamp(max=2.0),
        "Rescale(2): all shrink": sizes * 2 / 3.2,
    }
    for shift, (name, heights), colour in zip((-0.27, 0.0, 0.27), ways.items(), (GREY, BLUE, ORANGE), strict=True):
        values.bar(places + shift, heights, 0.27, label=name, color=colour)
    values.axhline(2, color="black", ls=":", lw=1)
    values.set(title="two ways into the ball", xlabel="singular value", xticks=[])
    values.legend(fontsize=7)
    return figure


def main(folder: Path) -> None:
    """Draw all; the files are the same from run to run."""
    plt.rcParams["svg.hashsalt"] = "surefoot"
    for draw in (natural_units, three_numbers, bounds):
        figure = draw()
        figure.savefig(folder / f"{draw.__name__}.svg", metadata={"Date": None})
        plt.close(figure)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[2] / "docs" / "images")
