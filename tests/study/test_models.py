"""Networks by name, with the normalization inside, initialized by the seed alone."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.study.small_studies import CPU, SILENT, tiny_run, tiny_study
from wassersmooth.normalized import Normalized
from wassersmooth.study import experiment
from wassersmooth.study.config import Model
from wassersmooth.study.errors import StudyError
from wassersmooth.study.models import BasicBlock, ResNet20, SmallNet, build, require_fitting, require_training_in_batches


def made(name: str, seed: int = 0, channels: int = 3, classes: int = 10, **options: str) -> nn.Module:
    return build(Model(name, **options), channels, classes, [0.5] * channels, [0.25] * channels, seed)  # type: ignore[arg-type]


def test_resnet20_has_the_published_number_of_parameters() -> None:
    assert sum(p.numel() for p in ResNet20(3, 10).parameters()) == 269_722


def test_resnet18_has_the_customary_number_of_parameters_and_its_scores() -> None:
    model = made("resnet18", activation="silu")
    assert sum(p.numel() for p in model.parameters()) == 11_173_962
    assert model.eval()(torch.rand(1, 3, 8, 8)).shape == (1, 10)
    assert any(isinstance(module, nn.SiLU) for module in model.modules())


@pytest.mark.parametrize("activation", ["softplus", "relu", "gelu", "silu"])
@pytest.mark.parametrize(("name", "size"), [("resnet20", 32), ("small", 16), ("small", 28)])
def test_scores_for_any_number_of_channels_and_classes(name: str, size: int, activation: str) -> None:
    model = made(name, channels=2, classes=7, activation=activation)
    assert model(torch.rand(3, 2, size, size)).shape == (3, 7)


def test_the_shortcut_is_option_a_every_other_pixel_and_zero_channels() -> None:
    block = BasicBlock(4, 8, 2, "relu")
    nn.init.zeros_(block.norm2.weight)  # the residual branch is zero
    x = torch.rand(2, 4, 6, 6)
    y = block(x)
    assert y[:, 2:6].equal(x[:, :, ::2, ::2])
    assert y[:, :2].abs().max() == y[:, 6:].abs().max() == 0
    assert sum(p.numel() for p in block.parameters()) == 4 * 8 * 9 + 8 * 8 * 9 + 4 * 8


def test_the_seed_decides_the_weights_and_the_global_state_stays() -> None:
    before = torch.get_rng_state()
    first, again, other = made("small", 1), made("small", 1), made("small", 2)
    assert torch.get_rng_state().equal(before)
    pairs = zip(first.parameters(), again.parameters(), other.parameters(), strict=True)
    same, different = zip(*((a.equal(b), a.equal(c)) for a, b, c in pairs), strict=True)
    assert all(same)
    assert not all(different)


def test_the_small_network_couples_no_images() -> None:
    model = SmallNet(1, 3).train()
    images = torch.rand(4, 1, 8, 8)
    torch.testing.assert_close(model(images)[:1], model(images[:1]))


def test_a_user_factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "from torch import nn\ndef net(channels, classes):\n    return nn.Sequential(nn.Flatten(), nn.LazyLinear(classes))\n"
    (tmp_path / "my_networks.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert made("my_networks:net", classes=4)(torch.rand(2, 3, 4, 4)).shape == (2, 4)
    sys.modules.pop("my_networks")


@pytest.mark.parametrize("name", ["resnet34", "no_such_module:net", "json:no_such_function", ":", "timm:"])
def test_an_unknown_model_is_one_line_with_the_remedy(name: str) -> None:
    with pytest.raises(StudyError, match=r"module:factory|timm") as caught:
        made(name)
    assert "\n" not in str(caught.value)


def test_timm_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """timm is optional; a stand-in checks how it is called."""
    fake = types.ModuleType("timm")
    fake.__version__ = "1"  # type: ignore[attr-defined]
    fake.is_model = lambda name: name == "resnet18"  # type: ignore[attr-defined]

    def create_model(name: str, pretrained: bool, in_chans: int, num_classes: int) -> nn.Module:
        assert not pretrained
        return nn.Sequential(nn.Conv2d(in_chans, num_classes, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())

    fake.create_model = create_model  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "timm", fake)
    assert made("timm:resnet18", classes=6)(torch.rand(2, 3, 8, 8)).shape == (2, 6)
    with pytest.raises(StudyError, match="has no model 'resnet19'"):
        made("timm:resnet19")


def test_a_package_that_does_not_fit_the_installed_torch_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "timm.py").write_text('raise RuntimeError("operator torchvision::nms does not exist")')
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(StudyError, match=r"timm, which cannot be imported \(RuntimeError: operator .*; install them with"):
        made("timm:resnet18")


def test_a_script_that_ends_the_program_is_not_taken_for_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ends.py").write_text("def net(channels, classes): ...\nraise SystemExit(0)")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(StudyError, match="model ends:net: ends ends the program when it is imported; expected module:factory"):
        made("ends:net")


def fails(channels: int, classes: int) -> nn.Module:
    raise KeyError("depth")


def leaves(channels: int, classes: int) -> nn.Module:
    raise SystemExit(0)


OWN = {
    "fails": (fails, r"the factory failed \(KeyError: 'depth'\); it is called as factory\(channels=\.\.\., classes=\.\.\.\)"),
    "leaves": (leaves, r"the factory failed \(SystemExit: 0\)"),
    "width": (lambda width: nn.Linear(1, width), r"the factory failed \(TypeError: .*'channels'"),
    "number": (lambda channels, classes: 3, r"returned int; expected a torch\.nn\.Module"),
    "empty": (lambda channels, classes: nn.Flatten(), "a model without parameters"),
    "shape": (
        lambda channels, classes: nn.Linear(5, classes),
        r"does not take an image of shape \(1, 1, 8, 8\) \(RuntimeError",
    ),
    "lengthy": (lambda channels, classes: Lengthy(5, classes), r"\(RuntimeError: a first line\); expected"),
    "scores": (
        lambda channels, classes: nn.Sequential(nn.Flatten(), nn.Linear(64, 7)),
        r"\(1, 7\) for one image; expected .* \(1, 3\)",
    ),
    "tuple": (lambda channels, classes: nn.LSTM(8, classes), "does not take|returns tuple for one image"),
    "normalized": (
        lambda channels, classes: nn.Sequential(Normalized(nn.Sequential(nn.Flatten(), nn.Linear(64, classes)), 0.5, 0.25)),
        "has a wassersmooth.Normalized inside; expected .*; return the network alone",
    ),
    "frozen": (
        lambda channels, classes: nn.Sequential(nn.Flatten(), nn.Linear(64, classes)).requires_grad_(False),
        r"has frozen parameters only \(requires_grad is False\); expected some to train; leave out requires_grad_\(False\)",
    ),
    "lazy": (lambda channels, classes: nn.Sequential(nn.Flatten(), nn.LazyLinear(classes)), "lazy layers"),
}


@pytest.mark.parametrize("name", list(OWN))
def test_a_mistake_in_a_factory_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    factory, complaint = OWN[name]
    module = types.ModuleType("own_networks")
    module.net = factory  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "own_networks", module)
    study = tiny_study(tmp_path, model="own_networks:net")
    with pytest.raises(StudyError, match=complaint):
        experiment.train(study, "tiny", tmp_path / "study", CPU, SILENT)
    assert not (tmp_path / "study").exists()


class Lengthy(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError(f"a first line\nand a second one for {x.shape}")


class Remembering(nn.Sequential):
    """Records the sizes of its training batches."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.sizes = [*getattr(self, "sizes", []), len(images)]
        scores: torch.Tensor = super().forward(images)
        return scores


def test_a_last_batch_of_one_image_is_refused_at_once_if_the_network_cannot_train_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = Remembering(nn.Flatten(), nn.Linear(64, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    module = types.ModuleType("own_networks")
    module.net = lambda channels, classes: network  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "own_networks", module)
    complaint = r"one image alone \(a batch norm .*, and 72 training images in batches of 71 leave one; choose an"
    with pytest.raises(StudyError, match=complaint) as caught:
        experiment.train(tiny_study(tmp_path, model="own_networks:net", batch_size=71), "tiny", tmp_path / "a", CPU, SILENT)
    assert "\n" not in str(caught.value)
    assert network.sizes == [1], "nothing was trained"
    experiment.train(tiny_study(tmp_path, model="own_networks:net", batch_size=70), "tiny", tmp_path / "a", CPU, SILENT)
    _, loaded = tiny_run(tmp_path)
    require_training_in_batches(network, loaded, 34, 2)  # 34, 34 and 4 images: at least 2 for each process
    with pytest.raises(StudyError, match="in batches of 35, which 2 processes share, leave one; choose another --batch-size"):
        require_training_in_batches(network, loaded, 35, 2)


def test_checking_the_last_batch_changes_nothing(tmp_path: Path) -> None:
    _, loaded = tiny_run(tmp_path)
    network = nn.Sequential(nn.BatchNorm2d(1), nn.Dropout(), nn.Flatten(), nn.Linear(64, 3)).eval()
    state = [torch.get_rng_state(), *(tensor.clone() for tensor in network.state_dict().values())]
    require_training_in_batches(network, loaded, 71, 1)
    assert all(a.equal(b) for a, b in zip(state, [torch.get_rng_state(), *network.state_dict().values()], strict=True))
    assert not network.training


def test_a_part_of_a_network_may_be_frozen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, loaded = tiny_run(tmp_path)
    module = types.ModuleType("own_networks")
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 8).requires_grad_(False), nn.Linear(8, 3))
    module.net = lambda channels, classes: network  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "own_networks", module)
    require_fitting(Model("own_networks:net"), loaded)


def test_a_typo_in_the_users_module_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_networks.py").write_text("def net(:\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(StudyError, match=r"model broken_networks:net: .*invalid syntax"):
        made("broken_networks:net")


def test_checking_a_model_draws_no_random_numbers(tmp_path: Path) -> None:
    _, loaded = tiny_run(tmp_path)
    before = torch.get_rng_state()
    require_fitting(Model("small"), loaded)
    assert torch.get_rng_state().equal(before)
