"""The axis rule of every known ATen operator; what is not here is `unknown`."""

from collections.abc import Callable, Mapping

from torch import fx

from anyfleet.elastic.tracing import rules_layers as layers
from anyfleet.elastic.tracing import rules_shapes as shapes
from anyfleet.elastic.tracing.scope import Result, Scope

Rule = Callable[[Scope, fx.Node], Result]

_ELEMENTWISE = """
abs add alias bitwise_and bitwise_not bitwise_or celu clamp clamp_max clamp_min clone contiguous
copy cos detach div dropout elu eq erf exp expm1 feature_dropout fill floor ge gelu gt hardsigmoid
hardswish hardtanh le leaky_relu lift_fresh_copy log log1p log_sigmoid logical_and logical_not
bernoulli empty_like exponential rand_like randn_like uniform
logical_or logit lt masked_fill maximum minimum mish mul ne neg ones_like pow reciprocal relu
relu6 rsqrt rsub selu sigmoid sign silu sin softplus softsign sqrt square sub tanh tanhshrink
threshold where zero zeros_like full_like _to_copy alpha_dropout feature_alpha_dropout
"""
_POOLS = """
adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d
adaptive_max_pool2d adaptive_max_pool3d avg_pool1d avg_pool2d avg_pool3d max_pool1d max_pool2d
max_pool3d max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices
upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d
upsample_bicubic2d upsample_trilinear3d
"""
_REDUCTIONS = "all amax amin any argmax argmin linalg_vector_norm logsumexp max min norm prod sum"

_OTHERS: Mapping[str, Rule] = {
    "linear": layers.linear,
    "conv1d": layers.convolution,
    "conv2d": layers.convolution,
    "conv3d": layers.convolution,
    "conv_transpose1d": layers.transposed_convolution,
    "conv_transpose2d": layers.transposed_convolution,
    "batch_norm": layers.channel_norm,
    "instance_norm": layers.channel_norm,
    "to": shapes.same,
    "type_as": shapes.same,
    "prelu": layers.channel_norm,
    "group_norm": layers.group_norm,
    "layer_norm": layers.layer_norm,
    "rms_norm": layers.layer_norm,
    "embedding": layers.embedding,
    "matmul": layers.matmul,
    "mm": layers.matmul,
    "bmm": layers.matmul,
    "scaled_dot_product_attention": layers.attention,
    "view": shapes.reshape,
    "reshape": shapes.reshape,
    "_unsafe_view": shapes.reshape,
    "flatten": shapes.reshape,
    "reshape_as": shapes.reshape_like,
    "view_as": shapes.reshape_like,
    "unflatten": shapes.unflatten,
    "expand": shapes.expand,
    "expand_as": shapes.elementwise,
    "permute": shapes.permute,
    "transpose": shapes.transpose,
    "swapaxes": shapes.transpose,
    "t": shapes.reverse,
    "numpy_T": shapes.reverse,
    "mean": shapes.average,
    "var": shapes.average,
    "std": shapes.average,
    "softmax": shapes.along,
    "log_softmax": shapes.along,
    "cumsum": shapes.along,
    "flip": shapes.along,
    "tril": shapes.triangle,
    "triu": shapes.triangle,
    "select": shapes.select,
    "slice": shapes.narrow,
    "narrow": shapes.narrow,
    "unsqueeze": shapes.insert,
    "squeeze": shapes.squeeze,
    "zeros": shapes.create,
    "ones": shapes.create,
    "full": shapes.create,
    "empty": shapes.create,
    "rand": shapes.create,
    "randn": shapes.create,
    "new_zeros": shapes.create,
    "new_ones": shapes.create,
    "new_full": shapes.create,
    "arange": shapes.positions,
    "eye": shapes.positions,
    "linspace": shapes.positions,
    "pad": shapes.pad,
    "constant_pad_nd": shapes.pad,
    "stack": shapes.stack,
    "cat": shapes.join,
    "concat": shapes.join,
    "split": shapes.divide,
    "split_with_sizes": shapes.divide,
    "chunk": shapes.divide,
    "unbind": shapes.divide,
}

RULES: Mapping[str, Rule] = {
    **dict.fromkeys(_ELEMENTWISE.split(), shapes.elementwise),
    **dict.fromkeys(_POOLS.split(), shapes.pool),
    **dict.fromkeys(_REDUCTIONS.split(), shapes.reduction),
    **_OTHERS,
}


def rule(name: str) -> Rule:
    """The rule of an operator without namespace and overload ("conv2d")."""
    return RULES.get(name, shapes.unknown)
