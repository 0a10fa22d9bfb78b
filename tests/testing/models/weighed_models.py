"""Factories of models whose losses count labels unlike: by weights of classes, or leave out others than -100."""

import torch
from torch import nn
from torch.nn import functional

SAMPLES, WIDTH, CLASSES = 8, 16, 5
WEIGHTS = torch.tensor([0.2, 1.0, 3.0, 0.5, 7.0])
_CHANCE = torch.Generator().manual_seed(1)
_X = torch.randn(SAMPLES, WIDTH, generator=_CHANCE)
_CLASSES = torch.tensor([0, 1, 2, 3, 4, 0, 0, 1])
_TOKENS = torch.randint(0, CLASSES, (SAMPLES, 6), generator=_CHANCE)
_PIXELS = torch.randint(0, CLASSES, (SAMPLES, 4, 4), generator=_CHANCE)


def _layers():
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)), nn.Linear(WIDTH, CLASSES)
    )


class Words(nn.Module):
    """A language model after nanoGPT: it returns its outputs, and the loss behind them."""

    def __init__(self, **kwargs):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(CLASSES, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)
        self._kwargs = kwargs

    def forward(self, tokens, targets=None):
        hidden = self.words(tokens)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        logits = self.head(hidden)
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), **self._kwargs)
        return logits, loss


def _unlike(labels, left_out):
    """Leave other numbers of labels out of each sample."""
    labels = labels.clone().flatten(1)
    for row, own in enumerate(labels):
        own[: row % 5] = left_out
    return labels.reshape(SAMPLES, *_TOKENS.shape[1:] if labels.shape[1] == 6 else (4, 4))


def weights():
    return _layers(), (_X, _CLASSES), nn.CrossEntropyLoss(weight=WEIGHTS)


def weights_of_one_class():
    return _layers(), (_X, torch.zeros_like(_CLASSES)), nn.CrossEntropyLoss(weight=WEIGHTS)


def weights_and_smoothing():
    return _layers(), (_X, _CLASSES), nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.1)


def weights_of_likelihoods():
    def loss(outputs, labels):
        return functional.nll_loss(outputs.log_softmax(-1), labels, WEIGHTS.to(outputs))

    return _layers(), (_X, _CLASSES), loss


def some_left_out():
    return _layers(), (_X, _CLASSES.masked_fill(_CLASSES == 1, -100)), nn.CrossEntropyLoss()


def some_left_out_by_minus_one():
    return _layers(), (_X, _CLASSES.masked_fill(_CLASSES == 1, -1)), nn.CrossEntropyLoss(ignore_index=-1)


def words():
    return Words(ignore_index=-1), (_TOKENS, _unlike(_TOKENS, -1))


def words_without_padding():
    return Words(ignore_index=0, weight=WEIGHTS), (_TOKENS, _TOKENS.clamp(min=1))


def words_behind():
    """Weights of the words that follow, by labels that are the words themselves."""
    model = nn.Sequential(nn.Embedding(CLASSES, WIDTH), *_layers())

    def loss(outputs, labels):
        return functional.cross_entropy(outputs[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), weight=WEIGHTS)

    return model, (_TOKENS, _unlike(_TOKENS, -100)), loss


def pixels():
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Conv2d(3 if i == 0 else 8, 8, 3, padding=1), nn.ReLU()) for i in range(3))
    images = torch.randn(SAMPLES, 3, 4, 4, generator=torch.Generator().manual_seed(2))
    model = nn.Sequential(*layers, nn.Conv2d(8, CLASSES, 1))
    return model, (images, _unlike(_PIXELS, 255)), nn.CrossEntropyLoss(ignore_index=255)


class Large(nn.Module):
    """Weighs the classes of more than a few samples."""

    def forward(self, outputs, labels):
        weight = WEIGHTS if len(labels) > 3 else None
        return functional.cross_entropy(outputs.flatten(0, 1), labels.flatten(), weight=weight)


def weighs_many():
    return nn.Sequential(nn.Embedding(CLASSES, WIDTH), *_layers()), (_TOKENS, _TOKENS), Large()


class Keeps(nn.Module):
    """Goes by a mean over what it was given before."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, hidden):
        hidden = self.layer(hidden)
        with torch.no_grad():
            self.mean.lerp_(hidden.mean(0), 0.1)
        return hidden - self.mean


def keeps_a_mean():
    return nn.Sequential(Keeps(), Keeps(), nn.Linear(WIDTH, CLASSES)), (_X, _CLASSES), nn.CrossEntropyLoss()


class Slope(nn.Module):
    """Goes down the slope of what a layer makes."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden):
        return hidden - torch.func.grad(lambda given: self.layer(given).square().sum())(hidden)


def takes_slopes():
    return nn.Sequential(Slope(), Slope(), nn.Linear(WIDTH, CLASSES)), (_X, _CLASSES), nn.CrossEntropyLoss()


def weighs_a_part_of_the_model():
    model = _layers()
    return (
        model,
        (_X, _CLASSES),
        lambda outputs, labels: functional.cross_entropy(outputs, labels) + model[0][0].weight.norm(),
    )


class Warm(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.heat = nn.Parameter(torch.ones(()))

    def forward(self, outputs, labels):
        return functional.cross_entropy(outputs * self.heat, labels)


def loss_with_a_parameter():
    return _layers(), (_X, _CLASSES), Warm()


class Told(Words):
    """Is given what it learns under another name than `labels`."""

    def forward(self, tokens, told):
        return super().forward(tokens, told)


def labels_by_another_name():
    return Told(ignore_index=0), {"tokens": _TOKENS, "told": _TOKENS.clamp(min=1)}


def _of_words(loss):
    return nn.Sequential(nn.Embedding(CLASSES, WIDTH), *_layers()), (_TOKENS, _TOKENS.clamp(min=1)), loss


def mean_of_words_by_hand():
    def loss(outputs, labels):
        counted = (labels != 0).float()
        each = functional.cross_entropy(outputs.transpose(1, 2), labels, reduction="none")
        return (each * counted).sum() / counted.sum()

    return _of_words(loss)


def mean_of_chosen_words():
    return _of_words(lambda outputs, labels: functional.cross_entropy(outputs[labels != 0], labels[labels != 0]))


def mean_of_words_replaced():
    def loss(outputs, labels):
        return functional.cross_entropy(outputs.transpose(1, 2), labels.masked_fill(labels == 0, -100))

    return _of_words(loss)
