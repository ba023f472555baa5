"""What the finder calls, and with what: the names of docs/reference.md, and source code for each of their parameters.

Arguments are source code, so that a failure can be printed as a script. They refer to the variables of a scene (`B`, `C`,
`H`, `W`, `K` classes and the dtype `D`), which is how a failing call is made smaller. Options, flags and numbers come from
the annotations of a signature. Everything else has an entry in `PLAIN`.
"""

from __future__ import annotations

import dataclasses
import inspect
import pkgutil
import random
import re
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wassersmooth.learning.objective import Objective
from wassersmooth.robustness.attacks import Attack

PAGE = Path(__file__).parents[2] / "docs" / "reference.md"
HOMES = {
    "ws.": "wassersmooth.",
    "L.": "wassersmooth.geometry.cometric.Cometric.",
    "metric.": "wassersmooth.geometry.metrics.Metric.",
    "report.": "wassersmooth.robustness.report.Report.",
    "certificates.": "wassersmooth.robustness.certificates.Certificates.",
}
# What stands before a name that is a method, and what is done with a result that is a value: {} is the call itself.
CALLED = {
    "L.": "metric.cometric(x).{}",
    "metric.": "metric.{}",
    "certificates.": "ws.certify(model, images, metric, sigma, samples=40, select=5, alpha=0.1).{}",
    "report.": "ws.evaluate(model, images, labels, suite, seed=0).{}",
    "ws.DirectionalPenalty.from_attack": "{}(model, images, labels, generator)",
    "ws.Deformations": "{}.cometric(x).as_matrix()",
    "ws.DualNorm": "ws.GradientPenalty({}, eta)(model, images, labels)",
    "ws.Euclidean": "{}.cometric(x).as_matrix()",
    "ws.FastGradients": "{}(images, labels, generator)",
    "ws.Normalized": "{}(images)",
    "ws.Smoothed": "{}(images)",
    **dict.fromkeys((f"ws.PixelGraph.{kind}" for kind in ("grid", "line", "volume", "from_edges")), "{}"),
    "ws.Wasserstein": "{}.cometric(x).as_matrix()",
    "ws.engines.": "ws.GradientPenalty(metric, eta, engine={})(model, images, labels)",
    "wassersmooth.study.runs.Run.load_model": "wassersmooth.study.runs.Run.at(folder).load_model(data)",
}
ON_A_BATCH = "{}(model, images, labels, generator)"  # objectives and attacks, unless they are above

# One of each is drawn in a plain call. A tuple of several strings is a value and what may be done to it.
IMAGES = "torch.rand(B, C, H, W, generator=seeded({})).to(D)"
COVECTORS = "torch.randn(B, C, H, W, generator=seeded({})).to(D)"
LAYOUTS = (
    ".to(memory_format=torch.channels_last)",
    ".transpose(2, 3).contiguous().transpose(2, 3)",
    "[:1].expand(B, C, H, W)",
    ".flip(3)",
    ".repeat(1, 1, 1, 2)[..., ::2]",
    ".mul(0.5)",
    ".requires_grad_()",
    ".mul(torch.rand(B, C, H, W, generator=seeded(9)) > 0.3)",
    ".clamp(min=0.1)",
)
MODELS = (
    "net(C, H, W, K, D)",
    "net(C, H, W, K, D).train()",
    "net(C, H, W, K, D, nn.BatchNorm2d(4))",
    "net(C, H, W, K, D, nn.GroupNorm(2, 4))",
    "ws.Normalized(net(C, H, W, K, D), 0.4, 0.3)",
    "nn.Sequential(nn.Flatten(), nn.Linear(C * H * W, K).to(D))",
)
COUNTS, SIZES = ("1", "2", "3"), ("0.0", "0.1", "0.3", "np.float64(0.25)", "8 / 255")
PLAIN: dict[str, tuple[str, ...]] = {
    "attack": (
        *("ws.attacks.FGSM(0.1)", "ws.attacks.PGD(0.1, 0.05, 2)", "ws.attacks.IFGSM(0.1, 0.05, 2)"),
        "ws.attacks.WassersteinFGSM(ws.Wasserstein(ws.PixelGraph.grid(H, W, 1)), 0.1)",
    ),
    "alpha": ("0.001", "0.1", "0.4"),
    "axes": ("None",),
    "axis": ("'horizontal'", "'vertical'"),
    "batch_size": ("1", "7", "250"),
    "compile": ("False",),
    "data": ("None",),
    "distance": ("0.0", "0.4 * min(float(ws.transport.w2(x, y).min()), float((x - y).flatten(1).norm(dim=1).min()))"),
    "eta": ("0.3", "0.0", "1", "np.float64(0.1)", "torch.tensor(0.2)", "torch.tensor(0.2, dtype=torch.float64)"),
    "f": ("field",),
    "factor": ("1.0", "0.7", "2", "torch.full((B,), 1.5)"),
    "degrees": ("0.0", "30", "-90.0", "torch.full((B,), 15.0)"),
    "folder": ("random_run()",),
    "generator": ("seeded(3)", "None"),
    "height": ("H",),
    "labels": ("torch.arange(B) % K", "torch.zeros(B, dtype=torch.int64)"),
    "mean": ("0.4",),
    "memory": ("None", "{}"),
    "model": MODELS,
    "path": ("random_run() / 'model.safetensors'", "str(random_run() / 'model.safetensors')"),
    "penalty": ("None", "ws.GradientPenalty(ws.Euclidean(), 0.3)"),
    "perturbation": ("lambda model, images, labels: 0.1 * torch.ones_like(images)",),
    "power": ("1", "2"),
    "progress": ("None", "lambda done, total, name: None"),
    "queries": ("3",),
    "radii": ("0.0", "[0.0, 0.1]", "torch.tensor([0.05, 2.0])"),
    "reach": ("1",),
    "reference": ("None", "ws.engines.DoubleBackward()"),
    "samples": ("20", "100", "130", "np.int64(35)"),
    "seed": ("None", "0", "7"),
    "select": ("1", "20", "110"),
    "sigma": ("0.1", "0.5", "2", "np.float64(0.25)"),
    "shift": ("0", "1", "-1", "np.int64(1)"),
    "start_share": ("0.8", "1.0"),
    "std": ("0.3", "[0.25]"),
    "step": ("0.05", "0.5"),
    "suite": ("[ws.attacks.FGSM(8 / 255)]", "{'noise': lambda m, x, y, g: x.clamp(0.2, 1)}"),
    "tolerance": ("None", "1e-12"),
    "max_steps": ("None", "100000"),
    "L.log_prob.eta": ("0.3", "1", "2.5", "torch.tensor(0.5)"),
    "title": ("'a model'", "'<script>alert(1)</script> & \"quoted\"'"),
    "unit": ("'metric'", "'w1'", "'relative_w1'", "'geodesic'", "'l2'", "'pixels'"),
    "units": ("'pixel'",),
    "weight": ("'constant'", "'gaussian'", "lambda dy, dx: 1 / (1 + dy * dy + 2 * abs(dx)) + 0.1 * (dy * dx > 0)"),
    "width": ("W",),
    "ws.AdversarialTraining.loss": ("None",),
    "ws.FastGradients.objective": (
        *("ws.Plain()", "ws.GradientPenalty(ws.Euclidean(), 0.3)", "ws.AdversarialTraining(ws.attacks.FGSM(0.1))"),
        *(
            "ws.GradientPenalty(ws.Wasserstein(ws.PixelGraph.grid(H, W, 1)), 0.3, power=1)",
            "ws.NoisyInputs(ws.Euclidean(), 0.1)",
        ),
        *("ws.GradientPenalty(ws.Wasserstein(ws.PixelGraph.grid(H, W, 1), reference='ones'), 0.3)", "ws.Plain('square')"),
    ),
    "ws.GradientObjective.engine": ("'double_backward'", "'forward_mode'", "ws.engines.ForwardMode()"),
    "ws.FastGradients.progress": ("None", "lambda stage: None"),
    "ws.GradientObjective.loss": ("'cross_entropy'", "'square'"),
    "ws.GradientObjective.of": ("'loss'", "lambda outputs, labels: outputs.sin().sum(1)"),
    "ws.GradientObjective.penalty": (
        "lambda g, inputs, labels, outputs: 0.1 * g.flatten(1).square().sum(1)",
        "lambda g, inputs, labels, outputs: (g * inputs).flatten(1).sum(1).square() * outputs[:, 0].sigmoid()",
    ),
    "depth": ("2", "3"),
    "edges": ("torch.tensor([[i, i + 1] for i in range(H * W - 1)])", "torch.tensor([[0, i] for i in range(1, H * W)])"),
    "length": ("H * W", "np.int64(7)"),
    "nodes": ("H * W",),
    "weights": ("None", "torch.linspace(0.5, 2, H * W - 1)", "torch.ones(H * W - 1).double().requires_grad_()"),
    "ws.PixelGraph.line.weight": ("'constant'", "'gaussian'", "lambda dx: 1 / (1 + dx)"),
    "ws.PixelGraph.volume.weight": ("'constant'", "'gaussian'", "lambda dz, dy, dx: 1 + abs(dz) + 2 * (dy * dx > 0)"),
    "ws.PixelGraph.volume.radius": ("1", "2"),
    "ws.suggest_eta.objective": (
        *("ws.GradientPenalty(ws.Euclidean(), 0.3)", "ws.GradientPenalty(ws.DualNorm(), 0.1, power=1)"),
        "ws.GradientPenalty(ws.Wasserstein(ws.PixelGraph.grid(H, W, 1), mass=0.3), torch.tensor(0.2), power=1)",
        "ws.GradientPenalty(ws.Wasserstein(ws.PixelGraph.grid(H, W, 1), mass=0.3), 0.0)",
    ),
    "ws.suggest_eta.epsilon": ("0.1", "8 / 255", "np.float64(0.25)"),
    "loader": (f"[({IMAGES.format(1)}, torch.arange(B) % K)]", f"[({IMAGES.format(2)}, torch.arange(B) % K)] * 2"),
    "ws.Smoothed.seed": ("0", "7", "None", "np.int64(3)"),
    "ws.Wasserstein.reference": ("None", "'ones'", "torch.rand(C, H, W, generator=seeded(6))"),
    "pairs": (
        f"({IMAGES.format(1)}, {IMAGES.format(2)})",
        f"[({IMAGES.format(1)}, {IMAGES.format(2)}), ({IMAGES.format(3)}, {IMAGES.format(4)})]",
    ),
    "ws.fit_ground_metric.iterations": ("1", "3"),
    "ws.fit_ground_metric.mass": ("None", "0.3", "2"),
    "ws.fit_ground_metric.probes": ("None", "2"),
    "ws.fit_ground_metric.resolution": ("1 / 255", "0.1", "0.001"),
    "ws.Wasserstein.channels": ("'separate'", "'joined'", "torch.ones(C, C)", "torch.eye(C).flip(0) + torch.eye(C).flip(0).T"),
    "features": ("None",),  # with features, L is not linear in the image, and calculus refuses it
    "ws.certify.progress": ("None", "lambda done, total: None"),
    "ws.Terms.loss": ("torch.ones(())",),
    "ws.Terms.penalty": ("torch.zeros(())",),
    "ws.Terms.total": ("torch.ones(())",),
    "ws.Tikhonov.loss": ("'cross_entropy'", "'binary_cross_entropy'", "'square'"),
    "ws.attacks.AutoAttack.targeted": ("False",),
    "ws.attacks.WassersteinFGSM.units": ("'metric'",),
    "ws.attacks.WassersteinPGD.units": ("'metric'",),
    "ws.attacks.MultiTargetedPGD.targeted": ("False",),
    "ws.calculus.hessian.x": ("torch.rand(B, C, H, W, generator=seeded(4)).to(D)",),
    "ws.calculus.exp_map.x": ("0.3 + torch.rand(B, C, H, W, generator=seeded(4)).to(D) / 2",),
    "ws.calculus.exp_map.v": ("1e-3 * (x - x.mean((2, 3), keepdim=True))",),
    "ws.engines.FiniteDifference.step": ("None", "0.01"),
    "wassersmooth.learning.gradient_gap.gap.objective": ("ws.GradientPenalty(ws.Euclidean(), 0.3, engine='forward_mode')",),
}
TANGENT = ("metric.cometric(x).mv(torch.randn(B, C, H, W, generator=seeded(5)).to(D)).detach()",)
PLAIN |= dict.fromkeys(("ws.calculus.christoffel.a", "ws.calculus.christoffel.b", "ws.calculus.hessian.a"), TANGENT)
PLAIN |= {"ws.calculus.hessian.b": TANGENT, "smoothness": ("0.0", "0.5", "1.0"), "restarts": ("1",), "repeats": ("1",)}
# What can be certified: the same noise at every image, and a model in eval mode. Radii in pixels need that scale.
CERTIFIED = (
    "ws.certify",
    "ws.Smoothed",
    "certificates.w1",
    "certificates.geodesic",
    "certificates.l2",
    "certificates.to_markdown",
)
IN_PIXELS = ("certificates.pixels", "certificates.in_unit", "certificates.accuracy", "certificates.plot")
CONSTANT = (
    "ws.Wasserstein(ws.PixelGraph.grid(H, W, 2), 'pixels', reference='ones')",
    "ws.Wasserstein(ws.PixelGraph.grid(H, W, 1), 'pixels', 0.3, reference=torch.rand(C, H, W, generator=seeded(6)))",
    "ws.Wasserstein(ws.PixelGraph.grid(H, W, 2, 'disk'), 'paper', 0.1, reference='ones')",
    "ws.Wasserstein(ws.PixelGraph.grid(H, W, 1), reference=torch.rand(C, H, W, generator=seeded(7)).double())",
    "ws.Euclidean()",
)
UNIFORM = ("ws.Wasserstein(ws.PixelGraph.grid(H, W, 1), 'pixels', uniform=True)",)
PLAIN |= {f"{name}.metric": (*CONSTANT, *UNIFORM) for name in CERTIFIED} | {"metric.w1_constant.metric": CONSTANT}
PLAIN |= {f"{name}.metric": (*CONSTANT[:2], *UNIFORM) for name in IN_PIXELS}
PLAIN |= {f"{name}.model": tuple(f"{model}.eval()" for model in MODELS) for name in (*CERTIFIED, *IN_PIXELS)}
# Parameters that take tensors, which have layouts and odd values of their own, and those made by calls of public names.
TENSORS = dict.fromkeys(("images", "x", "y"), IMAGES) | dict.fromkeys(("v", "a", "b", "xi"), COVECTORS)
MADE_BY = {
    "metric": ("ws.Euclidean", "ws.Wasserstein"),
    "graph": ("ws.PixelGraph.grid",),
    "engine": ("ws.engines.DoubleBackward", "ws.engines.ForwardMode"),
    "objective": ("ws.Plain", "ws.GradientPenalty", "ws.NoisyInputs", "ws.AdversarialTraining"),
    "ws.GradientPenalty.metric": ("ws.Euclidean", "ws.Wasserstein", "ws.DualNorm", "ws.Deformations"),
    "ws.NoisyInputs.metric": ("ws.Euclidean", "ws.Wasserstein", "ws.Deformations"),
    **dict.fromkeys(
        ("L.mv.metric", "L.quad.metric", "L.diagonal.metric", "L.as_matrix.metric", "L.kappa.metric"),
        ("ws.Euclidean", "ws.Wasserstein", "ws.Deformations"),
    ),
    "ws.attacks.WassersteinFGSM.metric": ("ws.Wasserstein",),
    "ws.attacks.WassersteinPGD.metric": ("ws.Wasserstein",),
}
WRONG = (
    *("None", "'no'", "3", "0", "-1", "2.5", "nan", "True", "[]", "[1, 2]", "{}", "object()", "b'x'", "np.ones((2, 2))"),
    *("torch.ones(2)", "torch.ones(B, C, H, W)", "torch.zeros(())", "ws.DualNorm()", "ws.Euclidean", "ws.Euclidean()"),
    *("ws.PixelGraph.grid(2, 2, 1)", "ws.Wasserstein(ws.PixelGraph.grid(2, 2, 1))", "nn.Linear(2, 2)"),
    *("lambda *given: None", "lambda *given: 1.0", "ws.attacks.FGSM(0.1)", "torch.float32"),
)
ODD_NUMBERS = ("1e200", "1e-200", "1e30", "1e-30", "-0.5", "float('inf')", "10**400", "np.float32(0.5)", "torch.tensor(nan)")
ODD_TENSORS = (
    *(".mul(0)", ".mul(1e-30)", ".mul(1e30)", ".mul(1e-14)", ".mul(1e16)", ".mul(255)", ".sub(0.9)", ".neg()", ".mul(nan)"),
    *(
        ".index_fill(3, torch.tensor([0]), nan)",
        ".index_fill(3, torch.tensor([0]), float('inf'))",
        "[0]",
        "[:0]",
        ".flatten(1)",
    ),
    *(".half()", ".bfloat16()", ".double()", ".float()", ".long()", ".bool()", ".to(torch.complex64)", ".numpy()", ".tolist()"),
    *(".to_sparse()", ".to('meta')", ".requires_grad_().clone()", "[..., :1]", "[:, :, None]", ".permute(0, 2, 3, 1)"),
    *(".fill_(0.7)", ".round()", ".index_fill(3, torch.tensor([0]), 1e-30)", ".index_fill(3, torch.tensor([0]), 0)"),
)
ODD: dict[str, tuple[str, ...]] = {
    "model": (
        *("net(C, H, W, 1, D)", "net(C, H, W, K, D).half()", "net(C, H, W, K, D).to('meta')", "nn.Identity()", "nn.Flatten()"),
        *("Wrapped(net(C, H, W, K, D), lambda z: z * nan)", "Wrapped(net(C, H, W, K, D), lambda z: (z, z))"),
        *("Wrapped(net(C, H, W, K, D), torch.detach)", "Wrapped(net(C, H, W, K, D), lambda z: z.argmax(1))", "nn.Linear(7, 3)"),
        *("Wrapped(net(C, H, W, K, D), lambda z: z.mean(0))", "net(C, H, W, K, D).requires_grad_(False)", "nn.Conv2d"),
        *("ws.Normalized(nn.Linear(7, 3), 0.5, 0.5)", "net(C, H, W, K, D, nn.Dropout(0.5)).train()", "net(C, H, W, 20, D)"),
        "net(C, H, W, K, D, nn.BatchNorm2d(4)).train()",
    ),
    "images": (
        *("[(torch.rand(B, C, H, W).to(D), torch.arange(B) % K)]", "[torch.rand(B, C, H, W)]", "[None]", "iter(())"),
        *("[(torch.rand(B, C, H, W), torch.arange(B) % K), 3]", "[(torch.rand(B, C, H, W), torch.arange(B + 1))]"),
    ),
    "loader": (
        *("[torch.rand(B, C, H, W)]", "[None]", "iter(())", "[(torch.rand(B, C, H, W).to(D), torch.arange(B + 1))]"),
        *("[(torch.zeros(B, C, H, W).to(D), torch.arange(B) % K)]", "torch.rand(2, B, C, H, W)", "'images'"),
    ),
    "f": (
        "lambda x: 1.0",
        "lambda x: x",
        "lambda x: x.sum()",
        "lambda x: torch.ones(B)",
        "lambda x: x.detach().sum((1, 2, 3))",
    ),
    "labels": (
        *("torch.arange(B)", "torch.full((B,), K)", "torch.full((B,), -1)", "torch.zeros(B)", "torch.zeros(B, K)"),
        *("[0] * B", "np.zeros(B, dtype=int)", "torch.zeros(B + 1, dtype=torch.int64)", "inference(torch.arange(B) % K)"),
        *("torch.zeros(B, dtype=torch.int32)", "(torch.arange(B) % K).to('meta')", "torch.full((B, K), nan)"),
    ),
    "data": ("None",),
    "compile": ("'no'", "None", "2"),
    "loss": ("lambda z, y: z.sum(1)", "lambda z, y: z.sum()", "lambda z, y: 0.0", "torch.nn.functional.cross_entropy"),
    "memory": ("3", "[]", "'no'"),
    "suite": (
        "[]",
        "{}",
        "'fast'",
        "[3]",
        "{'a': 3}",
        "{1: ws.attacks.FGSM(0.1)}",
        "[lambda *a: None]",
        "ws.attacks.FGSM(0.1)",
    ),
    "path": ("'nowhere'", "random_run()", "random_run() / 'config.json'", "''"),
    "folder": ("'nowhere'", "random_run() / 'config.json'", "''"),
    "edges": (
        *("torch.tensor([[0, 1], [1, 0]])", "torch.tensor([[0, 0]])", "torch.arange(2 * H).reshape(2, H)", "[[0, 1]]"),
        *("torch.tensor([[0, 10**6]])", "torch.ones(3, 2)", "torch.zeros(0, 2).long()", "torch.ones(H * W, 2).bool()"),
    ),
    "weights": ("torch.zeros(H * W - 1)", "torch.full((H * W - 1,), nan)", "-torch.ones(H * W - 1)", "[1.0]", "torch.ones(1)"),
    "weight": (
        "torch.ones(3)",
        "torch.full((4,), 1e38)",
        "torch.full((4,), 1e-200, dtype=torch.float64)",
        "lambda y, x: -1.0",
        "lambda y, x: 1e38",
        "lambda y, x: 1e-200",
    ),
    "metric": (
        *("ws.Wasserstein(ws.PixelGraph.grid(H, W, 1))", "ws.Wasserstein(ws.PixelGraph.grid(H, W, 1), mass=0.1, uniform=True)"),
        *(
            "ws.Wasserstein(ws.PixelGraph.grid(H, W, 1), reference=torch.eye(max(H, W))[:H, :W].expand(C, H, W))",
            "ws.DualNorm()",
        ),
        *("ws.Wasserstein(ws.PixelGraph.grid(H, W, 1), reference=torch.zeros(C, H, W))", "ws.Wasserstein"),
        "ws.Wasserstein(ws.PixelGraph.grid(H, W, 1), reference=torch.ones(C + 1, H, W))",
        "ws.Deformations(H, W, 1.0, mass=0.1)",
        "ws.Deformations(H, W + 1)",
    ),
    "objective": (
        *("ws.GradientPenalty(ws.Euclidean(), 0.3, of='logits')", "ws.Tikhonov(ws.Euclidean(), 0.1)", "ws.Plain"),
        *("ws.GradientPenalty(ws.Euclidean(), 0.3, engine='finite_difference')", "ws.GradientPenalty(ws.DualNorm(), 0.1)"),
    ),
    "penalty": (
        *("lambda g, inputs, labels, outputs: g.sum()", "lambda g, inputs, labels, outputs: 0.0", "lambda g: g.sum((1, 2, 3))"),
        *("lambda g, inputs, labels, outputs: torch.ones(B)", "lambda g, inputs, labels, outputs: nan * outputs[:, 0]"),
    ),
    "of": ("lambda outputs, labels: outputs", "lambda outputs, labels: outputs.detach().sum(1)"),
    "radii": ("[]", "-0.1", "[nan]", "'no'", "torch.ones(B, 2, 3)", "[[0.1], [0.2]]", "['a']", "float('inf')", "np.ones(3)"),
    "seed": ("-1", "2**64", "10**400", "0.5", "True"),
    "title": ("3", "None", "b'x'", "''"),
    "mean": ("[0.3] * C", "-0.1", "torch.zeros(1)"),
    "units": ("'normalized'", "'shift'"),
    "std": ("[0.25] * C", "1e-46", "0.0", "[0.5, 'a']", "[0.1] * 5", "torch.ones(1) / 2"),
    "radius": ("100", "np.int64(2)"),
    "features": ("3", "'color'", "lambda: None", "torch.ones(2)"),
    "channels": (
        "'mixed'",
        "None",
        "-torch.ones(C, C)",
        "torch.ones(C, C + 1)",
        "torch.ones(C, C).long()",
        "torch.ones(C, C) * nan",
    ),
    "generator": ("3", "0"),
}
FILES = ("data", "folder", "path")  # the words of Python are as good as any about what is no path
NEEDED = (
    "compile",
    "queries",
    "reach",
    "samples",
    "ws.evaluate.labels",
    "ws.fit_ground_metric.iterations",
)  # defaults are not for small images on a CPU
# Of each pair, a plain call has at most one.
EXCLUDING: dict[str, tuple[tuple[str, str], ...]] = {
    "ws.Wasserstein": (("uniform", "reference"),),
    "ws.evaluate": (("keep_images", "memory"), ("generator", "seed")),
} | dict.fromkeys(("ws.attacks.FGSM", "ws.attacks.IFGSM", "ws.attacks.PGD"), (("targeted", "against"),))
SLOW = {
    "certificates.": 4,
    "certificates.plot": 20,
    "ws.certify": 2,
    "ws.Smoothed": 2,
    "ws.evaluate": 20,
    "report.": 60,
    "ws.FastGradients": 20,
    "ws.attacks.AutoAttack": 60,
    "ws.doctor": 20,
    "ws.fit_ground_metric": 4,
    "wassersmooth.": 10,
    "ws.transport.": 2,
}


@dataclass(frozen=True)
class Public:
    """A name of the reference page. ``template`` is the call with {} in place of the name's own part."""

    name: str
    call: Callable[..., Any]
    template: str

    @property
    def parameters(self) -> list[str]:
        """Its own."""
        return [name for name in inspect.signature(self.call).parameters if name != "self"]

    @property
    def optional(self) -> list[str]:
        """Those that may be left out."""
        signature = inspect.signature(self.call).parameters
        return [name for name in self.parameters if signature[name].default is not inspect.Parameter.empty]

    @property
    def others(self) -> list[str]:
        """The names in the template: those of a receiver, or of a batch."""
        names = re.findall(r"(?<![.\w])([a-z]+)(?![\w.(=])|(?<![.\w])(metric)\.", self.template)
        return list(dict.fromkeys(first or second for first, second in names))


def public_names() -> dict[str, Public]:
    """Everything that the reference page has a call of."""
    names = dict.fromkeys(re.findall(r"`((?:ws|L|metric|report|certificates|wassersmooth)\.[\w.]+)\(", PAGE.read_text()))
    found = {}
    for name in names:
        home = next((home + name.removeprefix(short) for short, home in HOMES.items() if name.startswith(short)), name)
        call = pkgutil.resolve_name(home)
        template = _longest(CALLED, name) or "{}"
        if template == "{}" and name not in CALLED and (isinstance(call, type) and issubclass(call, Objective | Attack)):
            template = ON_A_BATCH
        found[name] = Public(name, call, template)
    return found


def _longest(table: dict[str, Any], name: str) -> Any:
    return max(
        ((key, value) for key, value in table.items() if name.startswith(key)), key=lambda at: len(at[0]), default=(0, None)
    )[1]


NAMES = public_names()


def weight(name: str) -> float:
    """How often a name is called, relative to the quick ones."""
    return 1 / (_longest(SLOW, name) or 1)


def needed(public: str, parameter: str) -> bool:
    """Whether an optional parameter is given in every call."""
    return parameter in NEEDED or f"{public}.{parameter}" in NEEDED


def literals(call: Callable[..., Any], parameter: str) -> tuple[str, ...]:
    """The values that an annotation lists, None and both truth values included."""
    members = _members(call, parameter)
    listed = [
        repr(value) for member in members if typing.get_origin(member) is typing.Literal for value in typing.get_args(member)
    ]
    listed += ["True", "False"] * (bool in members)
    return tuple(listed + ["None"] * (listed != [] and type(None) in members))


def numbers(call: Callable[..., Any], parameter: str) -> tuple[str, ...]:
    """Small numbers of the kind that an annotation asks for."""
    members = _members(call, parameter)
    listed = COUNTS if int in members else SIZES if float in members else ()
    return (*listed, "None") if listed and type(None) in members else listed


def _members(call: Callable[..., Any], parameter: str) -> tuple[Any, ...]:
    try:
        # Fields of a data class are annotated in the modules of its bases, where the names in them are known.
        home = call.__init__ if isinstance(call, type) and not dataclasses.is_dataclass(call) else call  # type: ignore[misc]
        annotation = typing.get_type_hints(home)[parameter]
    except (KeyError, NameError, TypeError):
        return ()
    union = typing.get_origin(annotation) in (types.UnionType, typing.Union)
    return typing.get_args(annotation) if union else (annotation,)


Code = tuple[str, ...]  # a value, and what is done to it


class Dice:
    """Draws arguments. Every draw follows from the seed and the number of the call."""

    def __init__(self, seed: int, number: int) -> None:
        self.random = random.Random(f"{seed} {number}")

    def value(self, public: str, parameter: str, odd: bool = False) -> Code:
        """The source code of one argument; with ``odd``, one that may have to be refused."""
        pick, name = self.random.choice, f"{public}.{parameter}"
        receiver = f"{parameter}." in NAMES[public].template  # its class is what has the method
        if odd and not receiver and self.random.random() < 0.5:
            own = parameter in ODD and (self.random.random() < 0.7 or parameter in FILES)
            return (pick(ODD[parameter] if own else WRONG),)
        public_call = NAMES[public].call
        known = (
            PLAIN.get(name) or ()
            if name in MADE_BY
            else PLAIN.get(name) or PLAIN.get(parameter) or literals(public_call, parameter)
        )
        makers = MADE_BY.get(name) or MADE_BY.get(parameter)
        if not known and not makers and parameter not in TENSORS:
            known = numbers(public_call, parameter)
        if known:
            return (pick(ODD_NUMBERS if odd and set(known) & set(SIZES) else known),)
        if makers:
            return (self.call(pick(makers), odd),)
        if parameter in TENSORS:
            done = [pick(LAYOUTS) for _ in range(self.random.randrange(3))]
            base = TENSORS[parameter].format(self.random.randrange(100))
            if odd and self.random.random() < 0.05:
                return (f"inference({base})", *done)
            return (base, *done, *([pick(ODD_TENSORS)] if odd else []))
        raise LookupError(
            f"the finder cannot make the argument {parameter!r} of {public}; add a line for {name!r} or {parameter!r} to "
            "PLAIN, TENSORS or MADE_BY in tests/fuzz/arguments.py"
        )

    def call(self, public: str, odd: bool = False) -> str:
        """The source code of a call of a public name, with some of its options."""
        given = [f"{name}={''.join(code)}" for name, code in self.arguments(public, odd).items()]
        return f"{public}({', '.join(given)})"

    def arguments(self, public: str, odd: bool = False) -> dict[str, Code]:
        """All required parameters and some of the others; with ``odd``, one of them may have to be refused."""
        left_out = [name for name in NAMES[public].optional if self.random.random() < 0.6 and not needed(public, name)]
        chosen = [name for name in NAMES[public].parameters if name not in left_out]
        for pair in EXCLUDING.get(public, ()):
            if set(pair) <= set(chosen):
                chosen.remove(self.random.choice(pair))
        strange = self.random.choice(chosen) if odd and chosen else None
        return {name: self.value(public, name, name == strange) for name in chosen}
