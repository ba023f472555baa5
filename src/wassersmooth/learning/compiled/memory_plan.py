"""Which intermediate values of a compiled step are written to memory, and which are recomputed where they are needed.

Between two convolutions a step is limited by memory bandwidth: what counts is how many large tensors its kernels read and
write. The compiler decides value by value, from the number of arguments. This module considers the whole graph: a value is
kept where that lowers the traffic in a simple model of the kernels. In the penalized step of a ResNet-20 the kernels between
the convolutions then move about a quarter less than with the compiler's choice, by the compiler's count.

The model: pointwise operators are fused into their users; a kept value, and a sum over pixels, is a kernel that reads the kept
values it depends on, once; kernels at the same depth that read a common value are merged.
"""

from __future__ import annotations

import functools
import heapq
import operator
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx

from wassersmooth._torch_internals import realize_operator

aten = torch.ops.aten

LARGE = 2**17  # bytes; smaller tensors stay in the caches
SWEEPS = 3  # over all candidates; further ones change little

SUMS = (aten.sum.dim_IntList, aten.sum.default, aten.mean.dim, aten.mean.default, aten.var_mean.correction, aten.amax.default)
VIEWS = {
    *(aten.expand.default, aten.unsqueeze.default, aten.squeeze.dims, aten.squeeze.dim, aten.view.default),
    *(aten.permute.default, aten.slice.Tensor, aten.select.int, aten.alias.default, aten.clone.default, aten.copy.default),
    *(aten.constant_pad_nd.default, aten.slice_scatter.default, aten.full.default, aten.full_like.default),
}

# (values read, values written): sets of values are integers here, with one bit for each value.
Kernel = tuple[int, int]

# Inductor options: keep nothing but what is chosen here, or takes very many operators to compute.
OPTIONS = {"realize_reads_threshold": 1000, "realize_acc_reads_threshold": 1000, "realize_opcount_threshold": 150}


class MemoryPlan:
    """The values of a graph that are worth keeping.

    Arguments:
        graph: of elementary operators, each node with a fake tensor.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.nodes = [node for node in graph.nodes if node.op != "output"]
        self.place = {node: i for i, node in enumerate(self.nodes)}
        self.sources = [[self.place[n] for n in node.all_input_nodes] for node in self.nodes]
        self.sizes = [_size(node) for node in self.nodes]
        self.fused = [_is_fused(node) for node in self.nodes]
        self.users = [[self.place[user] for user in node.users if user in self.place] for node in self.nodes]
        self.depths = self._depths()
        outputs = set(graph.output_node().all_input_nodes)
        self.needed = {i for i, node in enumerate(self.nodes) if self._is_needed(i, node, outputs)}

    def chosen(self) -> list[fx.Node]:
        """The values to keep besides those that are always written: arguments of other kernels, and results."""
        kept, candidates = set(self.needed), self.candidates()
        reads: list[int] = [0] * len(self.nodes)
        kernels: list[Kernel | None] = [None] * len(self.nodes)
        self._follow(range(len(self.nodes)), kept, reads, kernels)
        levels: dict[int, list[int]] = defaultdict(list)
        for i in sorted({*kept, *candidates, *(i for i, kernel in enumerate(kernels) if kernel)}):
            levels[self.depths[i]].append(i)
        costs = {depth: self._cost([kernels[i] for i in places]) for depth, places in levels.items()}
        for _ in range(SWEEPS):
            before = set(kept)
            for i in candidates:
                kept ^= {i}
                old = self._follow([i], kept, reads, kernels)
                new = {depth: self._cost([kernels[j] for j in levels[depth]]) for depth in {self.depths[j] for j in old}}
                if sum(new.values()) < sum(costs[depth] for depth in new):
                    costs |= new
                    continue
                kept ^= {i}
                for j, (read, kernel) in old.items():
                    reads[j], kernels[j] = read, kernel
            if kept == before:
                break
        return [self.nodes[i] for i in sorted(kept - self.needed)]

    def concatenations(self, chosen: Iterable[fx.Node]) -> list[fx.Node]:
        """Those that several kernels read. The plan takes them to be written, but the compiler would compute all parts, each
        under a mask, in every kernel: in a Swin-T, in up to 37."""
        kept = self.needed | {self.place[node] for node in chosen}
        kernels = [0] * len(self.nodes)  # that compute each value
        for i in reversed(range(len(self.nodes))):
            kernels[i] = sum(kernels[j] if self.fused[j] and j not in kept else 1 for j in self.users[i])
        large = (i for i, node in enumerate(self.nodes) if node.target is aten.cat.default and self.sizes[i] >= LARGE)
        return [self.nodes[i] for i in large if kernels[i] > 1]

    def traffic(self, kept: set[int]) -> int:
        """How many bytes all kernels read and write."""
        kernels: list[Kernel | None] = [None] * len(self.nodes)
        self._follow(range(len(self.nodes)), kept, [0] * len(self.nodes), kernels)
        levels: dict[int, list[Kernel | None]] = defaultdict(list)
        for depth, kernel in zip(self.depths, kernels, strict=True):
            levels[depth].append(kernel)
        return sum(map(self._cost, levels.values()))

    def _follow(
        self, start: Iterable[int], kept: set[int], reads: list[int], kernels: list[Kernel | None]
    ) -> dict[int, tuple[int, Kernel | None]]:
        """Compute at these values, and at all that depend on a change there, what a user of each reads from memory for it, and
        the kernel that ends there. Both lists are changed; what they held before is returned."""
        waiting = list(start)
        old: dict[int, tuple[int, Kernel | None]] = {}
        while waiting:
            i = heapq.heappop(waiting)  # sources come before their users
            bit = 1 << i if self.sizes[i] >= LARGE else 0
            is_sum = self.nodes[i].target in SUMS
            read, kernel = bit, None
            if self.fused[i] or is_sum:
                read = functools.reduce(operator.or_, (reads[j] for j in self.sources[i]), 0)
                if is_sum:
                    read, kernel = 0, (read, 0)
                elif i in kept:
                    read, kernel = bit, (read, bit)
                elif not bit:
                    read = 0
            if (read, kernel) != (reads[i], kernels[i]):
                if read != reads[i]:
                    for j in self.users[i]:
                        heapq.heappush(waiting, j)
                old.setdefault(i, (reads[i], kernels[i]))
                reads[i], kernels[i] = read, kernel
        return old

    def _cost(self, kernels: Iterable[Kernel | None]) -> int:
        """How many bytes the kernels of one depth read and write, after those that share a value were merged."""
        merged: list[Kernel] = []
        for kernel in kernels:
            if kernel is not None:
                _merge(merged, *kernel)
        return sum(self._bytes(read & ~written) + self._bytes(written) for read, written in merged)

    def _bytes(self, values: int) -> int:
        total = 0
        while values:
            lowest = values & -values
            total += self.sizes[lowest.bit_length() - 1]
            values ^= lowest
        return total

    def _depths(self) -> list[int]:
        """How many kernels have to finish before the kernel of each node can start."""
        depths: list[int] = []
        for i in range(len(self.nodes)):
            before = [depths[j] + self._ends_a_kernel(j) for j in self.sources[i]]
            depths.append(max(before, default=0))
        return depths

    def _ends_a_kernel(self, i: int) -> bool:
        node = self.nodes[i]
        return node.op == "call_function" and not self.fused[i] and node.target is not operator.getitem

    def _is_needed(self, i: int, node: fx.Node, outputs: set[fx.Node]) -> bool:
        if not self.fused[i] or self.sizes[i] < LARGE:
            return False
        others = (self.place[user] for user in node.users if user in self.place)
        return node in outputs or any(not self.fused[j] and self.nodes[j].target not in SUMS for j in others)

    def candidates(self) -> list[int]:
        """Large values with several users, or with one that casts them to a wider dtype."""
        found = []
        for i, node in enumerate(self.nodes):
            if self.fused[i] and self.sizes[i] >= LARGE and node.target not in VIEWS and i not in self.needed:
                widened = any(_casts(user) and _size(user) > self.sizes[i] for user in node.users)
                if len(node.users) > 1 or widened:
                    found.append(i)
        return found


def keep_chosen_values(graph: fx.GraphModule) -> dict[str, Any]:
    """Mark in the graph what to keep, and return the options to compile it with."""
    realize = realize_operator()
    plan = MemoryPlan(graph.graph)
    chosen = plan.chosen()
    for node in [*chosen, *plan.concatenations(chosen)]:
        with graph.graph.inserting_after(node):
            kept = graph.graph.call_function(realize, (node,))
        kept.meta = dict(node.meta)
        for user in [user for user in node.users if user is not kept]:
            user.replace_input_with(node, kept)
    graph.recompile()
    return dict(OPTIONS)


def _merge(kernels: list[Kernel], read: int, written: int) -> None:
    """Add a kernel to those of its depth, merged with those that share a value with it."""
    separate = []
    for other_read, other_written in kernels:
        if (other_read | other_written) & (read | written):
            read, written = read | other_read, written | other_written
        else:
            separate.append((other_read, other_written))
    kernels[:] = [*separate, (read, written)]


def _size(node: fx.Node) -> int:
    value = node.meta.get("val")
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0


def _is_fused(node: fx.Node) -> bool:
    """Whether the operator is pointwise or a view."""
    return _casts(node) or node.target in VIEWS or torch.Tag.pointwise in getattr(node.target, "tags", ())


def _casts(node: fx.Node) -> bool:
    return node.target is aten._to_copy.default
