"""Train the critic of a GAN with R1, a penalty on the gradient of its score at real images.

Real and fake images go through the critic in one batch. Labels are 1 for real images and 0 for fake ones.
"""

import torch
from torch.nn import functional as F

import wassersmooth as ws

torch.manual_seed(0)
critic = torch.nn.Sequential(
    torch.nn.Conv2d(1, 16, 3, stride=2, padding=1), torch.nn.SiLU(), torch.nn.Flatten(), torch.nn.Linear(16 * 64, 1)
)
generator = torch.nn.Sequential(torch.nn.Linear(8, 256), torch.nn.SiLU(), torch.nn.Linear(256, 256), torch.nn.Sigmoid())


def score(outputs, labels):  # the function whose gradient is taken
    return outputs[:, 0]


def real_or_fake(outputs, labels):
    return F.softplus((1 - 2 * labels) * outputs[:, 0])


def r1(g, images, labels, outputs):  # gamma / 2 = 5, at real images only
    return labels * 5 * g.flatten(1).square().sum(1)


critic_step = ws.FastGradients(ws.GradientObjective(r1, of=score, loss=real_or_fake), critic)
critic_optimizer = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.0, 0.99))
generator_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.0, 0.99))
labels = torch.cat([torch.ones(32), torch.zeros(32)])
disks = torch.linspace(-1, 1, 16)[:, None] ** 2 + torch.linspace(-1, 1, 16) ** 2
for step in range(60):
    real = (disks < torch.rand(32, 1, 1, 1)).float()  # disks of random size
    fake = generator(torch.randn(32, 8)).view(32, 1, 16, 16)
    terms = critic_step(torch.cat([real, fake.detach()]), labels)  # replaces the gradients of the critic
    critic_optimizer.step()

    generator_optimizer.zero_grad()
    F.softplus(-critic(fake)[:, 0]).mean().backward()  # critic_step replaces what this adds to the critic's gradients
    generator_optimizer.step()
    if step % 20 == 19:
        print(f"step {step + 1}: critic {terms.loss:.3f}, R1 {terms.penalty:.3f}")
