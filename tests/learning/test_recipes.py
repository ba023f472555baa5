"""The recipes of docs/learning.md. Their code is read from the page, which tests/test_readme.py runs as a whole.

That for several processes runs in fast_distributed_worker.py, and tests/test_examples.py runs the programs for other packages.
"""

import re
from pathlib import Path

import torch
from torch import nn

import wassersmooth
from tests.compare import assert_matches
from tests.learning.central import along, differences, gradients_of
from wassersmooth import PixelGraph, Wasserstein
from wassersmooth.geometry import calculus
from wassersmooth.learning.objectives import GradientPenalty

METRIC = Wasserstein(PixelGraph.grid(8, 8, radius=2))


def make_critic(device):
    torch.manual_seed(0)
    return (
        nn.Sequential(nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.Softplus(), nn.Flatten(), nn.Linear(64, 1))
        .double()
        .to(device)
    )


def critic_step(critic, real, fake, metric, weight, generator=None):
    """The recipe: critic(fake) - critic(real) + weight * (|grad critic|_W - 1)^2 between the two."""
    t = torch.rand(len(real), 1, 1, 1, dtype=real.dtype, device=real.device, generator=generator)
    between = t * real + (1 - t) * fake.detach()
    length_sq = calculus.gradient_norm_sq(lambda x: critic(x).squeeze(1), between, metric)
    length = length_sq.clamp_min(1e-12).sqrt()  # the root has no derivative at zero
    return critic(fake.detach()).mean() - critic(real).mean() + weight * (length - 1).square().mean()


def test_gradient_penalized_critic(device):
    generator = torch.Generator(device).manual_seed(0)
    real, fake = (torch.rand(4, 1, 8, 8, dtype=torch.float64, device=device, generator=generator) for _ in range(2))
    critic = make_critic(device)
    parameters = list(critic.parameters())

    def value():
        t = torch.rand(4, 1, 1, 1, dtype=torch.float64, device=device, generator=torch.Generator(device).manual_seed(1))
        x = (t * real + (1 - t) * fake).requires_grad_()
        g = torch.autograd.grad(critic(x).sum(), x)[0].flatten(1)
        L = METRIC.cometric(x.detach()).as_matrix()
        length = torch.einsum("bi,bij,bj->b", g, L, g).sqrt()
        return (critic(fake).mean() - critic(real).mean() + 10 * (length - 1).square().mean()).detach()

    objective = critic_step(critic, real, fake, METRIC, 10.0, torch.Generator(device).manual_seed(1))
    assert_matches(objective, value(), 1e-10)
    received = along(gradients_of(objective, critic), parameters)
    assert_matches(received, differences(value, parameters), 1e-6)


def test_the_critic_learns_slopes_of_one(device):
    """Two clouds of images that differ in where their mass is: the critic separates them, with gradients of length 1."""
    generator = torch.Generator(device).manual_seed(0)
    critic = make_critic(device)
    optimizer = torch.optim.Adam(critic.parameters(), 1e-2)
    ramp = torch.linspace(0.2, 1, 8, dtype=torch.float64, device=device)
    for _ in range(200):
        noise = 0.1 * torch.rand(2, 8, 1, 8, 8, dtype=torch.float64, device=device, generator=generator)
        real, fake = ramp + noise[0], ramp.flip(0) + noise[1]
        optimizer.zero_grad()
        critic_step(critic, real, fake, METRIC, 100.0, generator).backward()
        optimizer.step()
    between = (real + fake) / 2
    length = calculus.gradient_norm_sq(lambda x: critic(x).squeeze(1), between, METRIC).sqrt().mean()
    assert critic(real).mean() > critic(fake).mean()
    assert 0.6 < length < 1.4


def test_zero_centered_critic_penalty_is_an_objective(device):
    """GradientPenalty(of="logits") with a signed loss: real and fake in one batch, labels +1 and -1 as (B, 1) targets."""
    generator = torch.Generator(device).manual_seed(0)
    images = torch.rand(4, 1, 8, 8, dtype=torch.float64, device=device, generator=generator)
    signs = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64, device=device)[:, None]
    critic = make_critic(device)
    objective = GradientPenalty(METRIC, 1.0, of="logits", loss=lambda outputs, s: -(s * outputs).squeeze(1))
    terms = objective(critic, images, signs)
    expected = calculus.gradient_norm_sq(lambda x: critic(x).squeeze(1), images, METRIC).mean()
    assert_matches(terms.penalty, expected, 1e-10)
    assert_matches(terms.loss, -(signs * critic(images)).mean(), 1e-12)


PAGE = Path(__file__).parents[2] / "docs" / "learning.md"


def recipe(name):
    """A function that the page defines, as it stands there."""
    (block,) = [b for b in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if f"def {name}(" in b]
    found = {"torch": torch, "ws": wassersmooth}
    exec(block, found)
    return found[name]


def test_outputs_with_logits_need_no_wrapper():
    """What Hugging Face models return, without their package."""

    class Outputs(dict):
        logits = property(lambda self: self["logits"])

    class Returning(nn.Module):
        def __init__(self):
            super().__init__()
            self.network = make_critic("cpu")
            self.network[-1] = nn.Linear(64, 3).double()

        def forward(self, x):
            return Outputs(logits=self.network(x), hidden=x)

    torch.manual_seed(0)
    model, images, labels = Returning(), torch.rand(4, 1, 8, 8, dtype=torch.float64), torch.tensor([0, 1, 2, 0])
    for engine in ("double_backward", "forward_mode", "finite_difference"):
        objective = GradientPenalty(METRIC, 0.5, engine=engine)
        one, other = objective(model, images, labels), objective(model.network, images, labels)
        assert_matches(one.total, other.total, 1e-12)
        for a, b in zip(gradients_of(one.total, model), gradients_of(other.total, model), strict=True):
            assert_matches(a, b, 1e-12)
    fast = wassersmooth.FastGradients(GradientPenalty(METRIC, 0.5), model)(images, labels)
    assert_matches(fast.total, other.total, 1e-10)
