"""A stand-in for a policy that can call tools: it writes given texts, with the model's log-probabilities."""

from __future__ import annotations

import json

import torch

from posttrain.rl.generation.protocol import Completions


def call(name, **arguments):
    """A call in the format of `tests.tiny.CHATML_WITH_TOOLS`."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class ScriptedEngine:
    """Writes ``answer(text of the prompt)``, then the end of the turn, and records what it wrote.

    Attributes:
        written: (prompt ids, ids) of each completion.
    """

    shares_weights = True

    def __init__(self, tokenizer, answer):
        self.tokenizer, self.answer = tokenizer, answer
        self.end = tokenizer.convert_tokens_to_ids("<|im_end|>")
        self.written = []

    def sync_weights(self, model):
        self.model = model

    @torch.no_grad()
    def generate(self, prompts, n, sampling, seeds=None):
        ids, logps = [], []
        for prompt in [prompt for prompt in prompts for _ in range(n)]:
            text = self.answer(self.tokenizer.decode(prompt))
            own = self.tokenizer(text, add_special_tokens=False)["input_ids"] + [self.end]
            own = own[: sampling.max_new_tokens]
            was_training = self.model.training
            self.model.eval()
            logits = self.model(torch.tensor([[*prompt, *own]])).logits[0, len(prompt) - 1 : -1]
            self.model.train(was_training)
            values = (logits.float() / sampling.temperature).log_softmax(-1)
            ids.append(own)
            logps.append(values[range(len(own)), own].tolist())
            self.written.append((list(prompt), own))
        ended = [own[-1] == self.end for own in ids]
        return Completions(ids, logps, ended, is_exact=True)
