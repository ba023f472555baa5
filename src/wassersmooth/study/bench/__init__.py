"""What training costs: steps, kernels, accuracy, memory, throughput and the operator, as JSON and tables."""
