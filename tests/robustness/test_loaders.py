"""evaluate() on a loader, and what it keeps of each image: which are fooled, and the perturbed ones."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.robustness.small_models import digits, trained
from wassersmooth import _loaders as loaders
from wassersmooth.robustness.attacks import FGSM, IFGSM, PGD
from wassersmooth.robustness.evaluation import evaluate
from wassersmooth.robustness.measurement import Measurement

pytestmark = pytest.mark.usefixtures("few_probes")
SUITE = {"fgsm": FGSM(25 / 255), "dark": lambda model, images, labels, generator: images / 4}


def case(count=50):
    _, _, images, labels = digits()
    return trained(), images[:count], labels[:count]


def loader(count=50, batch_size=16, **options):
    _, images, labels = case(count)
    return DataLoader(TensorDataset(images, labels), batch_size, **options)


def test_a_loader_gives_the_report_of_its_tensors():
    model, images, labels = case()
    report = evaluate(model, images, labels, SUITE, seed=3)
    assert evaluate(model, loader(), suite=SUITE, seed=3) == report
    assert evaluate(model, ((x, y) for x, y in loader()), suite=SUITE, seed=3) == report


@pytest.mark.slow
def test_max_images_takes_the_first_and_reads_no_further():
    model, images, labels = case()
    read = []

    def batches():
        for x, y in loader():
            read.append(len(x))
            yield x, y

    report = evaluate(model, batches(), suite=SUITE, seed=3, max_images=20)
    assert read == [16, 16]
    assert report == evaluate(model, images, labels, SUITE, seed=3, max_images=20)
    assert report == evaluate(model, images[:20], labels[:20], SUITE, seed=3)


def test_a_shuffling_loader_leaves_the_random_state():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    loaders.gather(loader(shuffle=True), None)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_loader_on_the_cpu_serves_a_model_elsewhere(device):
    model = copy.deepcopy(trained()).to(device)
    report = evaluate(model, loader(), suite={"fgsm": FGSM(25 / 255)}, seed=3, keep_images=True)
    assert report.images["fgsm"].device.type == report.fooled["fgsm"].device.type == "cpu"
    assert torch.equal(model(report.images["fgsm"].to(device)).argmax(1).cpu() != case()[2], report.fooled["fgsm"])


def test_too_much_for_the_memory_is_refused(monkeypatch):
    monkeypatch.setattr(loaders, "MOST_BYTES", 40 * 64 * 4)
    with pytest.raises(ValueError, match=r"must fit into memory.*after 48 images; measure on a part.*max_images=24"):
        loaders.gather(loader(), None)
    assert len(loaders.gather(loader(), 50)[0]) == 50


_, SOME, CLASSES = case(4)


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (SOME, None, "labels must be given with a tensor of images"),
        ([(SOME, CLASSES)], CLASSES, "a loader has its own labels; got a list of batches"),
        ([(SOME, CLASSES)], "quick", "labels come third, and a loader has its own; got 'quick'; write suite='quick'"),
        (TensorDataset(SOME, CLASSES), None, r"got TensorDataset; wrap it: DataLoader\(dataset, batch_size=128\)"),
        (None, None, "iterable of batches .* such as a DataLoader; got NoneType"),
        ({"images": SOME}, None, "got dict"),
        ([], None, "at least one batch"),
        ([SOME], None, "got Tensor as batch 1; a data set is wrapped in .*DataLoader"),
        ([{"pixels": SOME, "labels": CLASSES}], None, r"got dict .*'pixels', 'labels': pick two of these, such as \(\(batch\["),
        ([(SOME, CLASSES, CLASSES)], None, r"got tuple as batch 1; leave out the rest, such as \(batch\[:2\] for batch"),
        ([(SOME[0], 3)], None, "got tuple of Tensor, int as batch 1"),
        ([(SOME, CLASSES), (SOME[:, :, :4], CLASSES)], None, "batch 2 must be like those of the first"),
        ([(SOME, CLASSES), (2 * SOME - 1, CLASSES)], None, r"batch 2 must be non-negative masses.*wassersmooth\.Normalized"),
        ([((255 * SOME).byte(), CLASSES)], None, r"batch 1 must be float32 or float64.*divide 8-bit images by 255"),
        ([(SOME, CLASSES.float())], None, r"labels must be .*convert with \.long\(\)"),
        (SOME.numpy(), None, "got ndarray; convert with torch.as_tensor"),
    ],
)
def test_bad_input_is_refused_in_one_line(images, labels, message):
    with pytest.raises(ValueError, match=message) as error:
        evaluate(trained(), images, labels, SUITE)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("max_images", [0, -1, 2.5, True])
def test_a_bad_number_of_images_is_refused(max_images):
    with pytest.raises(ValueError, match="max_images must be an integer of at least 1"):
        evaluate(trained(), SOME, CLASSES, SUITE, max_images=max_images)


def test_fooled_says_which_images():
    model, images, labels = case()
    report = evaluate(model, images, labels, SUITE, seed=5)
    for name, perturb in {"clean": lambda model, x, y, generator: x, **SUITE}.items():
        wrong = model(perturb(model, images, labels, None)).argmax(1) != labels
        assert torch.equal(report.fooled[name], wrong)
        assert report.seen[name].all()
        assert report.errors[name] == pytest.approx(100 * wrong.double().mean().item())


def test_what_a_measure_did_not_see_is_not_fooled():
    _, _, images, labels = digits()
    report = evaluate(trained(), images[:230], labels[:230], "quick", seed=5)  # takes 200 images at random
    seen, fooled = report.seen["fgsm_25_pixel"], report.fooled["fgsm_25_pixel"]
    assert (seen.shape, int(seen.sum())) == ((230,), 200)
    assert not (fooled & ~seen).any()
    assert report.errors["fgsm_25_pixel"] == pytest.approx(100 * int(fooled.sum()) / 200)
    assert seen[200:].any()


def test_kept_images_are_the_ones_that_fooled():
    model, images, labels = case()
    report = evaluate(model, images, labels, SUITE, seed=5, keep_images=True)
    assert torch.equal(report.images["clean"], images)
    assert torch.allclose(report.images["fgsm"], SUITE["fgsm"](model, images, labels), atol=1e-6)
    assert torch.equal(report.images["dark"], images / 4)
    for name, kept in report.images.items():
        assert torch.equal(model(kept).argmax(1) != labels, report.fooled[name])
    assert evaluate(model, images, labels, SUITE, seed=5).images == {}
    assert "images" not in report.to_dict()


def test_kept_images_of_a_part_belong_to_the_images_seen():
    _, _, images, labels = digits()
    report = evaluate(trained(), images[:230], labels[:230], "quick", seed=5, keep_images=True)
    assert torch.equal(report.images["clean"], images[:230][report.seen["clean"]])


def test_keeping_images_and_a_memory_exclude_each_other():
    with pytest.raises(ValueError, match="keep_images=True needs every measure to be run; got a memory too"):
        evaluate(trained(), SOME, CLASSES, SUITE, keep_images=True, memory={})


LEVELS = (25, 4, 10)
CURVE = [PGD(n / 255, n / 4 / 255, 5, random_start=False) for n in LEVELS]


def test_several_epsilons_attack_each_image_only_until_it_falls(monkeypatch):
    model, images, labels = case()
    attacked = []
    original = Measurement.perturbed

    def watched(self, name, perturb, which, keep):
        attacked.append((name, int(which.sum())))
        return original(self, name, perturb, which, keep)

    monkeypatch.setattr(Measurement, "perturbed", watched)
    report = evaluate(model, images, labels, [CURVE[0], FGSM(8 / 255), *CURVE[1:]], seed=5, keep_images=True)
    assert list(report.errors) == ["clean", repr(CURVE[0]), "FGSM(epsilon=8/255, units='pixel')", *map(repr, CURVE[1:])]
    fallen = model(images).argmax(1) != labels
    standing = {}
    for attack in sorted(CURVE, key=lambda attack: attack.epsilon):  # the same by hand, every image at every epsilon
        standing[repr(attack)] = int((~fallen).sum())
        fallen = fallen | (model(attack(model, images, labels)).argmax(1) != labels)
        assert torch.equal(report.fooled[repr(attack)], fallen)
    assert {name: count for name, count in attacked if name in standing} == standing
    assert standing[repr(CURVE[0])] < 50
    for attack in CURVE:
        kept = report.images[repr(attack)]
        assert torch.equal(model(kept).argmax(1) != labels, report.fooled[repr(attack)])
        assert (kept - images).abs().max() <= attack.epsilon + 1e-6
    points = {round(255 * point.epsilon): point.error for point in report.curve}
    assert sorted(points) == [4, 8, 10, 25]
    assert points[25] >= points[10] >= points[8] >= points[4] >= report.errors["clean"]


def test_attacks_that_differ_in_more_than_epsilon_are_measured_apart():
    model, images, labels = case()
    both = [IFGSM(4 / 255, 1 / 255, 3), IFGSM(25 / 255, 1 / 255, 2)]
    report = evaluate(model, images, labels, both, seed=5)
    for attack in both:
        wrong = model(attack(model, images, labels)).argmax(1) != labels
        assert torch.equal(report.fooled[repr(attack)], wrong)


class Answer:
    """What a Hugging Face model returns, as far as it matters here."""

    def __init__(self, logits):
        self.logits, self.hidden_states = logits, None


class AnswersWithLogits(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, images):
        return Answer(self.model(images))


def test_a_model_that_returns_an_object_with_logits_is_measured_like_its_logits():
    model, images, labels = case()
    wrapped = AnswersWithLogits(model)
    first, second = (evaluate(m, images, labels, "quick", seed=1, max_images=30) for m in (model, wrapped))
    assert second == first
