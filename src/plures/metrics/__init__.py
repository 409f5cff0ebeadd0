"""Pure functions of predictions and targets: quality, calibration and diversity.

All functions take torch tensors or numpy arrays. Metrics are summed in float64 and returned as floats; `entropy`,
`uncertainty` and `tempered` keep device and dtype, except that half precision becomes float32. Instead of probabilities
[samples, classes], those of segmentation or tokens, [samples, classes, ...] with targets [samples, ...], work as well.
"""

from plures.metrics.classification import (
    CalibrationTable,
    OutOfDistribution,
    RiskCoverage,
    Uncertainty,
    accuracy,
    agreement,
    aurc,
    brier,
    calibration_table,
    disagreement,
    ece,
    entropy,
    member_accuracies,
    nll,
    ood,
    risk_coverage,
    temperature,
    tempered,
    uncertainty,
)
from plures.metrics.regression import (
    gaussian_crps,
    gaussian_nll,
    interval_coverage,
    interval_width,
    mixture_crps,
    mixture_nll,
    rmse,
)

__all__ = [
    "CalibrationTable",
    "OutOfDistribution",
    "RiskCoverage",
    "Uncertainty",
    "accuracy",
    "agreement",
    "aurc",
    "brier",
    "calibration_table",
    "disagreement",
    "ece",
    "entropy",
    "gaussian_crps",
    "gaussian_nll",
    "interval_coverage",
    "interval_width",
    "member_accuracies",
    "mixture_crps",
    "mixture_nll",
    "nll",
    "ood",
    "risk_coverage",
    "rmse",
    "temperature",
    "tempered",
    "uncertainty",
]
