"""Suggests replacements for names of trl and transformers that posttrain does not have."""

from __future__ import annotations

import dis
import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterable

from posttrain.core.errors import did_you_mean

PACKAGES = ("posttrain.core", "posttrain.sft", "posttrain.rl", "posttrain.seq2seq")

_PPO = (
    "trl dropped it for want of users; learn from rewards with posttrain.rl.GRPOTrainer, RLOOTrainer or "
    "ReinforcePlusPlusTrainer, which need no value model, see docs/online-rl.md"
)
_ONLINE_PAIRS = (
    "trl dropped it for want of users; posttrain.rl.OnlineDPOTrainer learns from pairs that a judge or rewards "
    "compare, see docs/online-rl.md"
)
_PIXELS = "diffusion models are not trained here; diffusers has training scripts for them"
_JUDGE = (
    "a judge is any object with judge(prompts, completions): pass one as judge to posttrain.rl.OnlineDPOTrainer, see "
    "docs/online-rl.md"
)
_VALUE_HEAD = (
    "no trainer here has a value model; posttrain.rl.GRPOTrainer and RLOOTrainer take a plain causal language model"
)
_VARIANT = (
    "it is not in this version; posttrain.rl.GRPOTrainer is the nearest, and docs/write-an-algorithm.md shows how to "
    "change it"
)
_OF_TRL = "it is a part of trl that no script needs here; import it from trl if you do"

#: ``{names: what to use instead}``, a clause that follows "posttrain.rl has no 'PPOTrainer': ".
_INSTEAD: dict[str, str] = {
    "PPO PPOv2 Policy": _PPO,
    "XPO NashMD Judge": _ONLINE_PAIRS,
    "SSD": "posttrain.rl.SDFTTrainer has a policy that learns from itself; see docs/distillation.md",
    "MiniLLM": "set DistillationConfig(loss_type='policy_gradient') of posttrain.rl; see docs/distillation.md",
    "DDPO AlignProp": _PIXELS,
    "PRM": "trl dropped it for want of users; posttrain.rl.RewardTrainer scores whole completions, see "
    "docs/preference.md",
    "BCO": "trl dropped it for want of users; posttrain.rl.KTOTrainer learns from single completions called good or "
    "bad as well, see docs/preference.md",
    "IterativeSFT": "call posttrain.sft.SFTTrainer once for each round, with the model of the last",
    "GFPO PAPO DPPO": _VARIANT,
    "GSPOToken": "set importance_sampling_level='sequence_token' of posttrain.rl.GRPOConfig",
}
INSTEAD = {
    name + ending: why for names, why in _INSTEAD.items() for name in names.split() for ending in ("Trainer", "Config")
}
for _names, _why in {
    "AutoModelForCausalLMWithValueHead AutoModelForSeq2SeqLMWithValueHead PreTrainedModelWrapper": _VALUE_HEAD,
    "AdaptiveKLController FixedKLController LengthSampler": _PPO,
    "DefaultDDPOStableDiffusionPipeline DDPOPipelineOutput DDPOSchedulerOutput DDPOStableDiffusionPipeline": _PIXELS,
    "BaseJudge BasePairwiseJudge BaseRankJudge BaseBinaryJudge AllTrueJudge HfPairwiseJudge OpenAIPairwiseJudge "
    "PairRMJudge RandomPairwiseJudge RandomRankJudge": _JUDGE,
    "TextEnvironment TextHistory": "pass environment_factory or tools to posttrain.rl.GRPOTrainer",
    "HarborSpec HarborEnv HarborBashEnv OpenRewardSpec": "keep trl's: posttrain.rl.GRPOTrainer takes what it makes",
    "HarnessRolloutWorker": "pass what runs the harness as agent to posttrain.rl.AsyncGRPOTrainer, see docs/agents.md; "
    "or keep trl's as rollout_worker",
    "AsyncRolloutWorker WeightTransferClient": "keep trl's: posttrain.rl.AsyncGRPOTrainer takes it as rollout_worker "
    "or weight_transfer",
    "BestOfNSampler": "generate several completions and keep the best by a reward function of posttrain.rl",
    "MergeModelCallback MergeConfig": "merge adapters with `posttrain merge`; for models, use mergekit",
    "BEMAForRefModelCallback": "posttrain.rl.BEMACallback moves the reference too, with update_ref_model=True",
    "pack_dataset pack_examples ConstantLengthDataset": "set SFTConfig(packing=True)",
    "truncate_dataset": "set max_length",
    "DataCollatorForLanguageModelingChatML": "give rows of messages to posttrain.sft.SFTTrainer",
    "RewardDataCollatorWithPadding DPODataCollatorWithPadding DataCollatorForPreference "
    "DataCollatorForUnpairedPreference DataCollatorForTriplePreference "
    "DataCollatorForLanguageModeling": "leave data_collator out: the trainer makes its own batches",
    "chat_template_utils": "the trainers apply the chat template themselves; by hand: tokenizer.apply_chat_template",
    "maybe_reformat_dpo_to_kto": "posttrain.rl.KTOTrainer reads pairs too, and takes them apart itself",
    "init_zero_verbose data_utils models scripts trainer TRLExperimentalWarning experimental import_utils core extras "
    "environment": _OF_TRL,
    "SFTScriptArguments DPOScriptArguments RewardScriptArguments": "use posttrain.sft.ScriptArguments",
    "VLLMClient": "set use_vllm=True in the config of an online trainer",
    "disable_dropout_in_model": "set disable_dropout=True",
    "prepare_deepspeed": "set deepspeed in the arguments",
    "profiling_context profiling_decorator": "every record has perf/ values; see docs/loop.md",
}.items():
    INSTEAD |= dict.fromkeys(_names.split(), _why)

#: What to do about names that transformers itself has dropped, a clause that follows "transformers 5 has no AdamW: ".
GONE: dict[str, str] = {}
for _names, _why in {
    "AdamW": "import it from torch.optim, or leave optimizers to the trainer",
    "send_example_telemetry": "leave out the call",
    "is_offline_mode": "import it from huggingface_hub",
    "is_torch_tpu_available": "call is_torch_xla_available",
    "AutoModelForVision2Seq": "use AutoModelForImageTextToText",
    "AutoModelWithLMHead": "use AutoModelForCausalLM, AutoModelForMaskedLM or AutoModelForSeq2SeqLM",
    "TextDataset LineByLineTextDataset LineByLineWithSOPTextDataset": "read the file with datasets; tokenize with map",
    "GlueDataset SquadDataset glue_compute_metrics": "load the rows with datasets and the metric with evaluate",
    "cached_path": "use huggingface_hub.hf_hub_download",
    "ViTFeatureExtractor CLIPFeatureExtractor DetrFeatureExtractor SegformerFeatureExtractor": "use the class of that "
    "name that ends in ImageProcessor",
}.items():
    GONE |= dict.fromkeys(_names.split(), _why)


def gone_from_transformers(module: str, name: str) -> str | None:
    """Says that the installed transformers has no `name` in `module`, and what to do; None: it has it."""
    what = f"no {name}"
    try:
        found = importlib.import_module(module)
        if name in dir(found) or hasattr(found, name):
            return None
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):
            return None  # a package that transformers needs there: nothing is known of the name
        what = f"no module {error.name}"
    version = importlib.metadata.version("transformers")
    return f"transformers {version} has {what}" + (f": {GONE[name]}" if name in GONE else "")


def missing_name(package: str, name: str, known: Iterable[str], lookups: int = 2) -> Exception:
    """The error of a package's ``__getattr__`` for an unknown name, with a replacement.

    An `ImportError` during an import, where Python would drop the text of an `AttributeError`; else that.

    Args:
        package: such as ``"posttrain.rl"``.
        known: the package's names.
        lookups: frames between here and the caller.
    """
    instead, known = elsewhere(package, name), list(known)
    text = f": {instead}." if instead else did_you_mean(name, known) or f"; it has {', '.join(known)}"
    text = f"{package} has no {name!r}{text}"
    return (ImportError if _is_imported(lookups) else AttributeError)(text, name=name)


def elsewhere(package: str, name: str) -> str:
    """The replacement of `name`, as a clause; empty if unknown."""
    if name.startswith("_"):
        return ""
    for other in PACKAGES:
        if other != package and name in _names_of(other):
            return f"it is in {other}; write `from {other} import {name}`"
    if name in INSTEAD:
        return INSTEAD[name]
    transformers = sys.modules.get("transformers")
    if transformers is None and name[:1].isupper() and importlib.util.find_spec("transformers") is not None:
        import transformers
    if transformers is not None and name in dir(transformers):
        return f"it is in transformers; write `from transformers import {name}`"
    return ""


def _names_of(package: str) -> list[str]:
    try:
        return list(importlib.import_module(package).__all__)
    except ModuleNotFoundError:  # a package of ours that is not installed
        return []


def _is_imported(lookups: int) -> bool:
    """Whether the caller is a ``from package import name``."""
    frame = sys._getframe(lookups + 1)
    code = frame.f_code.co_code
    return 0 <= frame.f_lasti < len(code) and dis.opname[code[frame.f_lasti]] == "IMPORT_FROM"
