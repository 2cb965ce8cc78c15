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
from typing import Any

import torch
from torch import nn

from posttrain.core.data.host_copies import host_copy, know, send
from posttrain.seq2seq.decoder import DecoderWeights, Steps, Unsupported, read_decoder
from posttrain.seq2seq.search import Search, beam, greedy

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
        self._proved: dict[str, bool] = {}
        self._searches: dict[str, Search] = {}

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
            key = f"{torch.is_autocast_enabled(encoded[0].device.type)} {config.to_diff_dict()}"
            if key not in self._proved:
                self._proved[key] = self._try(inputs, encoded, config)
                if not self._proved[key]:
                    raise Unsupported("its tokens differed from those of generate on a short try")
            return self._search(inputs, encoded[0], config) if self._proved[key] else None
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

    def _try(self, inputs: dict[str, Any], encoded: Any, config: Any) -> bool:
        from transformers.modeling_outputs import BaseModelOutput

        few = {name: _first_rows(value) for name, value in inputs.items()}
        states = encoded[0][:TRIAL_ROWS]
        short = copy.deepcopy(config)
        short.max_length = min(config.max_length, 1 + TRIAL_TOKENS)
        short.min_length = min(config.min_length or 0, short.max_length)
        # In a separate object, because generate may repeat the rows for each beam.
        own = BaseModelOutput(last_hidden_state=states)
        expected = self.model.generate(**few, encoder_outputs=own, generation_config=short)
        return torch.equal(self._search(few, states, short), expected)

    def _search(self, inputs: dict[str, Any], states: torch.Tensor, config: Any) -> torch.Tensor:
        key = f"{states.device} {config.to_diff_dict()}"
        if key not in self._searches:
            self._searches[key] = self._options(config, states.device)
        search = self._searches[key]
        assert self._weights is not None  # read at the first call
        steps = Steps(self._weights, states, inputs.get("attention_mask"), search.num_beams, search.max_length)
        return (greedy if search.num_beams == 1 else beam)(steps, len(states), search)

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
        return Search(
            start=int(start),
            pad=int(pad),
            fill=fill,
            eos=eos,
            max_length=config.max_length,
            processors=processors,
            num_beams=config.num_beams,
            num_return_sequences=config.num_return_sequences,
            length_penalty=config.length_penalty,
            early_stopping=config.early_stopping,
        )


def _first_rows(values: torch.Tensor) -> torch.Tensor:
    copy = host_copy(values)
    return know(values[:TRIAL_ROWS], None if copy is None else copy[:TRIAL_ROWS])
