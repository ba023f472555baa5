"""Fit energies and forces: the predicted forces are minus the gradient of the predicted energy.

The data are made up: particles that repel each other, with the sum of exp(-r) over all pairs as their energy.
"""

import torch

import wassersmooth as ws

torch.manual_seed(0)


def true_energy(positions):
    pairs = torch.triu_indices(5, 5, offset=1)
    distances = (positions[:, pairs[0]] - positions[:, pairs[1]]).square().sum(-1).add(1e-9).sqrt()
    return torch.exp(-distances).sum(1)


class PairPotential(torch.nn.Module):
    """The sum over all pairs of a learned function of the distance. (B, atoms, 3) -> (B,)"""

    def __init__(self):
        super().__init__()
        self.radial = torch.nn.Sequential(torch.nn.Linear(1, 32), torch.nn.SiLU(), torch.nn.Linear(32, 1))

    def forward(self, positions):
        pairs = torch.triu_indices(5, 5, offset=1)
        distances = (positions[:, pairs[0]] - positions[:, pairs[1]]).square().sum(-1, keepdim=True).add(1e-9).sqrt()
        return self.radial(distances).sum((1, 2))


def energy(outputs, labels):  # the function whose gradient is taken
    return outputs


def energy_error(outputs, labels):
    return (outputs - labels["energy"]).square()


def force_error(g, positions, labels, outputs):
    return 10 * (-g - labels["forces"]).square().flatten(1).mean(1)


positions = torch.randn(64, 5, 3, requires_grad=True)
energies = true_energy(positions)
labels = {"energy": energies.detach(), "forces": -torch.autograd.grad(energies.sum(), positions)[0]}
positions = positions.detach()

model = PairPotential()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
gradients = ws.FastGradients(ws.GradientObjective(force_error, of=energy, loss=energy_error), model)
for step in range(201):
    terms = gradients(positions, labels)
    optimizer.step()
    if step % 100 == 0:
        print(f"step {step}: energy {terms.loss:.4f}, forces {terms.penalty:.4f}")
