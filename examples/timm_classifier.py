"""Fine-tune a timm network with a gradient penalty. Needs timm.

Normalization goes inside the model, so images stay in [0, 1] and the penalty means the same for every network.
"""

import timm
import torch

import wassersmooth as ws

torch.manual_seed(0)
network = timm.create_model("convnext_atto", pretrained=False, num_classes=10)  # pretrained=True downloads weights
model = ws.Normalized(network, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
images, labels = torch.rand(8, 3, 64, 64), torch.randint(10, (8,))  # your data, in [0, 1]

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
gradients = ws.FastGradients(ws.GradientPenalty(ws.Euclidean(), eta=0.3), model)
for _ in range(3):
    terms = gradients(images, labels)  # fills parameter.grad: no zero_grad, no backward
    optimizer.step()
    print(f"loss {terms.loss:.3f}, penalty {terms.penalty:.4f}")
