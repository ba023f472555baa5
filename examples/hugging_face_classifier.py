"""Train a Hugging Face image classifier with a gradient penalty. Needs transformers.

Outputs with `.logits` need no wrapper. Switch normalization off in the image processor (`do_normalize=False`) and put it inside
the model.
"""

import torch
from transformers import ViTConfig, ViTForImageClassification

import wassersmooth as ws

torch.manual_seed(0)
small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
config = ViTConfig(image_size=32, patch_size=8, num_labels=10, **small)
network = ViTForImageClassification(config)  # or ViTForImageClassification.from_pretrained(...)
model = ws.Normalized(network, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
images, labels = torch.rand(16, 3, 32, 32), torch.randint(10, (16,))

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
gradients = ws.FastGradients(ws.GradientPenalty(ws.Euclidean(), eta=0.3), model)
for _ in range(3):
    terms = gradients(images, labels)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # gradients may be clipped after the call
    optimizer.step()
    print(f"loss {terms.loss:.3f}, penalty {terms.penalty:.4f}")

model.eval()
print(ws.evaluate(model, images, labels, suite=[ws.attacks.FGSM(8 / 255)], seed=0).summary)
