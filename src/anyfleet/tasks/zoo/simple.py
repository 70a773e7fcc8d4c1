"""Feed-forward networks of the specification: C.1 to C.8, C.10, and activity recognition (C.12).

They are ordinary modules that know nothing of slicing. Hidden layers end in ReLU; logits do not
(FedPMT writes a ReLU before its softmax, which specification §C corrects).
"""

from itertools import pairwise

from torch import nn


def perceptron(
    features: int = 784, classes: int = 10, *, hidden: tuple[int, ...] = (400, 300, 200, 100)
) -> nn.Module:
    """Return a fully connected network; by default FCNN (C.1), 784-400-300-200-100-10."""
    widths = (features, *hidden)
    layers: list[nn.Module] = [nn.Flatten()]
    for fan_in, fan_out in pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], classes))


def logistic(features: int = 784, classes: int = 10) -> nn.Module:
    """Return multinomial logistic regression (C.5); `features=60` for the synthetic task."""
    return nn.Sequential(nn.Flatten(), nn.Linear(features, classes))


def cnn_mnist(channels: int = 1, classes: int = 10) -> nn.Module:
    """Return FedPMT's CNN-MNIST (C.2): 28 x 28 input, no padding."""
    return nn.Sequential(
        *_conv_pool(channels, 8, kernel=5),
        *_conv_pool(8, 16, kernel=5),
        nn.Flatten(),
        *_hidden(16 * 4 * 4, 128),
        nn.Linear(128, classes),
    )


def cnn_cifar(channels: int = 3, classes: int = 10) -> nn.Module:
    """Return FedPMT's CNN-CIFAR10 (C.3): 32 x 32 input, no padding."""
    return nn.Sequential(
        *_conv_pool(channels, 16, kernel=5),
        *_conv_pool(16, 32, kernel=5),
        nn.Flatten(),
        *_hidden(32 * 5 * 5, 500),
        *_hidden(500, 300),
        nn.Linear(300, classes),
    )


def mcmahan_cnn(
    channels: int = 1,
    classes: int = 10,
    *,
    side: int = 28,
    widths: tuple[int, int, int] = (32, 64, 512),
) -> nn.Module:
    """Return McMahan's CNN (C.4) with 'same' padding, as its 1,663,370 parameters require.

    `side` is the height and width of the image, a multiple of 4. `widths` are the channels of the
    two convolutions and of the hidden linear layer.
    """
    first, second, hidden = widths
    return nn.Sequential(
        *_conv_pool(channels, first, kernel=5, padding=2),
        *_conv_pool(first, second, kernel=5, padding=2),
        nn.Flatten(),
        *_hidden(second * (side // 4) ** 2, hidden),
        nn.Linear(hidden, classes),
    )


def cnn_m(channels: int = 1, classes: int = 10, *, dropout: float = 0.5) -> nn.Module:
    """Return FedPNS's CNN-M (C.6): 28 x 28 input, dropout after the second convolution."""
    return nn.Sequential(
        *_conv_pool(channels, 10, kernel=5),
        nn.Conv2d(10, 20, 5),
        nn.Dropout(dropout),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        *_hidden(20 * 4 * 4, 50),
        nn.Linear(50, classes),
    )


def cnn_c(channels: int = 3, classes: int = 10) -> nn.Module:
    """Return FedPNS's CNN-C (C.7): 32 x 32 input, no padding."""
    return nn.Sequential(
        *_conv_pool(channels, 6, kernel=5),
        *_conv_pool(6, 16, kernel=5),
        nn.Flatten(),
        *_hidden(16 * 5 * 5, 120),
        *_hidden(120, 84),
        nn.Linear(84, classes),
    )


def vgg9(channels: int = 3, classes: int = 10) -> nn.Module:
    """Return AnycostFL's VGG-9 (C.8): 32 x 32 input, six padded 3 x 3 convolutions, no norm."""
    layers: list[nn.Module] = []
    fan_in = channels
    for first, second in ((32, 64), (128, 128), (256, 256)):
        layers += [nn.Conv2d(fan_in, first, 3, padding=1), nn.ReLU()]
        layers += _conv_pool(first, second, kernel=3, padding=1)
        fan_in = second
    layers += [nn.Flatten(), *_hidden(256 * 4 * 4, 512), *_hidden(512, 512)]
    return nn.Sequential(*layers, nn.Linear(512, classes))


def digits_net(channels: int = 3, classes: int = 10) -> nn.Module:
    """Return FedResCuE's DigitsNet (C.10): 28 x 28 input, batch norm without running statistics."""
    return nn.Sequential(
        *_normed_conv(channels, 64),
        nn.MaxPool2d(2),
        *_normed_conv(64, 64),
        nn.MaxPool2d(2),
        *_normed_conv(64, 128),
        nn.Flatten(),
        *_hidden(128 * 7 * 7, 2048),
        *_hidden(2048, 512),
        nn.Linear(512, classes),
    )


def har_cnn(channels: int = 6, classes: int = 6, *, length: int = 128) -> nn.Module:
    """Return the network for activity recognition (C.12): input [batch, channels, length].

    UCI's 128 x 9 windows need `channels=9`. `length` is a multiple of 4.
    """
    return nn.Sequential(
        nn.Conv1d(channels, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool1d(2),
        nn.Conv1d(64, 128, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool1d(2),
        nn.Flatten(),
        *_hidden(128 * (length // 4), 256),
        nn.Linear(256, classes),
    )


def _conv_pool(fan_in: int, fan_out: int, *, kernel: int, padding: int = 0) -> list[nn.Module]:
    return [nn.Conv2d(fan_in, fan_out, kernel, padding=padding), nn.ReLU(), nn.MaxPool2d(2)]


def _normed_conv(fan_in: int, fan_out: int) -> list[nn.Module]:
    convolution = nn.Conv2d(fan_in, fan_out, 5, padding=2)
    return [convolution, nn.BatchNorm2d(fan_out, track_running_stats=False), nn.ReLU()]


def _hidden(fan_in: int, fan_out: int) -> list[nn.Module]:
    return [nn.Linear(fan_in, fan_out), nn.ReLU()]
