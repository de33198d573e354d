"""The next token of every row, drawn with noise that a row's seed tells.

With p a row's probabilities and e independent and exponential, the largest
of p / e is a draw from p. Here e is a function of the row's seed, of how many
tokens it has drawn and of the token: what a row draws depends neither on who
shares its batch nor on how many tokens one step of the model reads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

LOW_32_BITS = 0xFFFFFFFF


@dataclass
class Sampling:
    """How rows are sampled, on their device.

    Args:
        temperature: [N], 0 takes the likeliest token.
        top_p: [N]; a draw is from the fewest tokens that have at least this
            probability together (Holtzman et al. 2020).
        seed: [N], of a row's noise.
        num_drawn: [N], how many tokens each row has drawn.
        greedy: whether every temperature is 0.
        whole_distribution: whether every top_p is 1.
    """

    temperature: Float[Tensor, " N"]  # fp64, for the smallest
    top_p: Float[Tensor, " N"]
    seed: Int[Tensor, " N"]
    num_drawn: Int[Tensor, " N"]
    greedy: bool = False
    whole_distribution: bool = False

    def for_draws(self, T: int, num_drawn: Int[Tensor, " N"]) -> Sampling:
        """The same, for T draws of each row at once, next to each other.

        The first of them has ``num_drawn`` before it.
        """
        step = torch.arange(T, device=num_drawn.device)
        return replace(
            self,
            temperature=self.temperature.repeat_interleave(T),
            top_p=self.top_p.repeat_interleave(T),
            seed=self.seed.repeat_interleave(T),
            num_drawn=(num_drawn[:, None] + step).flatten(),
        )

    def draw(
        self,
        logits: Float[Tensor, "N V"],
        largest: Float[Tensor, " N"],
        likeliest: Int[Tensor, " N"],
    ) -> Int[Tensor, " N"]:
        """Draw each row's next token, given the largest logit and its token.

        A logit of -inf bans its token. Where others are not finite, the row's
        token has no meaning.
        """
        token = likeliest
        if not self.greedy:
            # Of the likeliest, so that no quotient is too large.
            logits = logits.float() - largest.float()[:, None]
            tiny = torch.finfo(torch.float32).tiny
            temperature = self.temperature.clamp(min=tiny).float()[:, None]
            p = (logits / temperature).softmax(-1)
            if not self.whole_distribution:
                ranked, order = p.sort(-1, descending=True)
                before = ranked.cumsum(-1) - ranked
                ranked = ranked.where(before < self.top_p[:, None], 0)
                p = torch.zeros_like(p).scatter(-1, order, ranked)
            noise = exponential_noise(self.seed, self.num_drawn, p.shape[-1])
            token = (p / noise).argmax(-1)
            token = token.where(self.temperature > 0, likeliest)
        self.num_drawn += 1
        return token


def draw_tokens(
    logits: Float[Tensor, "N V"], sampling: Sampling
) -> Int[Tensor, " N"]:
    """A token for each row, -1 if its logits are not finite."""
    largest, likeliest = logits.max(-1)
    token = sampling.draw(logits, largest, likeliest)
    return token.where(largest.isfinite(), -1)


def exponential_noise(
    seed: Int[Tensor, " N"], num_drawn: Int[Tensor, " N"], V: int
) -> Float[Tensor, "N V"]:
    """Independent exponential numbers, one per token of each row.

    Args:
        seed: int64.
        num_drawn: tokens that a row has drawn before.
        V: tokens of the vocabulary.
    """
    key = _mix(_mix((seed ^ (seed >> 32)) & LOW_32_BITS) + num_drawn)
    factor = _mix(key + 1) | 1  # rows step by different ones
    token = torch.arange(V, device=seed.device)
    bits = _mix(token * factor[:, None] + key[:, None])
    # log1p, for which the smallest numbers are not 0: they decide.
    return -torch.log1p(-(bits.float() + 0.5) / 2**32)


def _mix(x: Tensor) -> Tensor:
    """The low 32 bits of x mixed, as int64: each depends on all of them.

    The constants are those of C. Wellons' lowbias32 (2018).
    """
    x = x & LOW_32_BITS
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & LOW_32_BITS
    x = ((x ^ (x >> 15)) * 0x846CA68B) & LOW_32_BITS
    return x ^ (x >> 16)
