"""Pure functions of what an ensemble said and what was true: how good, how sure and how diverse it is.

Everything takes torch tensors or numpy arrays. Metrics are summed in float64 and come back as floats; the functions
that prediction needs (`entropy`, `uncertainty`, `tempered`) keep device and dtype, half precision becomes float32.
Where probabilities are [samples, classes], dense ones [samples, classes, ...] with targets [samples, ...] do as well.
"""

from plures.metrics.classification import (
    RiskCoverage,
    accuracy,
    agreement,
    aurc,
    brier,
    disagreement,
    member_accuracies,
    nll,
    risk_coverage,
)
from plures.metrics.confidence import (
    CalibrationTable,
    OutOfDistribution,
    Uncertainty,
    calibration_table,
    ece,
    entropy,
    ood,
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
