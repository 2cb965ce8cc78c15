"""Fast greedy and beam search for encoder-decoder models of the T5 and BART families.

`transformers`' ``generate`` supports every model and option, which costs time at each token. For the two most frequent
families, this module has its own decoder step: keys and values of the encoder computed once and not copied per beam, a
cache of fixed size, fused projections, rows that leave the batch when they are finished, and a search for the best
tokens that reads the logits once.

Use `LeanGenerator`: it first compares itself with ``generate`` on a few rows and declines if the results differ.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from posttrain.core.data.host_copies import host_copy, know, send
from posttrain.seq2seq.decoder import DecoderWeights, Steps, Unsupported, read_decoder

logger = logging.getLogger(__name__)

#: Rows and new tokens of the comparison with ``generate``.
TRIAL_ROWS, TRIAL_TOKENS = 4, 12
#: Options of ``generate`` that are left to it.
UNUSUAL = """
    return_dict_in_generate stop_strings max_time token_healing low_memory encoder_repetition_penalty
    encoder_no_repeat_ngram_size guidance_scale watermarking_config remove_invalid_values renormalize_logits
""".split()
#: Logits processors that process rows independently, so that rows may leave the batch.
ROW_BY_ROW = """
    ForcedBOSTokenLogitsProcessor ForcedEOSTokenLogitsProcessor MinLengthLogitsProcessor
    MinNewTokensLengthLogitsProcessor NoBadWordsLogitsProcessor NoRepeatNGramLogitsProcessor
    RepetitionPenaltyLogitsProcessor SequenceBiasLogitsProcessor SuppressTokensLogitsProcessor
    SuppressTokensAtBeginLogitsProcessor ExponentialDecayLengthPenalty
""".split()


class LeanGenerator:
    """``model.generate`` for models and options on which a comparison finds equal results.

    Call `refresh` when the weights may have changed, because some are stored fused. The first batch with new options
    generates a few rows both ways; if a token differs, the result is None from then on.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = model
        self.refused: str | None = None
        self._weights: DecoderWeights | None = None
        self._searches: dict[str, Search | None] = {}  # None: its tokens differ from those of `generate`

    def refresh(self) -> None:
        """Read the weights again at the next call."""
        self._weights = None

    @torch.no_grad()
    def __call__(self, inputs: dict[str, Any], encoded: Any, options: dict[str, Any]) -> torch.Tensor | None:
        """The tokens that ``generate(**inputs, **options)`` gives, (B x num_return_sequences, T), or None: not
        supported.

        Args:
            inputs: of the encoder; a dict of tensors.
            encoded: what the encoder made of them.
            options: arguments of ``generate``.
        """
        try:
            config = self._config(inputs, options)
            if self._weights is None:
                self._weights = read_decoder(self.model)
            device = encoded[0].device
            key = f"{device} {torch.is_autocast_enabled(device.type)} {config.to_diff_dict()}"
            if key not in self._searches:
                self._searches[key] = None
                self._try(inputs, encoded, config)
                self._searches[key] = self._options(config, device)
            search = self._searches[key]
            return None if search is None else self._search(inputs, encoded[0], search)
        except Unsupported as reason:
            if str(reason) != self.refused:
                self.refused = str(reason)
                logger.info("Evaluations call generate of %s: %s.", type(self.model).__name__, reason)
            return None

    def _config(self, inputs: dict[str, Any], options: dict[str, Any]) -> Any:
        """The options as ``generate`` would complete them, its lengths in `max_length` alone."""
        from transformers import GenerationMixin

        model = self.model
        if "generate" in vars(model) or getattr(type(model), "generate", None) is not GenerationMixin.generate:
            raise Unsupported("it overrides generate")
        if not set(inputs) <= {"input_ids", "attention_mask"}:
            raise Unsupported(f"it is given more than tokens ({', '.join(inputs)})")
        try:
            options = {name: value for name, value in options.items() if name != "synced_gpus"}
            base = options.pop("generation_config", None)
            config, rest = model._prepare_generation_config(base, **options)
            unset = all(one is None or one.max_length is None for one in (base, model.generation_config))
            config = model._prepare_generated_length(
                config, options.get("max_length") is None and unset, True, "input_ids", 1, inputs["input_ids"]
            )
            mode, usual = config.get_generation_mode().value, config._get_default_generation_params()
        except (AttributeError, TypeError) as error:
            raise Unsupported(f"this version of transformers prepares generation differently ({error})") from error
        if rest:
            raise Unsupported(f"it is given {', '.join(rest)}")
        if mode not in ("greedy_search", "beam_search"):
            raise Unsupported(f"its mode is {mode}")
        for name in UNUSUAL:
            if getattr(config, name, None) not in (None, False, usual.get(name)):
                raise Unsupported(f"{name} is set")
        config.max_new_tokens = None
        return config

    def _try(self, inputs: dict[str, Any], encoded: Any, config: Any) -> None:
        from transformers.modeling_outputs import BaseModelOutput

        few = {name: _first_rows(value) for name, value in inputs.items()}
        states = encoded[0][:TRIAL_ROWS]
        short = copy.deepcopy(config)
        short.max_length = min(config.max_length, 1 + TRIAL_TOKENS)
        short.min_length = min(config.min_length or 0, short.max_length)
        # In a separate object, because generate may repeat the rows for each beam.
        own = BaseModelOutput(last_hidden_state=states)
        expected = self.model.generate(**few, encoder_outputs=own, generation_config=short)
        if not torch.equal(self._search(few, states, self._options(short, states.device)), expected):
            raise Unsupported("its tokens differed from those of generate on a short try")

    def _search(self, inputs: dict[str, Any], states: torch.Tensor, search: Search) -> torch.Tensor:
        assert self._weights is not None  # read at the first call
        beams, limit = search.config.num_beams, search.config.max_length
        steps = Steps(self._weights, states, inputs.get("attention_mask"), beams, limit)
        return (greedy if beams == 1 else beam)(steps, len(states), search)

    def _options(self, config: Any, device: torch.device) -> Search:
        """The options of a search as ``generate`` reads them; once for each device and configuration."""
        model, config = self.model, copy.deepcopy(config)
        model._prepare_special_tokens(config, True, device="cpu")
        start, eos, pad = config._decoder_start_token_tensor, config._eos_token_tensor, config._pad_token_tensor
        if eos is None or start is None or start.numel() != 1:
            raise Unsupported("it has no single start token, or no end token")
        fill, eos = int(pad) or int(eos[0]), send(eos, device)
        config._eos_token_tensor = eos  # the processors compare it with scores
        processors = model._get_logits_processor(config, input_ids_seq_length=1, device=device, model_kwargs={})
        if others := [name for name in (type(one).__name__ for one in processors) if name not in ROW_BY_ROW]:
            raise Unsupported(f"its scores are changed by {', '.join(others)}")
        return Search(config, int(start), int(pad), fill, eos, processors)


def _first_rows(values: torch.Tensor) -> torch.Tensor:
    copy = host_copy(values)
    return know(values[:TRIAL_ROWS], None if copy is None else copy[:TRIAL_ROWS])


#: The score of excluded tokens, as in ``generate``.
NEVER = -1.0e9
#: Block size in which the scores of a row are compared.
BLOCK = 64
#: On a device, tokens between two looks at which rows have ended: each look waits for all that the device has to do.
TOKENS_BETWEEN_LOOKS = 16


def best_of_each_row(scores: torch.Tensor) -> torch.Tensor:
    """``scores.argmax(-1)`` of (N, V), via the maxima of blocks, several times faster."""
    rows, size = scores.shape
    whole = size // BLOCK * BLOCK
    if scores.device.type != "cpu" or whole < 2 * BLOCK:
        return scores.argmax(-1)
    blocks = scores[:, :whole].unflatten(1, (-1, BLOCK))
    best = blocks.amax(-1).argmax(-1)
    token = best * BLOCK + blocks[torch.arange(rows), best].argmax(-1)
    if whole < size:
        rest, place = scores[:, whole:].max(-1)
        token = torch.where(rest > scores.gather(1, token[:, None])[:, 0], place + whole, token)
    return token


def top_of_each_row(scores: torch.Tensor, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``scores.topk(number)`` of (N, V): the top `number` lie in the `number` blocks with the largest maxima."""
    rows, size = scores.shape
    if scores.device.type != "cpu" or size % BLOCK or size // BLOCK < 4 * number:
        return scores.topk(number)
    blocks = scores.view(rows, -1, BLOCK)
    _, chosen = blocks.amax(-1).topk(number)
    values, place = blocks[torch.arange(rows)[:, None], chosen].flatten(1).topk(number)
    return values, chosen.gather(1, place // BLOCK) * BLOCK + place % BLOCK


@dataclass
class Search:
    """The options of a search: a ``GenerationConfig``, its tokens, and its logits processors.

    `fill` is what beams that ended are filled up with.
    """

    config: Any
    start: int
    pad: int
    fill: int
    eos: torch.Tensor
    processors: Any


def looks(length: int, search: Search) -> bool:
    """Whether the host looks at which rows have ended when they have `length` tokens: at the end, and now and then."""
    between = 1 if search.eos.device.type == "cpu" else TOKENS_BETWEEN_LOOKS
    return length == search.config.max_length or length % between == 0


def greedy(steps: Steps, batch: int, search: Search) -> torch.Tensor:
    """The most probable token at each step: (B, length of the longest row), rows that ended filled up with the pad
    token.
    """
    device, limit = search.eos.device, search.config.max_length
    tokens = torch.full((batch, limit), search.pad, dtype=torch.long, device=device)
    tokens[:, 0] = search.start
    live = torch.arange(batch, device=device)  # the row of `tokens` that each row of the steps is
    unfinished = torch.ones(batch, dtype=torch.bool, device=device)
    length, last = 1, tokens[:, 0]
    longest = torch.ones(1, dtype=torch.long, device=device)  # tokens until the last row ended
    while length < limit:
        scores = steps(last)
        if search.processors:
            scores = search.processors(tokens[live, :length], scores)
        last = best_of_each_row(scores).where(unfinished, search.pad)
        tokens[live, length] = last
        length += 1
        longest += unfinished.any()
        unfinished = unfinished & ~torch.isin(last, search.eos)
        if not looks(length, search):
            continue
        *goes_on, needed = torch.cat([unfinished, longest]).tolist()
        rows = [row for row, goes in enumerate(goes_on) if goes]
        if not rows:
            return tokens[:, :needed]
        if len(rows) <= 0.75 * len(live):
            kept = send(torch.tensor(rows), device)
            steps.keep(kept)
            steps.reorder(kept)
            live, last, unfinished = live[kept], last[kept], unfinished[kept]
    return tokens[:, :length]


def beam(steps: Steps, batch: int, search: Search) -> torch.Tensor:
    """Beam search as ``generate`` has it: (B x num_return_sequences, length of the longest row).

    A row leaves the batch when none of its running beams can still take the place of a finished one.
    """
    device, config = search.eos.device, search.config
    beams, limit, returned = config.num_beams, config.max_length, config.num_return_sequences
    candidates = max(2, 1 + len(search.eos)) * beams
    among_first = torch.arange(candidates, device=device) < beams
    live = torch.arange(batch, device=device)  # the row of the result that each row below is
    running = torch.full((batch, beams, limit), search.fill, device=device)
    running[:, :, 0] = search.start
    running_scores = torch.full((batch, beams), NEVER, device=device)
    running_scores[:, 0] = 0  # all beams are the same at first: only one of them counts
    best, lengths = running.clone(), torch.ones(batch, beams, dtype=torch.long, device=device)
    scores = torch.full((batch, beams), NEVER, device=device)
    done = torch.zeros(batch, beams, dtype=torch.bool, device=device)
    is_open = torch.ones(batch, dtype=torch.bool, device=device)
    found, found_lengths = best[:, :returned].clone(), lengths[:, :returned].clone()
    logps = torch.empty(0)
    for size in range(1, limit):
        logits = steps(running[:, :, size - 1].flatten())
        logps = logps if logps.shape == logits.shape else torch.empty_like(logits)
        given = torch.log_softmax(logits, -1, out=logps)
        if search.processors:
            given = search.processors(running[:, :, :size].flatten(0, 1), given)
        totals = given.view(len(live), beams, -1).add_(running_scores[:, :, None])
        top, index = top_of_each_row(totals.flatten(1), candidates)
        parent, token = index // totals.shape[-1], index % totals.shape[-1]
        extended = _pick(running, parent)
        extended[:, :, size] = token
        stops = torch.isin(token, search.eos) if size + 1 < limit else torch.ones_like(token, dtype=torch.bool)

        going = top + stops * NEVER
        choice = going.topk(beams)[1]
        running, running_scores, parent = _pick(extended, choice), _pick(going, choice), _pick(parent, choice)

        finished = stops & among_first
        shut = ~finished | ~is_open[:, None]
        merged = torch.cat([scores, top / size**config.length_penalty + shut * NEVER], 1)
        choice = merged.topk(beams)[1]
        best, scores = _pick(torch.cat([best, extended], 1), choice), _pick(merged, choice)
        lengths = _pick(torch.cat([lengths, torch.full_like(token, size + 1)], 1), choice)
        done = _pick(torch.cat([done, finished], 1), choice)

        # What the best running beam could still reach, against the worst finished one.
        reach = limit - 1 if config.early_stopping == "never" and config.length_penalty > 0 else size
        worst = torch.where(done, scores.min(1, keepdim=True)[0], NEVER)
        is_open = is_open & (running_scores[:, :1] / reach**config.length_penalty > worst).any(1)
        if config.early_stopping is True:
            is_open = is_open & ~done.all(1)
        is_open = is_open & ~stops.all()
        rows = torch.arange(len(live), device=device)
        if looks(size + 1, search):
            left = [row for row, goes in enumerate(is_open.tolist()) if goes]
            if len(left) <= 0.75 * len(live):
                found[live], found_lengths[live] = best[:, :returned], lengths[:, :returned]
                if not left:
                    break
                rows = send(torch.tensor(left), device)
                steps.keep(rows)
                parts = (live, running, running_scores, best, lengths, scores, done, is_open)
                live, running, running_scores, best, lengths, scores, done, is_open = (part[rows] for part in parts)
        steps.reorder((parent[rows] + rows[:, None] * beams).flatten())
    return found.flatten(0, 1)[:, : int(found_lengths.max())]


def _pick(values: torch.Tensor, beams: torch.Tensor) -> torch.Tensor:
    """Of (B, K, ...) the beams (B, k) of each row: (B, k, ...)."""
    return torch.take_along_dim(values, beams if values.ndim == 2 else beams[:, :, None], 1)
