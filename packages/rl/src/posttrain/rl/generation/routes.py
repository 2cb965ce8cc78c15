"""The experts of a mixture with which completions were written, for `posttrain.lm.attention.router_replay`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from posttrain.lm.attention.router_replay import Recorder


class Routes:
    """The experts with which prompts and completions were read."""

    def __init__(self, recorder: Recorder, prompts: Sequence[Sequence[int]], n: int, longest: int) -> None:
        self.recorder, self.n = recorder, n
        self.prompts: list[torch.Tensor] = [torch.empty(0)] * len(prompts)
        self.longest = longest
        self.tokens: torch.Tensor | None = None

    def of_prompts(self, numbers: list[int], lengths: list[int]) -> None:
        """Take down those of the prompts that were read together, one after the other."""
        for number, routes in zip(numbers, self.recorder.take().split(lengths), strict=True):
            self.prompts[number] = routes

    def of_tokens(self, rows: torch.Tensor, steps: torch.Tensor) -> None:
        """Take down those of one token of each of these completions."""
        found = self.recorder.take()
        if self.tokens is None:
            self.tokens = found.new_empty(len(self.prompts) * self.n, self.longest, *found.shape[1:])
        self.tokens[rows, steps] = found

    def of(self, lengths: list[int]) -> list[torch.Tensor]:
        """Those of each completion of so many tokens behind its prompt, on the CPU."""
        prompts = [routes.cpu() for routes in self.prompts]
        if self.tokens is None:  # no completion has more than one token, which is not read
            return [prompts[row // self.n] for row in range(len(lengths))]
        tokens = self.tokens.cpu()
        return [torch.cat([prompts[row // self.n], tokens[row, : n - 1]]) for row, n in enumerate(lengths)]
