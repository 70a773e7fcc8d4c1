"""The formulas of the methods that parts call: pure functions of numpy arrays.

Each names its section of the specification, and its paper where it belongs to one. Nothing here
draws random numbers: what is random takes uniforms. What the papers write and no part calls is in
`anyfleet.formulas.reference`.
"""

from anyfleet.formulas.anycost import (
    AnycostBudgets,
    AnycostSending,
    anycost_alpha,
    anycost_best_sending,
    anycost_channel_norms,
    anycost_channel_order,
    anycost_contraction,
    anycost_divergence,
    anycost_gain,
    anycost_weights,
)
from anyfleet.formulas.contribution import (
    FedadpDissimilarity,
    OptimalSubset,
    alignment_without_each,
    bn2_largest,
    fedadp_angles,
    fedadp_contribution,
    fedadp_dissimilarity,
    fedadp_expected_decrease,
    fedadp_smoothed_angles,
    fedadp_weights,
    fedpns_label_distance,
    fedpns_lowered,
    fewest_kept_updates,
    optimal_subset,
    selection_entropy,
    update_alignment,
    weighted_draw,
)
from anyfleet.formulas.fedhq import fedhq_upload_seconds, fedhq_weights
from anyfleet.formulas.fedpmt import (
    Convolution,
    Dense,
    feddrop_layers,
    fedpmt_complexity,
    fedpmt_forward_complexity,
    fedpmt_learning_rate,
    fedpmt_psi,
)
from anyfleet.formulas.links import leading_columns, outage_probability
from anyfleet.formulas.sub_models import (
    fedrolex_window,
    kept_channels,
    progressive_widths,
    sampled_widths,
)
from anyfleet.formulas.whale import (
    WhaleRegionFisher,
    whale_blocks,
    whale_effectiveness,
    whale_extreme_share,
    whale_importance,
    whale_level,
    whale_region_fisher,
    whale_relative_effectiveness,
    whale_scores,
    whale_target_seconds,
    whale_threshold_utility,
    whale_utility,
)

# Many names, to be looked up and not read: several on a line.
# fmt: off
__all__ = [
    "AnycostBudgets", "AnycostSending", "Convolution", "Dense", "FedadpDissimilarity",
    "OptimalSubset", "WhaleRegionFisher", "alignment_without_each", "anycost_alpha",
    "anycost_best_sending", "anycost_channel_norms", "anycost_channel_order", "anycost_contraction",
    "anycost_divergence", "anycost_gain", "anycost_weights", "bn2_largest", "fedadp_angles",
    "fedadp_contribution", "fedadp_dissimilarity", "fedadp_expected_decrease",
    "fedadp_smoothed_angles", "fedadp_weights", "feddrop_layers", "fedhq_upload_seconds",
    "fedhq_weights", "fedpmt_complexity", "fedpmt_forward_complexity", "fedpmt_learning_rate",
    "fedpmt_psi",
    "fedpns_label_distance", "fedpns_lowered", "fedrolex_window", "fewest_kept_updates",
    "kept_channels", "leading_columns", "optimal_subset", "outage_probability",
    "progressive_widths", "sampled_widths", "selection_entropy", "update_alignment",
    "weighted_draw", "whale_blocks", "whale_effectiveness", "whale_extreme_share",
    "whale_importance", "whale_level", "whale_region_fisher", "whale_relative_effectiveness",
    "whale_scores", "whale_target_seconds", "whale_threshold_utility", "whale_utility",
]
# fmt: on
