"""The mathematics: pixel graphs, cometrics, Riemannian calculus and exact transport."""
