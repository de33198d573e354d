"""A film of a matrix state: the reader steps through what tokens do to it.

The state starts at zero. Token t turns it into

    S <- Diag(e^g) S + k v^T                          (additive), or
    S <- (I - beta k k^T) Diag(e^g) S + beta k v^T    (delta rule),

and the film shows S with the token's k and v, and a bar for each earlier
token j: the share of v_j in the answer to its key, S^T k_j / |k_j|^2, which is
1 where the state still answers v_j alone. The reader may put one constant
decay in the place of every gate. The arithmetic runs in the browser
(data/film.js, with the looks of data/film.css; data/film_code.js writes the
library's call that makes the state on screen); without a script, and on
paper, a few moments of the film stand side by side instead.

states.py computes states and shares, page.py writes the page, still.py draws
the moments.

Shapes in this package: k [T, K]; v [T, V]; g, the natural log of a decay, [T]
or [T, K] (one per key channel); beta [T].
"""

from fastweights_lab.notebook.film.page import show, to_html
from fastweights_lab.notebook.film.states import lines, shares, states

__all__ = ["lines", "shares", "show", "states", "to_html"]
