"""Searches on packed rows: they may be replayed, padding and packing change nothing, and the steps are those of the papers."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.robustness import attack_oracles as oracles
from tests.robustness.small_models import digits, trained
from wassersmooth.robustness import packed_search
from wassersmooth.robustness.apgd import APGD, checkpoints, objective_value
from wassersmooth.robustness.fab import FAB, to_plane
from wassersmooth.robustness.model_queries import isolated_model, likeliest_wrong_classes
from wassersmooth.robustness.packed_search import Search, StandingImages
from wassersmooth.robustness.square import SquareSearch, bump

SEARCHES = [
    APGD(0.1, "linf", iterations=6),
    APGD(0.1, "linf", "targeted_dlr", iterations=6),
    APGD(0.5, "l2", "dlr", iterations=6, draws=2),
    FAB(0.1, "linf", iterations=3),
    FAB(0.5, "l2", iterations=3),
    SquareSearch(0.1, "linf", 30),
    SquareSearch(0.5, "l2", 30),
]
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "lift_fresh")


class NoWaiting(TorchDispatchMode):
    """Refuse the operations that wait for a CUDA device, or copy numbers to it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        masked = "index" in str(func) and any(isinstance(x, torch.Tensor) and x.dtype == torch.bool for x in tree_leaves(args))
        assert not masked, f"{func} would wait for the device"
        assert not any(word in str(func) for word in WAITS), f"{func} would wait for the device"
        return func(*args, **(kwargs or {}))


def standing(count=12, fixed=None, model=None, seed=0, dtype=torch.float32):
    _, _, images, labels = digits()
    images, labels, model = images[:count].to(dtype), labels[:count], model or trained()
    generator = torch.Generator().manual_seed(seed)
    return StandingImages(model, images, labels, model(images).argmax(1) == labels, generator, fixed)


@pytest.mark.parametrize("search", SEARCHES, ids=repr)
def test_an_iteration_can_be_captured_into_a_graph(search):
    """It reads no value of a tensor and replaces no tensor of its state."""
    everything = standing()
    with isolated_model(everything.model, everything.images):
        rows = torch.arange(12)
        state = everything._begin(search, rows, (everything.labels + 1) % 10)
        search.prepare(state, 0, None)
        held = {name: (tensor, tensor.data_ptr()) for name, tensor in state.items()}
        with NoWaiting():
            search.advance(everything.model, state)
    assert {name: (tensor, tensor.data_ptr()) for name, tensor in state.items()} == held
    assert (state["turn"] == 1).all()


def test_the_check_above_sees_what_waits():
    for wait in (
        lambda x: x.sum().item(),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x * torch.tensor([1.0, 2.0, 3.0]),
    ):
        with pytest.raises(AssertionError, match="would wait"), NoWaiting():
            wait(torch.ones(3))


@pytest.mark.parametrize("search", [APGD(0.1, "linf", "targeted_dlr", iterations=25), FAB(0.1, "linf", 25)], ids=repr)
def test_batches_of_fixed_sizes_find_the_same(search):
    found = []
    for fixed in (False, True):
        everything = standing(60, fixed)
        with torch.no_grad():
            targets = likeliest_wrong_classes(everything.model(everything.images), everything.labels, 4)
        with isolated_model(everything.model, everything.images):
            everything.attack(search, targets)
        found.append(everything)
    assert 0 < found[0].stands.sum() < 50
    assert (found[0].stands != found[1].stands).sum() <= 1  # their random starts differ
    if isinstance(search, FAB):  # which has none
        assert torch.equal(found[0].stands, found[1].stands)


class Counted(nn.Module):
    """Notes the sizes of the batches."""

    def __init__(self, model):
        super().__init__()
        self.model, self.sizes = model, []

    def forward(self, x):
        self.sizes.append(len(x))
        return self.model(x)


@pytest.mark.parametrize("fixed", [False, True])
def test_fallen_images_are_dropped_and_sizes_are_few(fixed, monkeypatch):
    monkeypatch.setattr(packed_search, "REPACKING", 1)
    model = Counted(trained())
    everything = standing(50, fixed, model)
    everything.asked.sizes.clear()
    with isolated_model(model, everything.images):
        everything.attack(APGD(30 / 255, "linf", iterations=60))
    left = int(everything.stands.sum())
    assert 0 < left < 25
    sizes = everything.asked.sizes[: None if everything.asked is not model else -1]  # the last pass confirms what was found
    assert sizes == sorted(sizes, reverse=True)
    assert left <= sizes[-1] <= max(1.5 * left, 1)
    assert not fixed or set(sizes) <= {50, 48, 44, 40, 36, 32, 24, 16, 12, 8, 6, 4}


def test_padding_costs_little():
    everything = standing(50, True)
    everything.limit = 10_000
    sizes = [everything._size(rows) for rows in range(1, 1025)]
    assert all(rows <= size <= 1.5 * rows for rows, size in enumerate(sizes, 1))
    assert all(size <= 9 * rows / 8 for rows, size in enumerate(sizes, 1) if rows >= 32)
    assert len(set(sizes)) <= 50
    assert sizes[280] == 288


@pytest.mark.parametrize("search", SEARCHES, ids=repr)
def test_the_memory_format_stays(search):
    """A copy to another format in every iteration would cost more than the format gains."""
    formats = []

    class Looking(nn.Module):
        def forward(self, x):
            formats.append(x.is_contiguous(memory_format=torch.channels_last))
            return x.mean((2, 3)) @ torch.arange(15.0).sin().view(3, 5)

    images = torch.rand(6, 3, 4, 4)
    everything = StandingImages(
        Looking(), images, torch.zeros(6, dtype=torch.int64), torch.ones(6, dtype=torch.bool), None, True
    )
    everything.images = images.contiguous(memory_format=torch.channels_last)
    everything.limit = 6
    state = everything._begin(search, torch.arange(6), torch.ones(6, dtype=torch.int64))
    formats.clear()
    for iteration in range(3):
        search.prepare(state, iteration, None)
        search.advance(everything.model, state)
        state = packed_search._rows_of(state, torch.arange(6 - iteration), 6 - iteration)
    assert len(formats) >= 3
    assert all(formats)


class Counting(Search):
    """Notes how often it was prepared, and fools nothing."""

    iterations = 3

    def __init__(self):
        self.rows = []

    def start(self, model, state, generator):
        self.rows.append(list(zip(state["label"].tolist(), state["target"].tolist(), strict=True)))

    def advance(self, model, state):
        state["turn"] += 1


def test_every_image_meets_every_target_one_after_the_other():
    everything = standing(5)
    targets = torch.stack([(everything.labels + k) % 10 for k in (1, 2, 3)], 1)
    search = Counting()
    everything.attack(search, targets)
    rows = [row for batch in search.rows for row in batch]
    labels = everything.labels[everything.stands].tolist()
    assert rows == [(label, (label + k) % 10) for k in (1, 2, 3) for label in labels]
    assert all(len(batch) <= 5 for batch in search.rows)


def test_what_fools_only_in_a_smaller_batch_does_not_count():
    class Fickle(nn.Module):
        def forward(self, x):
            score = x.flatten(1).sum(1) * 0
            return torch.stack((score, score + (1 if len(x) < 4 else -1)), 1)

    images = torch.rand(4, 1, 3, 3)
    labels = torch.zeros(4, dtype=torch.int64)
    stands = torch.tensor([True, True, False, False])
    everything = StandingImages(Fickle(), images, labels, stands, None)
    everything.attack(APGD(0.1, "linf", iterations=2))
    assert torch.equal(everything.stands, stands)


def test_scores_that_are_not_finite_fool_nobody():
    outputs = torch.tensor([[0.0, 1.0], [0.0, torch.nan], [torch.inf, 0.0], [1.0, 0.0]])
    assert packed_search.fooled(outputs, torch.tensor([0, 0, 1, 0])).tolist() == [True, False, False, False]


# APGD ----------------------------------------------------------------------------------------------------------------


def test_the_published_checkpoints():
    assert [when for when, _ in checkpoints(100)] == [22, 41, 57, 70, 80, 87, 93, 99]
    assert checkpoints(1) == []
    assert all(0 < when < 10 for when, _ in checkpoints(10))


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("objective", ["cross_entropy", "dlr", "targeted_dlr"])
def test_apgd_is_the_algorithm_of_the_paper(norm, objective):
    """Image by image, from the same start, with the loops of the paper."""
    model = copy.deepcopy(trained()).double()
    everything = standing(6, model=model, dtype=torch.float64)
    search = APGD(0.05 if norm == "linf" else 0.3, norm, objective, iterations=40)
    rows, targets = torch.arange(6), (everything.labels + 3) % 10
    with isolated_model(model, everything.images):
        state = everything._begin(search, rows, targets)
        starts = state["x"].clone()
        for iteration in range(search.iterations):
            search.prepare(state, iteration, None)
            search.advance(model, state)
    for i in range(6):
        label, target = everything.labels[i : i + 1], targets[i : i + 1]

        def loss(x, label=label, target=target):
            return objective_value(model(x), label, target, objective)

        expected = oracles.apgd(loss, everything.images[i : i + 1], starts[i : i + 1], search.epsilon, norm, 40)
        torch.testing.assert_close(state["best"][i : i + 1], expected, rtol=0, atol=1e-9)


def test_the_losses_by_hand():
    outputs, label = torch.tensor([[5.0, 3.0, 2.0, 1.0, 0.0]]), torch.tensor([0])
    assert objective_value(outputs, label, label, "dlr").item() == pytest.approx(-(5 - 3) / (5 - 2))
    assert objective_value(outputs, torch.tensor([1]), label, "dlr").item() == pytest.approx(-(3 - 5) / (5 - 2))
    target = torch.tensor([4])
    assert objective_value(outputs, label, target, "targeted_dlr").item() == pytest.approx(-(5 - 0) / (5 - 1.5))
    expected = F.cross_entropy(outputs, label).item()
    assert objective_value(outputs, label, target, "cross_entropy").item() == pytest.approx(expected)


# FAB -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("share", [1e-3, 0.1, 0.6, 0.99, 1.2])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_projection_onto_a_plane_in_the_box(norm, share, sign):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(20, 1, 6, 6, generator=generator, dtype=torch.float64)
    x[:, :, 0], x[:, :, 1] = 0, 1
    w = torch.randn(x.shape, generator=generator, dtype=torch.float64) ** 3
    w[:, :, 2, :3] = 0
    reach = (w.abs() * torch.where(sign * w > 0, x, 1 - x)).sum((1, 2, 3))
    value = sign * share * reach
    change = to_plane(x, w, value, norm)
    assert ((x + change >= -1e-12) & (x + change <= 1 + 1e-12)).all()
    torch.testing.assert_close((w * change).sum((1, 2, 3)), -value.clamp(-reach, reach), rtol=1e-9, atol=1e-12)
    for i in range(len(x)):
        expected = oracles.project_onto_plane(x[i].flatten(), w[i].flatten(), value[i], norm)
        torch.testing.assert_close(change[i].flatten(), expected, rtol=0, atol=1e-8)


def test_a_plane_without_a_normal_moves_nothing():
    x = torch.rand(2, 1, 3, 3)
    assert torch.equal(to_plane(x, torch.zeros_like(x), torch.tensor([1.0, 0.0]), "linf"), torch.zeros_like(x))


# Square --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", [1, 2, 3, 7, 8, 15])
def test_the_bump_of_the_paper(side):
    torch.testing.assert_close(bump(side), oracles.square_bump(side), rtol=0, atol=1e-12)
    assert bump(side).norm().item() == pytest.approx(1)


def test_the_published_schedule():
    """Of AutoAttack: 5,000 queries of a schedule that was made for 10,000, and squares of 80 % of the pixels at first."""
    search = SquareSearch(0.1, "linf")
    sides = [search._side(query, 32, 32) for query in range(5000)]
    changes = [query for query in range(1, 5000) if sides[query] != sides[query - 1]]
    assert changes == [11, 51, 201, 501, 1001, 2001, 4001]
    assert [sides[query] for query in (0, *changes)] == [29, 20, 14, 10, 7, 5, 4, 3]


def test_squares_reach_every_pixel():
    everything = standing(4, fixed=True)
    search = SquareSearch(0.1, "linf", 400, 400)
    with isolated_model(everything.model, everything.images):
        state = everything._begin(search, torch.arange(4), everything.labels)
        seen = torch.zeros(8, 8, dtype=torch.bool)
        state["value"].fill_(-torch.inf)
        state["fallen"].zero_()
        for query in range(300):
            search.prepare(state, query, None)
            before = state["found"].clone()
            state["value"].fill_(-torch.inf)
            state["fallen"].zero_()
            search.advance(everything.model, state)
            seen |= (state["found"] != before).any(0).any(0)
    assert seen.all()


@pytest.mark.parametrize("size", [(1, 1), (2, 5), (3, 3), (9, 6)])
@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_square_on_images_of_any_size(size, norm):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(2 * size[0] * size[1], 3))
    images = torch.rand(10, 2, *size)
    labels = model(images).argmax(1)
    everything = StandingImages(model, images, labels, torch.ones(10, dtype=torch.bool), None)
    everything.attack(SquareSearch(0.2, norm, 40))
    change = (everything.found - images).flatten(1)
    assert (change.abs().amax(1) if norm == "linf" else change.norm(dim=1)).max() <= 0.2 * (1 + 1e-5)
    assert everything.found.min() >= 0
    assert everything.found.max() <= 1
