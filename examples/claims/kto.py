"""KTO is on a par with DPO on pairs, though it sees no pairs (Ethayarajh et al. 2024, https://arxiv.org/abs/2402.01306).

python examples/claims/dpo.py && python examples/claims/kto.py

The same model, solutions and held-out pairs as in dpo.py, whose figures are taken from its results: KTO is given each
solution by itself, called good or bad.
"""

from __future__ import annotations

import arms
import dpo


def verdict(figures: dict[str, list[arms.Figures]]) -> str:
    figures = figures | {"dpo": dpo.recorded()[: len(figures["kto"])]}
    mean, low, high = arms.bounds(arms.differences(figures, "kto", "dpo", "accuracy"))
    found = f"KTO minus DPO {100 * mean:+.1f} points of held-out accuracy [{100 * low:+.1f}, {100 * high:+.1f}]"
    return f"{'Holds' if low <= 0 <= high else 'Does not hold'}: {found}."


if __name__ == "__main__":
    arms.run(
        "KTO is within noise of DPO on held-out preference pairs", "https://arxiv.org/abs/2402.01306", ["kto"],
        dpo.measure, verdict, dpo.SETTINGS, dpo.SMOKE,
    )  # fmt: skip
