"""How far the policy that is trained is from the one that sampled, in a mixture of experts, with and without the replay
of its routes (`router_replay`).

    python benchmarks/router_replay.py              # a minute on 2 cores

A mixture of 4 layers with 4 of 16 experts for each token writes completions in one precision, and their
log-probabilities are computed in another, in training's layout. Written for each pair of precisions: the share of
tokens of which some layer chose other experts, and the gap of log-probabilities, without and with the replay: its
mean and largest size, and the divergence that it means, the mean of e^d - 1 - d.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]

import torch  # noqa: E402

from posttrain.lm.attention import router_replay  # noqa: E402
from posttrain.rl.generation import Sampling  # noqa: E402
from posttrain.rl.generation.local import LocalGenerator  # noqa: E402
from posttrain.rl.policy.logprobs import completion_logps  # noqa: E402
from posttrain.rl.samples.samples import Rollout, Sample  # noqa: E402
from tests import tiny  # noqa: E402

#: The precision of sampling, and of training.
PAIRS = [("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "bf16"), ("bf16 weights", "bf16")]
PROMPTS, COPIES, TOKENS = 32, 4, 64


def mixture(seed: int) -> torch.nn.Module:
    """Wide enough that scores of experts lie close together now and then."""
    size: dict[str, Any] = dict(hidden_size=64, num_hidden_layers=4, num_experts=16, num_experts_per_tok=4)
    return tiny.mixture_of_experts(seed=seed, initializer_range=0.15, **size).eval()


def precision(name: str) -> contextlib.AbstractContextManager:
    return torch.autocast("cpu", dtype=torch.bfloat16) if name == "bf16" else contextlib.nullcontext()


def rollout(model: torch.nn.Module, how: str, seed: int) -> Rollout:
    """Completions of `model` in the precision `how`, with their routes."""
    if how == "bf16 weights":
        model = copy.deepcopy(model).to(torch.bfloat16)
    generator = LocalGenerator(tiny.tokenizer(), with_routes=True)
    generator.sync_weights(model)
    numbers = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(4, 384, (12,), generator=numbers).tolist() for _ in range(PROMPTS)]
    with precision(how):
        done = generator.generate(prompts, COPIES, Sampling(TOKENS), list(range(PROMPTS * COPIES)))
    assert done.logps is not None and done.routes is not None
    return Rollout.of([
        Sample({}, "", prompts[i // COPIES], ids, logps, routes=routes)
        for i, (ids, logps, routes) in enumerate(zip(done.ids, done.logps, done.routes, strict=True))
    ])  # fmt: skip


@torch.no_grad()
def gaps(model: torch.nn.Module, sampled: Rollout, how: str) -> tuple[float, torch.Tensor, torch.Tensor]:
    """(share of tokens with other experts, gaps without the replay, gaps with it), where training computes in `how`."""
    assert sampled.routes is not None and sampled.sampling_logps is not None
    found: dict[bool, list[torch.Tensor]] = {False: [], True: []}
    moved = []
    for part, logps in zip(sampled.micro_batches(8), sampled.sampling_logps.split(8), strict=True):
        for replays in found:
            batch = dict(part) if replays else {name: part[name] for name in part if name != router_replay.ROUTES}
            with precision(how), router_replay.Recorder(model) as recorder:
                gap = completion_logps(model, batch).logps - logps[:, : part["loss_mask"].shape[1]]
                chosen = recorder.take().view_as(part[router_replay.ROUTES])
            found[replays].append(gap[part["loss_mask"].bool()])
            if not replays:
                known = part[router_replay.ROUTES][..., 0, 0] != router_replay.OWN
                same = chosen.sort(-1).values == part[router_replay.ROUTES].sort(-1).values
                moved.append(~same.flatten(2).all(-1)[known])
    return float(torch.cat(moved).float().mean()), torch.cat(found[False]), torch.cat(found[True])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    seeds = range(parser.parse_args().seeds)
    print("| sampling | training | tokens with other experts | mean gap | with replay | largest | with replay "
          "| divergence | with replay |\n|---|---|---|---|---|---|---|---|---|")  # fmt: skip
    for sampling, training in PAIRS:
        rows = []
        for seed in seeds:
            model = mixture(seed)
            router_replay.enable(model)
            rows.append(gaps(model, rollout(model, sampling, seed), training))
        shares, *kinds = zip(*rows, strict=True)
        told = [f"{sum(shares) / len(shares):.2%}"]
        without, replayed = (torch.cat(kind).double() for kind in kinds)
        for size in (lambda d: d.abs().mean(), lambda d: d.abs().max(), lambda d: (d.exp() - 1 - d).mean()):
            told += [f"{size(without):.2g}", f"{size(replayed):.2g}"]
        print(f"| {sampling} | {training} | {' | '.join(told)} |", flush=True)


if __name__ == "__main__":
    main()
