"""What the paper prints besides the per-task tables: Table 1 and "percentage of variance"."""

from typing import NamedTuple


class Cell(NamedTuple):
    """One cell of Table 1: A_T and F_T, each with its standard deviation over five seeds."""

    accuracy: float
    accuracy_std: float
    forgetting: float
    forgetting_std: float


# Table "Average Accuracy and Forgetting for all baselines" (section 5.3, tab:general_results).
TABLE1: dict[str, dict[str, Cell]] = {
    "permuted": {
        "sgd": Cell(76.81, 1.36, 14.88, 1.64),
        "ewc": Cell(79.71, 0.52, 3.81, 0.47),
        "a-gem": Cell(83.4, 0.43, 7.29, 0.45),
        "ogd": Cell(80.95, 0.5, 9.72, 0.51),
        "pca-ogd": Cell(81.44, 0.62, 9.11, 0.65),
    },
    "rotated": {
        "sgd": Cell(66.07, 0.47, 29.57, 0.56),
        "ewc": Cell(76.2, 0.62, 13.44, 0.82),
        "a-gem": Cell(83.52, 0.22, 9.86, 0.28),
        "ogd": Cell(77.42, 0.35, 16.52, 0.46),
        "pca-ogd": Cell(82.05, 0.58, 11.67, 0.65),
    },
    "split": {
        "sgd": Cell(95.1, 1.08, 2.02, 1.48),
        "ewc": Cell(95.06, 1.15, 2.08, 1.56),
        "a-gem": Cell(94.25, 1.62, 2.82, 1.72),
        "ogd": Cell(96.05, 0.34, 0.37, 0.21),
        "pca-ogd": Cell(95.96, 0.29, 0.28, 0.15),
    },
    "cifar": {
        "sgd": Cell(56.11, 1.65, 22.69, 2.18),
        "ewc": Cell(65.45, 0.97, 6.56, 1.49),
        "a-gem": Cell(47.55, 2.4, 31.36, 2.58),
        "ogd": Cell(69.77, 0.72, 8.27, 0.31),
        "pca-ogd": Cell(72.7, 0.97, 5.39, 0.85),
    },
}

# Table "Percentage of variance explained with different memory size" (appendix "Structure in the
# data", table:dataset_explained_variance): components kept → percent of the variance.
VARIANCE_COUNTS = (10, 25, 50, 100, 200, 500)
VARIANCE: dict[str, tuple[float, ...]] = {
    "permuted": (35.13, 45.14, 53.33, 62.37, 71.65, 83.20),
    "rotated": (68.52, 75.54, 81.09, 86.23, 90.71, 94.42),
    "cifar": (58.87, 65.99, 72.27, 79.19, 85.99, 93.24),
}
# The same appendix, in the text: 14 components, from a total memory of 200 over 14 tasks.
VARIANCE_OF_14 = {"permuted": 38.84, "rotated": 71.06}
