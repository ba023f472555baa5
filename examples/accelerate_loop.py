"""Train with a gradient penalty under Accelerate, on one device or many. Needs accelerate.

`accelerator.prepare` may wrap the model in DistributedDataParallel. Pass the wrapped model to the objective.
"""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

import wassersmooth as ws

torch.manual_seed(0)
accelerator = Accelerator(cpu=True)  # with GPUs, drop cpu=True and start with `accelerate launch`
model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.SiLU(), torch.nn.Flatten(), torch.nn.Linear(8 * 14 * 14, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loader = DataLoader(TensorDataset(torch.rand(64, 3, 16, 16), torch.randint(10, (64,))), batch_size=16)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

objective = ws.GradientPenalty(ws.Euclidean(), eta=0.3)
for images, labels in loader:
    terms = objective(model, images, labels)
    optimizer.zero_grad()
    accelerator.backward(terms.total)  # one backward pass, on the total
    optimizer.step()
accelerator.print(f"loss {terms.loss:.3f}, penalty {terms.penalty:.4f}")
