"""Networks (specification §C) as plain modules; each takes its sizes as keyword arguments."""

from anyfleet.tasks.zoo.language import Transformer
from anyfleet.tasks.zoo.residual import resnet18, resnet_s2, wide_resnet
from anyfleet.tasks.zoo.simple import (
    cnn_c,
    cnn_cifar,
    cnn_m,
    cnn_mnist,
    digits_net,
    har_cnn,
    logistic,
    mcmahan_cnn,
    perceptron,
    vgg9,
)

__all__ = [
    "Transformer",
    "cnn_c",
    "cnn_cifar",
    "cnn_m",
    "cnn_mnist",
    "digits_net",
    "har_cnn",
    "logistic",
    "mcmahan_cnn",
    "perceptron",
    "resnet18",
    "resnet_s2",
    "vgg9",
    "wide_resnet",
]
