"""Contrastive training: gradients of the gathered loss, recall, and errors of data files."""

import math
from argparse import Namespace

import pytest
import template_task_contrastive as task
import torch
import torch.distributed as dist
from apex_native.parallel import DistributedDataParallel
from engine import UserError
from engine.checkpoint.compatibility import describe_data
from engine.checkpoint.pretrained import load_pretrained
from engine.diagnostics.first_step import check_trainable, first_nonfinite_layer
from PIL import Image
from projects import evaluate, load_project
from torch import nn
from torch.utils.data import DataLoader, Subset

PAIRS = 6


pytestmark = pytest.mark.xdist_group("in_process")


@pytest.fixture
def project(shared_project):
    """The scripts of a project of this task, whose task.py it is."""
    return load_project(shared_project(task="contrastive"))


# The loss


class Scaled(nn.Linear):
    """Embeddings of unit length over a learned temperature, as the text encoder's are."""

    def __init__(self) -> None:
        super().__init__(3, 4)
        self.log_scale = nn.Parameter(torch.ones(1))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return nn.functional.normalize(super().forward(values), dim=1) * self.log_scale.exp()


def pairs(captions: list[int]) -> tuple[nn.Module, nn.Module, torch.Tensor, torch.Tensor]:
    """Two encoders, and what goes into them, in float64."""
    torch.manual_seed(0)
    texts = torch.randn(PAIRS, 3).double()[captions]
    return nn.Linear(5, 4).double(), Scaled().double(), torch.randn(PAIRS, 5).double(), texts


def gradients(captions: list[int], smoothing: float) -> tuple[float, list[torch.Tensor]]:
    """The loss and the gradients of one process's share of the batch."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    *encoders, images, texts = pairs(captions)
    tokens = torch.tensor(captions, dtype=torch.uint8).unsqueeze(1)
    share = slice(rank * PAIRS // world_size, (rank + 1) * PAIRS // world_size)
    model = DistributedDataParallel(task.TwoEncoders(*encoders))
    loss = task.criterion(model((images[share], texts[share])), tokens[share], smoothing)
    loss.backward()
    return loss.item(), [p.grad for encoder in encoders for p in encoder.parameters()]


def clip_loss(
    images: torch.Tensor, texts: torch.Tensor, captions: list[int], smoothing: float = 0.0
) -> torch.Tensor:
    """The loss from its definition: one term for each image and for each text.

    Smoothing gives a share of the truth to all that an image, or a text, is to choose from.
    """
    logits = nn.functional.normalize(images, dim=1) @ texts.T
    terms = []
    for table in (logits, logits.T):
        for own, row in enumerate(table):
            candidates = [i for i in range(PAIRS) if i == own or captions[i] != captions[own]]
            truth = (1 - smoothing) * row[own] + smoothing * row[candidates].mean()
            terms.append(row[candidates].logsumexp(0) - truth)
    return torch.stack(terms).mean()


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("captions", [[0, 1, 2, 3, 4, 5], [0, 1, 0, 2, 2, 0]])
def test_gradients_equal_those_of_one_process_with_the_whole_batch(processes, captions, smoothing):
    image_encoder, text_encoder, images, texts = pairs(captions)
    loss = clip_loss(image_encoder(images), text_encoder(texts), captions, smoothing)
    loss.backward()
    expected = [p.grad for m in (image_encoder, text_encoder) for p in m.parameters()]
    answers = processes(gradients, captions, smoothing)
    losses = torch.tensor([own for own, _ in answers], dtype=torch.float64)
    torch.testing.assert_close(losses.mean(), loss.detach(), rtol=1e-12, atol=0)
    for _, found in answers:
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_contrastive_loss_without_process_group(smoothing):
    image_encoder, text_encoder, images, texts = pairs(range(PAIRS))
    embeddings = image_encoder(images), text_encoder(texts)
    expected = clip_loss(*embeddings, range(PAIRS), smoothing)
    tokens = torch.arange(PAIRS, dtype=torch.uint8).unsqueeze(1)
    loss = task.criterion(embeddings, tokens, label_smoothing=smoothing)
    torch.testing.assert_close(loss, expected)


def check_pairs(count: int) -> None:
    """Check a model with so many pairs on each process."""
    batch = [torch.randn(count, 3, 32, 32), torch.arange(1, 6 * count + 1).view(count, 6).byte()]
    model = task.TwoEncoders(Pooled(), task.TextEncoder())
    check_trainable(model, task.criterion, task.prepare, batch)


class Pooled(nn.Linear):
    """A small image encoder."""

    def __init__(self) -> None:
        super().__init__(3, task.EMBEDDING)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return super().forward(images.mean(dim=(2, 3)))


def test_batch_of_one_pair_is_refused(processes):
    """Its loss is 0 whatever the weights."""
    with pytest.raises(UserError, match="one pair has no negatives.*image size or --batch-size"):
        check_pairs(1)
    check_pairs(2)
    processes(check_pairs, 1)


def test_caption_hashes_are_distinct_for_any_length():
    texts = [b"a", b"b", b"ab", b"ba", b"abc", b"a" * 200]
    short, long = (torch.stack([task.as_tensor(t, n) for t in texts]) for n in (200, 256))
    assert len(task.hash_captions(short).unique()) == len(texts)
    assert torch.equal(task.hash_captions(short), task.hash_captions(long))


# The text encoder


def test_text_encoder_ignores_padding_and_scales_by_temperature():
    encoder = task.TextEncoder()
    texts = [torch.stack([task.as_tensor(b"a digit", length)]) for length in (7, 30)]
    short, long = map(encoder, texts)
    torch.testing.assert_close(short, long, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(short.norm(), torch.tensor(1 / 0.07), rtol=1e-4, atol=0)
    short.sum().backward()
    assert encoder.log_scale.grad.item() != 0


def test_temperature_at_its_limit_has_a_gradient():
    encoder, text = task.TextEncoder(), task.as_tensor(b"a digit", 7)[None]
    optimizer = torch.optim.SGD([encoder.log_scale], lr=1e-3)
    with torch.no_grad():
        encoder.log_scale.fill_(math.log(7) + 1e-6)
    (-encoder(text).norm()).backward()  # a step would raise it further
    assert encoder.log_scale.grad == 0
    for length in (100.0, 100 * math.exp(-0.1)):
        optimizer.zero_grad()
        norm = encoder(text).norm()
        torch.testing.assert_close(norm.item(), length, rtol=1e-4, atol=0)
        norm.backward()
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_similarities_are_not_rounded_by_casts(dtype):
    torch.manual_seed(0)
    texts = 30 * nn.functional.normalize(torch.randn(1, 8) + 1e-3 * torch.randn(20, 8), dim=1)
    expected = task.similarities(texts, texts)
    with torch.autocast("cpu", dtype):
        found = task.exact_similarities(texts, texts)
        assert found.dtype == torch.float32 and (texts @ texts.T).dtype == dtype
        assert task.exact_similarities(texts.to(dtype), texts).dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


# Weights to begin with


@pytest.mark.parametrize("part", ["model", "ema"])
def test_pretrained_weights_of_both_encoders_or_of_the_image_encoder(tmp_path, part):
    file, theirs, ours = str(tmp_path / "last.pt"), build(1), build()
    torch.save({"model": build(2).state_dict(), part: theirs.state_dict()}, file)
    said = load_pretrained(ours, file, "shufflenet_v2_x0_5", [], lambda _: build())
    assert said == f"{'moving average of the ' * (part == 'ema')}weights of {file}"
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=0)
    torch.save(theirs.image_encoder.state_dict(), file)
    ours = build()
    said = load_pretrained(ours, file, "shufflenet_v2_x0_5", [], lambda _: build())
    assert said == f"weights of {file} for image_encoder"
    for name, expected in (("image_encoder", theirs), ("text_encoder", build())):
        states = (one.get_submodule(name).state_dict() for one in (ours, expected))
        torch.testing.assert_close(*states, rtol=0, atol=0)
    state = theirs.state_dict()
    position = {"text_encoder.position": state["text_encoder.position"][:77]}
    del state["text_encoder.log_scale"]
    for name, other in ("position", theirs.state_dict() | position), ("log_scale", state):
        torch.save(other, file)
        with pytest.raises(UserError, match=rf"another model .*\(text_encoder.{name} does not fit"):
            load_pretrained(ours, file, "shufflenet_v2_x0_5", [], lambda _: build())


# Validation


def build(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return task.build_model("shufflenet_v2_x0_5")


def evaluate_shard(folder, size: int) -> dict[str, float]:
    """Return what each rank computes on the first `size` digits."""
    project, val_set = load_project(folder), Subset(task.Digits(train=False), range(size))
    shard = range(dist.get_rank(), size, dist.get_world_size())
    batches = DataLoader(val_set, 4, sampler=shard)
    metrics = task.Metrics(0, torch.device("cpu"), Namespace())
    evaluate(project, build(), metrics, batches)  # the next evaluation resets the metrics
    return evaluate(project, build(), metrics, batches)


@pytest.mark.parametrize("size", [1, 7, 25])
@torch.no_grad()
def test_recall_equals_that_of_one_process(processes, project, size):
    digits, model = task.Digits(train=False), build().eval()
    images, captions = map(torch.stack, zip(*map(digits.__getitem__, range(size)), strict=True))
    names = sorted({digits.names[digits.labels[index]] for index in range(size)})
    candidates = torch.stack([task.as_tensor(name.encode(), 5) for name in names])
    logits = (
        nn.functional.normalize(model.image_encoder(images), dim=1)
        @ model.text_encoder(candidates).T
    )
    own = torch.tensor([names.index(digits.names[digits.labels[i]]) for i in range(size)])
    recall = (logits.argmax(1) == own).double().mean().item()
    loss = nn.functional.cross_entropy(logits, own).item()
    for results in processes(evaluate_shard, project.folder, size):
        assert results["val_recall_at_1"] == recall
        assert results["val_loss"] == pytest.approx(loss, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("name", ["image_encoder.conv1.0", "text_encoder.layers.1.mix_heads"])
def test_nonfinite_layer_of_either_encoder_is_named(name: str) -> None:
    model, images = build(), torch.randn(2, 3, 32, 32)
    captions = torch.tensor([[97, 98, 0], [99, 0, 0]], dtype=torch.uint8)
    assert "the loss is not" in first_nonfinite_layer(model, (images, captions))
    model.get_submodule(name).weight.data.fill_(float("nan"))
    assert f"is {name}, in its weights" in first_nonfinite_layer(model, (images, captions))


@torch.no_grad()
def test_metrics_copy_embeddings_that_cuda_graphs_overwrite() -> None:
    """As CUDA graphs do."""
    metrics = task.Metrics(0, torch.device("cpu"), Namespace())
    images, texts = torch.ones(2, 2, task.EMBEDDING)
    metrics.update((images, texts), torch.zeros(2, 5, dtype=torch.uint8))
    for embedded in (images, texts):
        embedded.zero_()
    torch.testing.assert_close(metrics.images, [torch.ones(2, task.EMBEDDING)])
    torch.testing.assert_close([*metrics.texts.values()], [torch.ones(task.EMBEDDING)])


# A folder of images and captions


@pytest.fixture
def folder(tmp_path):
    """Three images, one of them with two captions."""
    lines = ("a.jpg\ta red square", "sub/b.png\teine grüne Fläche", "a.jpg\tred", "c.jpg\tblue")
    for split in ("train", "val"):
        (tmp_path / split / "sub").mkdir(parents=True)
        for name in ("a.jpg", "sub/b.png", "c.jpg"):
            Image.new("RGB", (60, 40)).save(tmp_path / split / name)
        (tmp_path / split / "captions.tsv").write_text("file\ttext\n" + "\n".join(lines) + "\n")
    return tmp_path


def test_training_uses_each_caption_and_validation_each_image(folder):
    train_set, val_set = task.build_datasets(Namespace(data=folder, eval_only=False))
    texts = [
        [bytes(caption.tolist()).rstrip(b"\0").decode() for _, caption in pairs]
        for pairs in (train_set, val_set)
    ]
    assert texts[0] == ["a red square", "eine grüne Fläche", "red", "blue"]
    assert texts[1] == ["a red square", "eine grüne Fläche", "blue"]
    assert train_set[0][0].shape == val_set[0][0].shape == (3, 224, 224)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a.jpg\tred\nd.jpg\tgreen\n", ("names 1 files", "d.jpg")),
        ("a.jpg\tred\nc.jpg\t \n", ("line 2", "FILE, a tab, and a text")),
        ("a.jpg\tred\ten\n", ("line 1", "FILE, a tab, and a text")),
        ("a.jpg red\n", ("line 1", "FILE, a tab, and a text")),
        ("sub/../a.jpg\tred\n", ("line 1", "sub/../a.jpg must be a path below")),
        ("/etc/passwd\tred\n", ("line 1", "/etc/passwd must be a path below")),
        ("a.jpg\t" + "x" * 257, ("line 1", "257 bytes", "LENGTH")),
        ("file\ttext\n", ("holds no captions",)),
        ("a" * 300 + "/b.jpg\tred\n", ("captions.tsv names", "too long")),
        (b"a.jpg\t\xff\xfe", ("UTF-8",)),
        (None, ("is missing",)),
    ],
    ids=[
        "image",
        "empty",
        "tabs",
        "tab",
        "parent",
        "absolute",
        "long",
        "nothing",
        "name",
        "bytes",
        "file",
    ],
)
def test_invalid_caption_files_are_errors(folder, text, words):
    path = folder / "train" / "captions.tsv"
    path.unlink()
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError) as caught:
        task.build_datasets(Namespace(data=folder, eval_only=False))
    for word in (path, *words):
        assert str(word) in str(caught.value)


def test_scores_of_another_image_size_are_not_compared(folder, monkeypatch):
    found = []
    for size in (task.SIZE, 64):
        monkeypatch.setattr(task, "SIZE", size)
        train_set, val_set = task.build_datasets(Namespace(data=folder, eval_only=False))
        found.append(val_set.fingerprint)
        assert train_set[0][0].shape == (3, size, size)
    assert found[0] != found[1] and found[0]["captions"] == found[1]["captions"]


def test_images_without_a_caption_are_reported(folder, capsys):
    (folder / "val" / "captions.tsv").write_text("a.jpg\ta red square\n")
    (folder / "val" / "notes.md").touch()
    task.build_datasets(Namespace(data=folder, eval_only=False))
    (line,) = capsys.readouterr().err.splitlines()
    assert "val: ignored images without a caption: 1 (c.jpg)" in line


def test_candidate_captions(folder, tmp_path):
    assert task.candidates(None, str(folder)) == ["a red square", "eine grüne Fläche", "blue"]
    file = tmp_path / "captions.txt"
    file.write_text(" two words \n\nGrün\ntwo words\n", encoding="utf-8")
    assert task.candidates(file, str(folder)) == ["two words", "Grün"]
    file.write_text("one\u0085text\r\nan\u2028other\x0b.", encoding="utf-8")
    assert task.candidates(file, "") == ["one\u0085text", "an\u2028other\x0b."]


def test_only_the_digits_are_predicted_with_their_names(tmp_path, monkeypatch):
    path, captions = tmp_path / "image.png", tmp_path / "captions.txt"
    Image.new("L", (300, 200)).save(path)
    captions.write_text("three\n")
    model = task.build_model("resnet18").eval()
    described = {"data": ""} | describe_data({"val": task.Digits(train=False)})
    predict = task.Predictor(model, described, Namespace(top=5, captions=None))
    assert predict.captions == [*task.Digits.names] and predict.read(path).shape == (3, 32, 32)
    predict = task.Predictor(model, described, Namespace(top=5, captions=captions))
    assert predict.captions == ["three"]

    # An owner's data set, built without --data, has no folder either.
    own = described | {"samples": {"val": 20}}
    predict = task.Predictor(model, own, Namespace(top=5, captions=captions))
    assert predict.read(path).shape == (3, 224, 224)
    with pytest.raises(UserError, match="--captions: .* those of a data set of your own"):
        task.Predictor(model, own, Namespace(top=5, captions=None))
    monkeypatch.setattr(task.Digits, "file", tmp_path / "removed.npz")
    predict = task.Predictor(model, own, Namespace(top=5, captions=captions))
    assert predict.read(path).shape == (3, 224, 224)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "can't be read"),
        ("\n", "holds no captions"),
        ("x" * 257, "257 bytes"),
        ("1.jpg\ta cat", "a tab in .*give captions without file names"),
    ],
)
def test_invalid_candidate_captions_are_errors(tmp_path, text, words):
    file = tmp_path / "captions.txt"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UserError, match=f"^{file}.* {words}"):
        task.candidates(file, "")
    with pytest.raises(UserError, match="is missing.*; or name a file of captions with --captions"):
        task.candidates(None, str(tmp_path))
    with pytest.raises(
        UserError, match="--captions: predict.py can't read those of https://host/pairs"
    ):
        task.candidates(None, "https://host/pairs")


@pytest.mark.parametrize(("length", "expected"), [(32, 32), (256, 64)])
def test_synthetic_captions_fit_the_text_encoder(monkeypatch, length, expected):
    """--export and --dummy use them, also after an edit of LENGTH."""
    monkeypatch.setattr(task, "LENGTH", length)
    _, captions = task.dummy_batch(2, torch.device("cpu"))
    assert captions.shape == (2, expected)
