"""Errors of interpolation, random forests and polynomials on operators' times left out of the fit.

    python benchmarks/estimators.py [--data ../shared/data] [--out benchmarks/results]

Vidur (MLSys '24) measures each operator at many numbers of tokens, fits a random forest to them,
and reads a table of its predictions. xgpt interpolates between the points of its profile. The
tables here are Vidur's own: ten operators of a layer of Llama-2-70B on an A100, at tensor-parallel
degree 4. Every fourth number of tokens is kept, and the times at all others are predicted. The
error is the mean of |predicted - measured| / measured over the others and the operators. The last
column is the error on the numbers of tokens that were kept, as Vidur's code reports it. On those
xgpt's rule is not exact where an operator takes less time for more tokens: it gives both the mean,
as the search needs times that grow with work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import scipy.linalg
import sklearn
from published import vidur
from runner import about, options, table, today, write
from sklearn.ensemble import RandomForestRegressor

from xgpt.core.lengths import FloatArray
from xprofiler.interpolation import Grid

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
TABLE = Path("vidur", "compute", "a100", "meta-llama", "Llama-2-70b-hf", "mlp.csv")
DEGREE = 4  # of tensor parallelism
KEPT = 4  # every so many numbers of tokens
TREES = 250  # chosen: the fewest that Vidur's code tries
OPERATORS = ("emb", "input_layernorm", "attn_pre_proj", "attn_rope", "attn_post_proj",
             "post_attention_layernorm", "mlp_up_proj", "mlp_act", "mlp_down_proj", "add")
Predicted = Callable[[FloatArray], FloatArray]


class Errors(NamedTuple):
    """Relative errors of an estimator, [operators, numbers of tokens]."""

    held_out: FloatArray
    kept: FloatArray


def interpolation(tokens: FloatArray, seconds: FloatArray) -> Predicted:
    """The rule of a profile's tables."""
    return Grid(tokens, np.zeros(len(tokens)), seconds)


def forest(tokens: FloatArray, seconds: FloatArray) -> Predicted:
    """A random forest of scikit-learn with its default depth and split."""
    found = RandomForestRegressor(n_estimators=TREES, random_state=0)
    found.fit(tokens[:, None], seconds)
    return lambda at: np.asarray(found.predict(at[:, None]))


def polynomial(degree: int) -> Callable[[FloatArray, FloatArray], Predicted]:
    """Least squares in numbers of tokens that are scaled to -1 to 1."""
    return lambda tokens, seconds: np.polynomial.Polynomial.fit(tokens, seconds, degree)


def unscaled(degree: int) -> Callable[[FloatArray, FloatArray], Predicted]:
    """Least squares in the powers of the bare numbers of tokens, which differ by many digits."""
    def fit(tokens: FloatArray, seconds: FloatArray) -> Predicted:
        weights = scipy.linalg.lstsq(np.vander(tokens, degree + 1), seconds)[0]
        return lambda at: np.asarray(np.vander(at, degree + 1) @ weights)
    return fit


ESTIMATORS: Mapping[str, Callable[[FloatArray, FloatArray], Predicted]] = {
    "interpolation, as xgpt's profiles": interpolation, f"random forest, {TREES} trees": forest,
    "polynomial of degree 5": polynomial(5), "polynomial of degree 3": polynomial(3),
    "polynomial of degree 1": polynomial(1),
    "polynomial of degree 5, numbers of tokens not scaled": unscaled(5)}


def operator_times(path: Path) -> tuple[FloatArray, FloatArray]:
    """Numbers of tokens, ascending, and seconds [operators, numbers of tokens]; the mean where the
    table has a number twice."""
    read = vidur.read_mlp(path, OPERATORS)
    at_degree = read.tp_degree == DEGREE
    tokens, place = np.unique(read.tokens[at_degree], return_inverse=True)
    sums = [np.bincount(place, read.seconds[operator][at_degree]) for operator in OPERATORS]
    return tokens.astype(float), np.array(sums) / np.bincount(place)


def errors_of(fit: Callable[[FloatArray, FloatArray], Predicted], tokens: FloatArray,
              seconds: FloatArray) -> Errors:
    is_kept = np.arange(len(tokens)) % KEPT == 0
    off = np.array([np.abs(fit(tokens[is_kept], row[is_kept])(tokens) / row - 1)
                    for row in seconds])
    return Errors(off[:, ~is_kept], off[:, is_kept])


def page(tokens: FloatArray, seconds: FloatArray) -> str:
    header = ("estimator", "error", "of its worst operator", "95th percentile",
              "on the kept ones")
    lines = [f"# Estimators of operators' times, {today()}", "", about(__doc__), "",
             f"{len(tokens)} numbers of tokens from {tokens[0]:.0f} to {tokens[-1]:.0f}, of which "
             f"{len(tokens[::KEPT])} are kept; scikit-learn {sklearn.__version__}.", "",
             *table(header)]
    for name, fit in ESTIMATORS.items():
        off = errors_of(fit, tokens, seconds)
        of_operators = off.held_out.mean(axis=1)
        worst = OPERATORS[int(of_operators.argmax())]
        lines.append(f"| {name} | **{off.held_out.mean():.1%}** | {of_operators.max():.1%} "
                     f"({worst}) | {np.quantile(off.held_out, 0.95):.1%} | "
                     f"{off.kept.mean():.1%} |")
    return "\n".join(lines)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--data", type=Path, default=DATA)
    arguments = parser.parse_args()
    write("estimators", page(*operator_times(arguments.data / TABLE)), arguments.out)


if __name__ == "__main__":
    main()
