"""Draw the pictures of docs/geometry.md: the neighbors of one pixel of each graph, and noise on it.

python docs/graph_pictures.py: from the project's root, into docs/images/.
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

import wassersmooth as ws

FOLDER = Path(__file__).parent / "images"
SIZE = 32


def picture() -> Tensor:
    """A bright disk on a dark ground. # shape: (1, 1, SIZE, SIZE)"""
    t = torch.linspace(-1, 1, SIZE)
    return torch.sigmoid(24 * (0.55 - (t.square() + t[:, None].square()).sqrt()))[None, None] * 0.8 + 0.1


def show(axes: Axes, image: Tensor, title: str, cmap: str = "gray") -> None:
    axes.imshow(image, cmap=cmap)
    axes.set_title(title, fontsize=8)
    axes.set_xticks([])
    axes.set_yticks([])


def noise(metric: ws.Wasserstein | ws.Deformations, x: Tensor) -> Tensor:
    return metric.cometric(x).sample(torch.Generator().manual_seed(0))


def neighbors(metric: ws.Wasserstein, x: Tensor, node: tuple[int, ...]) -> Tensor:
    """How much flows from one pixel to each other one along a covector that is 1 there. # shape: as x[0]"""
    covector = torch.zeros_like(x)
    covector[(0, *node)] = 1
    flow = -metric.cometric(x).mv(covector)[0]
    flow[node] = 0
    return flow


def windows() -> Figure:
    figure, axes = plt.subplots(1, 3, figsize=(4.5, 1.8))
    for each, (title, options) in zip(
        axes, {"square": {}, "disk": {"neighborhood": "disk"}, "gaussian": {"weight": "gaussian"}}.items(), strict=True
    ):
        metric = ws.Wasserstein(ws.PixelGraph.grid(17, 17, 6, **options))  # type: ignore[arg-type]
        show(each, neighbors(metric, torch.ones(1, 1, 17, 17), (0, 8, 8))[0], title, "magma")
    return figure


def line() -> Figure:
    figure, axes = plt.subplots(figsize=(4.5, 1.8))
    t = torch.linspace(0, 3, 300)
    signal = (0.15 + 0.7 * torch.exp(-(((t % 1) - 0.5) / 0.03).square()))[None, None]
    metric = ws.Wasserstein(ws.PixelGraph.line(300, radius=4))
    axes.plot(t, signal[0, 0] + 0.1 * noise(metric, signal)[0, 0], linewidth=0.7, label="with noise")
    axes.plot(t, signal[0, 0], linewidth=1, color="black", label="signal")
    axes.legend(fontsize=7)
    return figure


def volume() -> Figure:
    figure, axes = plt.subplots(1, 3, figsize=(4.5, 1.8))
    metric = ws.Wasserstein(ws.PixelGraph.volume(7, 7, 7, 2, "disk"))
    flow = neighbors(metric, torch.ones(1, 1, 7, 7, 7), (0, 3, 3, 3))[0]
    for each, dz in zip(axes, (0, 1, 2), strict=True):
        show(each, flow[3 + dz], f"slice dz = {dz}", "magma")
    return figure


def edges() -> Figure:
    """Vertices of a mesh: random points, each joined with its nearest ones."""
    figure, axes = plt.subplots(figsize=(4.5, 2.2))
    points = torch.rand(60, 2, generator=torch.Generator().manual_seed(2)) * torch.tensor([2.0, 1.0])
    nearest = torch.cdist(points, points).argsort(1)[:, 1:4]
    pairs = torch.stack((torch.arange(60).repeat_interleave(3), nearest.flatten()), 1).sort(1).values.unique(dim=0)
    metric = ws.Wasserstein(ws.PixelGraph.from_edges(60, pairs))
    for i, j in pairs.tolist():
        axes.plot(*points[[i, j]].T, color="silver", linewidth=0.8, zorder=1)
    axes.scatter(*points.T, c=noise(metric, torch.full((1, 1, 60), 0.5))[0, 0], s=22, cmap="coolwarm", zorder=2)
    axes.set_axis_off()
    return figure


def channels() -> Figure:
    figure, axes = plt.subplots(1, 2, figsize=(4.5, 2.2))
    x = picture().expand(1, 3, SIZE, SIZE)
    matrices: dict[str, Tensor] = {"separate": torch.zeros(3, 3), "joined": 40 * torch.ones(3, 3)}
    for each, (title, matrix) in zip(axes, matrices.items(), strict=True):
        metric = ws.Wasserstein(ws.PixelGraph.grid(SIZE, SIZE, 1), channels=matrix)
        show(each, (x + 0.15 * noise(metric, x))[0].clamp(0, 1).permute(1, 2, 0), title)
    return figure


def edge_aware() -> Figure:
    figure, axes = plt.subplots(1, 3, figsize=(4.5, 1.8))
    x = picture()
    show(axes[0], x[0, 0], "image")
    for each, (title, features) in zip(
        axes[1:], {"plain": None, "edge-aware": lambda images: images / 0.1}.items(), strict=True
    ):
        metric = ws.Wasserstein(ws.PixelGraph.grid(SIZE, SIZE, 6, features=features))
        show(each, neighbors(metric, x, (0, 16, 8))[0], title, "magma")
    return figure


def motion() -> Figure:
    figure, axes = plt.subplots(1, 3, figsize=(4.5, 1.8))
    x = picture()
    show(axes[0], (x + 0.3 * noise(ws.Wasserstein(ws.PixelGraph.grid(SIZE, SIZE, 2)), x))[0, 0], "independent flows")
    for each, smoothness in zip(axes[1:], (2.0, 4.0), strict=True):
        moved = x + 0.7 * noise(ws.Deformations(SIZE, SIZE, smoothness, "advection"), x)
        show(each, moved[0, 0], f"motion, smoothness {smoothness:g}")
    return figure


PICTURES = {
    "windows": windows,
    "line": line,
    "volume": volume,
    "edges": edges,
    "channels": channels,
    "edge-aware": edge_aware,
    "motion": motion,
}


def draw(folder: Path) -> None:
    for name, make in PICTURES.items():
        figure = make()
        figure.tight_layout(pad=0.4)
        figure.savefig(folder / f"graph-{name}.png", dpi=90, metadata={"Software": None})
        plt.close(figure)


if __name__ == "__main__":
    draw(FOLDER)
