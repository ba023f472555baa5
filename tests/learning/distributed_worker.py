"""Run by torchrun in two processes: trains a few steps on half of each batch and writes down the gradients.

The process of rank 0 writes them to the file named on the command line; test_distributed.py compares.
"""

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.learning.distributed_case import CASES, METRIC, STEPS, batches, model_of, step
from wassersmooth.learning.objectives import GradientPenalty


def main(path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found = {}
    for name, case in CASES.items():
        model = DistributedDataParallel(model_of(case), find_unused_parameters=case.find_unused)
        half = [(images[rank::2], labels[rank::2]) for images, labels in batches()]
        found[name] = [step(case, model, *half[i]) for i in range(STEPS)]

    static = DistributedDataParallel(model_of(case), static_graph=True)
    try:
        GradientPenalty(METRIC, 0.5)(static, *half[0])
        refused = ""
    except ValueError as error:
        refused = str(error)
    if rank == 0:
        torch.save({"gradients": found, "refused": refused}, path)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
