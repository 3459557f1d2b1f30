"""Claims of section 4: lemma, theorem, corollaries, bounds and remarks."""

import itertools
from collections.abc import Sequence

from forgetless.paper.artefacts.toy import CENTRED, MEMORY, rise
from forgetless.paper.claims.base import (
    HOLDS,
    RELEASED_ONLY,
    UNDECIDED,
    Claims,
    Finding,
    Former,
    Verdict,
    either,
)
from forgetless.paper.numbers import listed
from forgetless.paper.results import Data
from forgetless.support.statistics import ahead, mean

CLAIMS = Claims()
_EXACT = 1e-6  # relative error that counts as rounding and the descent's tolerance
_ERROR = f"relative error against gradient descent below {_EXACT:g}"


def _formula(theory: Data, method: str) -> Finding:
    error = theory["exact"][method]["forgetting"]
    return either(error < _EXACT), f"error {error:.0e}", "outputs of trained linear models"


def _bound(theory: Data, method: str) -> Finding:
    result = theory["bounds"][method]
    broken = result["several"] > 1 + _EXACT
    why = "‖Σ v_k‖² ≤ Σ ‖v_k‖² is false for two terms or more; (Σ ‖v_k‖)² is valid"
    one, several = result["one"], result["several"]
    measured = f"Δ / bound up to {one:.2f} for one later task, {several:.2f} for several"
    return either(not broken), measured, why if broken else "never above 1"


_BOUND = "Δ / bound never above 1 over random and built cases"


@CLAIMS.add(
    "Lemma 1, Theorem 1", "Under a constant kernel, Δ of SGD is ‖Σ U Σ O M ỹ‖²", _ERROR, "theory"
)
def _sgd(theory: Data) -> Finding:
    return _formula(theory, "SGD")


@CLAIMS.add(
    "section 4.2",
    "O's singular values are the cosines of the principal angles",
    "difference from SciPy's angles below 1e-9",
    "theory",
)
def _angles(theory: Data) -> Finding:
    error = theory["angles"]
    return either(error < 1e-9), f"difference {error:.0e}", "an independent implementation agrees"


@CLAIMS.add(
    "abstract, section 4.2",
    "Δ grows as two tasks align",
    "it increases with the cosine, residual fixed",
    "theory",
)
def _alignment(theory: Data) -> Finding:
    values = theory["alignment"]["forgetting"]
    grows = all(a < b for a, b in itertools.pairwise(values))
    shown = ", ".join(f"{v:.2f}" for v in values)
    why = "linear models, residual fixed. Tasks that align may also ask for the same outputs: then "
    why += "the residual is small, and Δ may be a gain"
    return either(grows), f"Δ {shown} at cosines 0 to 1", why


@CLAIMS.add(
    "section 4.2",
    "A null residual: what is predicted perfectly is not learned, and nothing is forgotten",
    "Δ by gradient descent, over the outputs' squared norm, below 1e-9",
    "theory",
)
def _null_residual(theory: Data) -> Finding:
    change = theory["null residual"]
    return either(change < 1e-9), f"Δ {change:.0e}", "a linear model whose task 2 it predicts"


@CLAIMS.add("Corollary 1", "Δ of SGD ≤ σ₁² Σ_k ‖Θ‖² ‖M ỹ‖²", _BOUND, "theory")
def _sgd_bound(theory: Data) -> Finding:
    return _bound(theory, "SGD")


@CLAIMS.add(
    "Remark 1",
    "Drift can be undone by a later task: Δ = 0 although outputs moved in between",
    "Δ back to 0 after Δ > 0",
    "theory",
)
def _cancelling(theory: Data) -> Finding:
    result = theory["cancelling"]
    held = result["after"] > 1e-3 and result["undone"] < 1e-9 * result["after"]
    return either(held), f"Δ {result['after']:.1f}, then {result['undone']:.0e}", "a built example"


@CLAIMS.add(
    "Corollary 2",
    "The same formula for GEM-NT, with the projection with which a task starts",
    _ERROR,
    "theory",
)
def _gem_nt(theory: Data) -> Finding:
    return _formula(theory, "GEM-NT")


@CLAIMS.add(
    "Corollary 2, section 4.3",
    "… and GEM-NT computes its gradients anew in every step",
    f"relative error against a descent that does so below {_EXACT:g}",
    "theory",
)
def _gem_nt_anew(theory: Data) -> Finding:
    error = theory["anew in every step"]
    why = (
        "" if error < _EXACT else "the formula needs a projection that stays as it is during a task"
    )
    return either(error < _EXACT), f"error {error:.1g}", why


@CLAIMS.add(
    "section 4.3",
    "T = I − G Gᵀ, G the gradients as columns, is the orthogonal projection",
    "T² = T",
    "theory",
    slip=True,
)
def _raw(theory: Data) -> Finding:
    result = theory["raw projection"]
    why = f"only once the columns are orthonormal (then {result['orthonormal']:.0e})"
    return either(result["raw"] < 1e-9), f"‖T² − T‖ / ‖T‖ = {result['raw']:.2f}", why


@CLAIMS.add("section 4.3, equation after Corollary 2", "The bound for GEM-NT", _BOUND, "theory")
def _gem_nt_bound(theory: Data) -> Finding:
    return _bound(theory, "GEM-NT")


@CLAIMS.add(
    "section 4.3",
    "With one sample, GEM-NT's direction is OGD's times the residual",
    "angle of the two gradients of a network",
    "theory",
)
def _one_sample(theory: Data) -> Finding:
    off = theory["one sample"]
    return either(off < 1e-9), f"1 − |cos| = {off:.0e}", "the chain rule"


@CLAIMS.add(
    "section 4.3",
    "GEM-NT does not protect well-learned tasks",
    "Δ of a task learned to zero loss equals SGD's",
    "theory",
)
def _well_learned(theory: Data) -> Finding:
    result = theory["well learned"]
    measured = f"Δ / SGD's: GEM-NT {result['GEM-NT']:.2f}, OGD {result['OGD']:.2f}"
    return (
        either(abs(result["GEM-NT"] - 1) < _EXACT),
        measured,
        "a zero gradient constrains nothing",
    )


@CLAIMS.add(
    "section 4.3",
    "Well-learned tasks contribute less to GEM-NT's projection",
    "the projection changes as one task's gradient becomes a thousand times shorter",
    "theory",
)
def _contribute(theory: Data) -> Finding:
    change = theory["shorter gradient"]
    why = "an orthogonal projection ignores lengths until one is zero. Lengths matter only in "
    why += "I − G Gᵀ with unnormalised columns, which is not a projection"
    return either(change > _EXACT), f"‖T' − T‖ = {change:.0e}", "" if change > _EXACT else why


@CLAIMS.add(
    "section 4.3",
    "What is left of an earlier task is f − y = ỹ + δ, and weighs GEM-NT's projection",
    f"relative difference below {_EXACT:g}",
    "theory",
)
def _old_residuals(theory: Data) -> Finding:
    result = theory["old residuals"]
    why = f"it is δ − λ (κ + λ I)⁻¹ ỹ (difference {result['right']:.0e}): what was learned is gone "
    why += "from the residual, all of it if λ = 0"
    return either(result["printed"] < _EXACT), f"difference {result['printed']:.2g}", why


@CLAIMS.add("Corollary 3", "The same formula for PCA-OGD, with its projection", _ERROR, "theory")
def _pca(theory: Data) -> Finding:
    return _formula(theory, "PCA-OGD")


@CLAIMS.add(
    "section 4.4",
    "T = I − P Pᵀ, P the top directions of all tasks as columns, is the orthogonal projection",
    "T² = T",
    "theory",
    slip=True,
)
def _raw_directions(theory: Data) -> Finding:
    result = theory["raw projection"]
    raw, once = result["PCA-OGD, raw"], result["PCA-OGD, orthonormal"]
    why = f"orthonormal within a task, not across tasks; once they are, {once:.0e}"
    return either(raw < 1e-9), f"‖T² − T‖ / ‖T‖ = {raw:.2f}", why


@CLAIMS.add(
    "section 4.4, algorithm 1",
    "PCA-OGD's step is g − Σ proj_v(g) over the stored v: Gram-Schmidt of a task's samples, then "
    "PCA's directions",
    "the least eigenvalue of g's map is 0, as that of a projection",
    "theory",
    slip=True,
)
def _algorithm(theory: Data) -> Finding:
    result = theory["algorithm 1"]
    least, stored, meant = (result[k] for k in ("least", "stored", "meant"))
    why = "directions that the samples span are removed twice, so that steps along them are "
    why += f"reversed; and {stored:.0f} rows are stored, not {meant:.0f}. Without the loop over "
    why += "samples it is what was released"
    return either(abs(least) < 1e-9), f"least eigenvalue {least:.2f}", why


@CLAIMS.add(
    "section 4.4, equation after Corollary 3",
    "The bound for PCA-OGD, with σ_{d+1}",
    _BOUND,
    "theory",
)
def _pca_bound(theory: Data) -> Finding:
    word, measured, why = _bound(theory, "PCA-OGD")
    centred = theory["bounds"]["PCA-OGD, centred"]["one"]
    measured += f"; with centred PCA, as released, up to {centred:.1f} for one"
    return word, measured, why + "; σ_{d+1} needs uncentred PCA of the same samples"


@CLAIMS.add(
    "Corollary 4", "Projected gradient descent converges to the closed form", _ERROR, "theory"
)
def _convergence(theory: Data) -> Finding:
    error = theory["plain descent"]
    measured = f"error of the weights {error:.0e} at 0.99 of the largest rate"
    return either(error < _EXACT), measured, "plain descent, as stated; with ½ on both terms"


@CLAIMS.add(
    "proof of Corollary 4",
    "… which minimises ‖φ w − ỹ‖² + ½ λ ‖w‖²",
    "distance from that minimum",
    "theory",
    slip=True,
)
def _objective(theory: Data) -> Finding:
    result = theory["printed objective"]
    measured = f"off by {result['as printed']:.2f}; with ½ on the square {result['halved']:.0e}"
    held = result["as printed"] < _EXACT
    return either(held), measured, "" if held else "a missing ½ in the proof, not in the result"


@CLAIMS.add(
    "Remark 2",
    "PCA helps where the spectrum falls fast",
    "Δ of PCA-OGD over OGD's: steep below flat, and below 1",
    "theory",
)
def _steep(theory: Data) -> Finding:
    result = theory["spectrum"]
    held = result["steep"] < min(result["flat"], 1)
    return (
        either(held),
        f"ratio {result['steep']:.2f} steep, {result['flat']:.2f} flat",
        "linear models",
    )


@CLAIMS.add(
    "Remark 2; appendix, worst case",
    "Where it is flat, there is a case in which OGD does better than PCA-OGD",
    "rise of the toy's test loss clearly lower for OGD in some setting",
    "theory",
    "toy",
    former=Former(
        "Δ in linear models, and the rise of the training loss in every setting, lower for OGD",
        lambda theory, toy: _everywhere_better(theory, toy),
    ),
)
def _flat(theory: Data, toy: Data) -> Finding:
    better = [
        [s for s in toy if rise(toy, s, "ogd", w) < rise(toy, s, "pca-ogd", w)] for w in (0, 1)
    ]
    clear = [s for s in toy if _ahead(toy, s)]
    measured = f"lower on test samples in {len(better[0])} of {len(toy)} settings"
    measured += f", clearly in {len(clear)}"
    measured += f"; on training samples in {len(better[1])}"
    ratio = theory["spectrum"]["flat"]
    why = (
        f"in linear models with a flat spectrum and two tasks Δ of PCA-OGD is {ratio:.2f} of OGD's"
    )
    if clear:
        sizes = " and ".join("n = {}, p = {}".format(*s.split()) for s in clear)
        explained = listed((mean(toy[s]["explained"]) for s in clear), ".0f")
        why = f"clearly at {sizes}, where {MEMORY} components explain {explained} %; {why}"
    return either(bool(clear)), measured, why


def _ahead(toy: Data, setting: str) -> bool:
    """Whether OGD's test loss rises less, 0 outside the 95 % interval of the difference."""
    result = toy[setting]["rise"]
    pca, ogd = ([seed[0] for seed in result[m]] for m in ("pca-ogd", "ogd"))
    lead, noise = ahead(pca, ogd)
    return lead > noise


def _everywhere_better(theory: Data, toy: Data) -> Verdict:
    worse = [rise(toy, s, "pca-ogd", 1) > rise(toy, s, "ogd", 1) for s in toy]
    return either(theory["spectrum"]["flat"] > 1 and all(worse))


@CLAIMS.add(
    "appendix, worst case",
    "OGD forgets almost nothing there, PCA-OGD drastically",
    "rise of the test loss: OGD clearly below 0.1, PCA-OGD clearly above 0.5, in some setting",
    "toy",
    "toy-mean",
    former=Former("mean 0 alone; fails otherwise", lambda toy, _: either(bool(_drastic(toy)))),
)
def _toy(toy: Data, shifted: Data) -> Finding:
    found = _drastic(toy)
    pairs = [f"{rise(toy, s, 'ogd', 0):.2f} / {rise(toy, s, 'pca-ogd', 0):.2f}" for s in toy]
    own = max(abs(rise(toy, s, "ogd", 2)) for s in toy)
    others = listed((rise(toy, s, "pca-ogd", 2) for s in toy), ".2f")
    measured = f"OGD / PCA-OGD {', '.join(pairs)}"
    if found:
        return HOLDS, measured, f"n and p: {', '.join(found)}"
    why = "with mean 0 in none of these; on the samples that OGD remembers its loss rises by "
    why += f"{own:.0e}, PCA-OGD's by {others}. The paper's sizes, means and variances are not given"
    met = [shift for shift, found in shifted["means"].items() if _is_drastic(found)]
    if not met:
        return UNDECIDED, measured, why
    found = shifted["means"][met[-1]]
    ogd, pca, uncentred = (found[m] for m in ("OGD", CENTRED, "PCA-OGD, uncentred"))
    measured += f"; with μ = {met[-1]} σ {_interval(ogd)} / {_interval(pca)} if PCA is centred, as "
    measured += "released"
    why += f"; it is the centring: uncentred, PCA-OGD's rises by {_interval(uncentred)}"
    return RELEASED_ONLY, measured, why


def _drastic(toy: Data) -> list[str]:
    """The settings in which OGD forgets almost nothing and PCA-OGD much."""
    return [s for s in toy if rise(toy, s, "ogd", 0) < 0.1 and rise(toy, s, "pca-ogd", 0) > 0.5]


def _is_drastic(found: Data) -> bool:
    """The same of the toy with a mean and centred PCA, clearly (±)."""
    ogd, pca = ahead(found["OGD"]), ahead(found[CENTRED])
    return sum(ogd) < 0.1 and pca[0] - pca[1] > 0.5


def _interval(values: Sequence[float]) -> str:
    """A mean and half its 95 % interval."""
    value, noise = ahead(values)
    return f"{value:.2f} ± {noise:.2f}"
