"""Answers to appendix B's exercises, and what their checks are to say."""


# %% ex-features passes
def directions_needed(rho, eps):
    rho, eps = sp.Rational(rho), sp.Rational(str(eps))
    waves = 2 * sp.sinh(rho) ** 2 / eps**2
    return sp.ceiling(waves), sp.ceiling((sp.exp(2 * rho) - 1) / eps**2)


# %% ex-features not yet: are not the smallest whole numbers
def directions_needed(rho, eps):
    x = math.exp(2 * rho)
    waves = x * (1 - 1 / x) ** 2 / eps**2  # channels, not directions
    return math.ceil(waves), math.ceil((x - 1) / eps**2)


# %% ex-features not yet: are not the smallest whole numbers
def directions_needed(rho, eps):
    return (55, 172) if rho < 1 else (70, 160)
