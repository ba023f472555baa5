"""Fit a signed distance function to points of a circle: zero at the points, a gradient of length 1 everywhere (eikonal loss).

Points on the circle and random points go through the network in one batch. Labels are 1 on the circle and 0 elsewhere.
"""

import torch

import wassersmooth as ws

torch.manual_seed(0)
network = torch.nn.Sequential(
    torch.nn.Linear(2, 64), torch.nn.Softplus(10), torch.nn.Linear(64, 64), torch.nn.Softplus(10), torch.nn.Linear(64, 1)
)


def distance(outputs, labels):  # the function whose gradient is taken
    return outputs[:, 0]


def off_the_surface(outputs, labels):
    return labels * outputs[:, 0].abs()


def eikonal(g, points, labels, outputs):
    length = g.square().sum(1).add(1e-12).sqrt()
    return 0.1 * (length - 1).square()


optimizer = torch.optim.Adam(network.parameters(), lr=5e-3)
gradients = ws.FastGradients(ws.GradientObjective(eikonal, of=distance, loss=off_the_surface), network)
for step in range(301):
    angles = 2 * torch.pi * torch.rand(64)
    circle = 0.5 * torch.stack([angles.cos(), angles.sin()], 1)
    anywhere = 2 * torch.rand(64, 2) - 1
    terms = gradients(torch.cat([circle, anywhere]), torch.cat([torch.ones(64), torch.zeros(64)]))
    optimizer.step()
    if step % 100 == 0:
        print(f"step {step}: surface {terms.loss:.4f}, eikonal {terms.penalty:.4f}")

with torch.no_grad():
    found = network(torch.tensor([[0.9, 0.0], [0.5, 0.0]]))[:, 0].abs()
print(f"distance at 0.4 from the circle: {found[0]:.2f}; on it: {found[1]:.2f}")
