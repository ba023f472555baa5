"""Networks that people use: whether fast gradients are exact for them, and what a step costs."""
