"""The shared arguments of online trainers."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from posttrain.core.config import JSONObject, Resolved, check_field, opt, set_among
from posttrain.core.distributed import deepspeed, shard_settings
from posttrain.core.errors import did_you_mean, missing
from posttrain.core.fields.old_names import Removed, Renamed
from posttrain.lm.generate.generate import unknown_options
from posttrain.lm.images.images import ImageArguments
from posttrain.lm.loading.arguments import LanguageModelArguments
from posttrain.rl.generation.continuous import sampling_problem
from posttrain.rl.generation.engines import ENDS, FOLDED, REFUSED, refused
from posttrain.rl.generation.protocol import MAX_ROWS
from posttrain.rl.online.curriculum import CurriculumArguments
from posttrain.rl.policy.reference import SyncArguments
from posttrain.rl.rewards.scoring import RewardArguments

OLD_NAMES: dict[str, Renamed | Removed] = {
    "max_prompt_length": Removed(
        "prompts are never cut, since a question without its end has another answer; filter the dataset by length",
        harmless=None,
    ),
    "vllm_sync_frequency": Removed("weights are sent after each optimizer step", harmless=(1,)),
    "log_completions_steps": Removed("set logging_steps", harmless=None),
    "use_liger_loss": Removed("logits are never held whole, without Liger too", harmless=None),
    "vllm_device": Removed(
        "set vllm_mode='colocate', or vllm_server_base_url for one on other devices", (None, "auto")
    ),
    "vllm_dtype": Removed("vLLM takes the type of the weights", (None, "auto")),
    "vllm_max_model_len": Renamed("vllm_max_model_length"),
    "vllm_enable_prefix_caching": Removed("vLLM decides by itself", harmless=None),
    "wandb_log_unique_prompts": Renamed("log_unique_prompts"),
    "use_transformers_paged": Renamed("use_transformers_continuous_batching"),
    "vllm_guided_decoding_regex": Renamed("vllm_structured_outputs_regex"),
}


IMPORTANCE_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")

#: What some fields need to have an effect.
SERVER, HERE = "use_vllm vllm_mode=server", "use_vllm vllm_mode=colocate"
LOCAL, CORRECTS = "use_vllm=False use_transformers_continuous_batching=False", "vllm_importance_sampling_correction"


@dataclass
class GenerationArguments:
    """How completions are sampled, and by what."""

    max_completion_length: Resolved[int | None, int] = opt(
        512, "Tokens of a completion at most; longer ones are cut there.", min=1
    )
    temperature: float = opt(
        1.0, "Logits are divided by it, in sampling and in the loss; larger explores more.", above=0
    )
    top_p: float = opt(
        1.0, "Sample among the most probable tokens that together reach this probability.", above=0, max=1
    )
    top_k: int = opt(0, "Sample among this many most probable tokens; 0: all.", min=0)
    min_p: float | None = opt(
        None, "Sample among tokens of at least this share of the highest probability.", min=0, max=1
    )
    repetition_penalty: float = opt(1.0, "Above 1 tokens that occurred before become less likely.", above=0)
    generation_kwargs: JSONObject = opt(
        None,
        'Further settings: "stop" strings, arguments of sampling, which these replace, and fields of GenerationConfig '
        "or of vLLM's SamplingParams.",
    )
    chat_template_kwargs: JSONObject = opt(None, "Variables given to the chat template.")
    renderer: str | None = opt(
        None,
        "Renderer of the package renderers that writes prompts and answers and reads calls, in place of the chat "
        "template: its name, such as qwen3, or auto for the model's own.",
    )
    generation_max_rows: int = opt(
        MAX_ROWS,
        "Completions that the local engine writes at once: memory grows with them, and the rest wait.",
        min=1,
        needs=LOCAL,
    )
    generation_cache_tokens: int | None = opt(
        None,
        "Tokens in the local engine's cache at most: a prompt counts once for all its completions, and each of these "
        "with max_completion_length; None: those of generation_max_rows.",
        min=1,
        needs=LOCAL,
    )
    generation_batch_invariant: bool = opt(
        False,
        "The local engine writes each completion as it would alone, bit for bit, whatever is written beside it; "
        "slower.",
        needs=LOCAL,
    )
    cache_implementation: str | None = opt(None, "Cache of transformers' generate, such as static or dynamic.")
    use_transformers_continuous_batching: bool = opt(False, "Generate with transformers' continuous batching.")
    transformers_continuous_batching_config: JSONObject = opt(
        None, "Settings of transformers' continuous batching.", needs="use_transformers_continuous_batching"
    )
    use_vllm: bool = opt(False, "Generate with vLLM, in this process or on a server.")
    vllm_mode: str = opt(
        "colocate",
        "vLLM in the processes of the trainer, or on a server.",
        choices=("colocate", "server"),
        needs="use_vllm",
    )
    vllm_model_impl: str = opt(
        "vllm", "Whose model code vLLM runs.", choices=("vllm", "transformers", "auto"), needs=HERE
    )
    vllm_enable_sleep_mode: bool = opt(
        False, "Give vLLM's memory back while training; waking it takes time.", needs=HERE
    )
    vllm_structured_outputs_regex: str | None = opt(None, "Pattern that each completion must follow.")
    vllm_server_base_url: str | None = opt(
        None,
        "Address of the server, instead of host and port; several with commas between them share the prompts.",
        needs=SERVER,
    )
    vllm_server_host: str = opt("0.0.0.0", "Host of the server.", needs=SERVER)
    vllm_server_port: int = opt(8000, "Port of the server.", min=1, max=65535, needs=SERVER)
    vllm_server_timeout: float = opt(240.0, "Seconds to wait for the server to come up.", above=0, needs=SERVER)
    vllm_request_timeout: float = opt(
        1800.0, "Seconds within which the server must answer a request.", above=0, needs=SERVER
    )
    vllm_group_port: int = opt(
        51216,
        "Port on which weights are sent to the server; 0: any that is free, for the backend gloo.",
        min=0,
        max=65535,
        needs=SERVER,
    )
    vllm_weight_folder: str | None = opt(
        None, "Folder that trainer and server share, in which weights are written for the server to read.", needs=SERVER
    )
    vllm_gpu_memory_utilization: float = opt(
        0.3, "Share of the GPU's memory for a colocated vLLM.", above=0, max=1, needs=HERE
    )
    vllm_max_model_length: int | None = opt(
        None, "Longest prompt and completion together; None: the model's.", min=1, needs=HERE
    )
    vllm_tensor_parallel_size: int = opt(1, "GPUs over which a colocated vLLM splits the model.", min=1, needs=HERE)
    ds3_gather_for_generation: bool = opt(
        True, "Gather the parts of a sharded model once to generate; at each layer is not in this version."
    )

    def _problems(self) -> Iterator[str]:
        if self.max_completion_length is None:
            yield (
                "max_completion_length=None bounds nothing, and a policy that never ends its answer would write for "
                "ever; set a number of tokens, such as 512"
            )
        if self.use_vllm and self.use_transformers_continuous_batching:
            yield "use_vllm=True and use_transformers_continuous_batching=True name two engines; set one to False"
        if self.vllm_structured_outputs_regex is not None and not self.use_vllm:
            yield "vllm_structured_outputs_regex is followed by vLLM alone; set use_vllm=True, or leave it out"
        if self.cache_implementation is not None and (self.use_vllm or self.use_transformers_continuous_batching):
            yield "cache_implementation is of transformers' generate, which another engine replaces; leave it out"
        if self.use_transformers_continuous_batching and (problem := sampling_problem(self)):
            yield problem
        own: Any = self
        asked = (
            shard_settings.read(own.fsdp, own.fsdp_config, own.parallelism_config),
            shard_settings.from_environment(),
        )
        shards = any(settings for settings, _ in asked) or deepspeed.is_asked_for(own.deepspeed)
        if not self.ds3_gather_for_generation and shards:
            yield (
                "ds3_gather_for_generation=False, generation with sharded weights, is not supported; leave it True, "
                "or use use_vllm with a server if the model does not fit on one GPU"
            )

    def _preflight(self) -> Iterator[str | Exception]:
        is_here = self.use_vllm and self.vllm_mode == "colocate"
        if is_here and (error := missing("vllm", "vllm", "use_vllm=True")):
            yield error
        yield from self._engine_problems()

    def _engine_problems(self) -> Iterator[str]:
        """Fields that transformers' generate does not have; vLLM has its own."""
        from transformers.generation.configuration_utils import ALL_CACHE_IMPLEMENTATIONS

        settings = self.generation_kwargs if isinstance(self.generation_kwargs, dict) else {}
        for name in ("stop", "stop_strings"):
            words = settings.get(name)
            each = words if isinstance(words, (list, tuple)) else [words]
            if words is not None and not all(isinstance(word, str) for word in each):
                yield f"generation_kwargs: {name}={words!r} must be a text or a list of texts"
        asked = copy.copy(self)  # with the bounds of the arguments for the same
        problems: list[str] = []
        for name in sorted(FOLDED.keys() & settings.keys()):
            if settings[name] is not None and (name, settings[name]) != ("top_k", -1):
                setattr(asked, FOLDED[name], settings[name])
                problems += check_field(asked, type(self).__dataclass_fields__[FOLDED[name]])
        if self.use_transformers_continuous_batching and not problems and (problem := sampling_problem(asked)):
            problems = [] if sampling_problem(self) else [problem]
        yield from (f"generation_kwargs: {problem}" for problem in problems)
        yield from refused(self) if settings else ()
        for name in [] if self.use_vllm else unknown_options(settings):
            if name not in (*FOLDED, *ENDS, *REFUSED):
                yield (
                    f"generation_kwargs: {name!r} is neither stop nor a field of GenerationConfig, and would have no "
                    "effect"
                )
        if self.cache_implementation is not None and self.cache_implementation not in ALL_CACHE_IMPLEMENTATIONS:
            near = did_you_mean(self.cache_implementation, ALL_CACHE_IMPLEMENTATIONS)
            known = ", ".join(ALL_CACHE_IMPLEMENTATIONS)
            yield f"cache_implementation={self.cache_implementation!r} is not one of {known}{near}"


@dataclass
class RolloutConfig(
    ImageArguments, RewardArguments, GenerationArguments, CurriculumArguments, SyncArguments, LanguageModelArguments
):
    """Arguments of `RolloutTrainer`."""

    OLD_NAMES: ClassVar[dict[str, Renamed | Removed]] = OLD_NAMES

    learning_rate: float = opt(
        1e-6, "Peak learning rate. Small models from scratch take a hundred times as much.", min=0
    )
    remove_unused_columns: bool = opt(False, "Drop all columns but the prompt; reward functions then cannot read them.")

    router_replay: bool = opt(
        False, "Train a mixture with the experts that it chose in sampling (Rollout Routing Replay, R3)."
    )
    disable_dropout: bool = opt(False, "Switch dropout off, so that a completion has one probability.")
    cast_lm_head_to_fp32: bool = opt(False, "Compute the output head in float32, for a model in half precision.")

    num_generations: Resolved[int | None, int] = opt(
        8, "Completions of each prompt: a group, compared with one another.", min=1
    )
    num_generations_eval: int | None = opt(
        None, "Completions of each prompt at evaluation; None: as in training.", min=1
    )
    eval_temperature: float | None = opt(None, "Temperature at evaluation; 0 is greedy; None: as in training.", min=0)
    pass_threshold: float = opt(1.0, "A completion passes if the first reward function gives at least this.")
    shuffle_dataset: bool | None = opt(True, "Shuffle the prompts in each pass.")
    long_prompts: str = opt(
        "error", "What becomes of prompts that leave no room for a completion.", choices=("error", "drop")
    )
    generation_batch_size: Resolved[int | None, int] = opt(
        None,
        "Completions sampled at once, over all processes; None: those of steps_per_generation micro-batches.",
        min=1,
    )
    steps_per_generation: Resolved[int | None, int] = opt(
        None,
        "Micro-batches made of one rollout; None: gradient_accumulation_steps. More generate in larger batches, "
        "and learn from older completions.",
        min=1,
    )
    num_iterations: int = opt(1, "Times that each rollout is gone through.", min=1)
    dynamic_sampling: bool = opt(
        False,
        "Leave out groups whose rewards are all equal and sample others in their place (DAPO, section 3.2). With "
        "turn_credit, a group whose turns were rewarded differently stays.",
    )
    dynamic_sampling_rounds: int = opt(
        4,
        "Rollouts sampled at most to fill one with groups that teach something; then it is filled with the rest.",
        min=1,
        needs="dynamic_sampling",
    )
    mask_truncated_completions: bool = opt(False, "Learn nothing from completions that were cut.")
    pad_to_multiple_of: Resolved[int | str | None, int | Literal["auto"] | None] = opt(
        "auto", "Pad batches to a multiple of this; auto: no such multiple.", min=1
    )
    share_prompts: bool | None = opt(
        None,
        "Train on a prompt's completions behind one copy of it. None: if the model supports it and it is faster.",
        flag=True,
    )

    max_staleness: int = opt(
        0,
        "Optimizer steps between the weights that sample a completion and the first that learns from its rollout. "
        "Above 0 the next rollouts are sampled and scored while the policy is trained; 0: sample and train in turn.",
        min=0,
    )
    sample_ahead: int | None = opt(
        None,
        "Optimizer steps by which sampling is ahead of training, at most; None: max_staleness. Below it, groups of "
        "trajectories that take longer are carried into later steps, which learn from those that have ended.",
        min=1,
        needs="max_staleness",
    )
    sample_ledger: bool | None = opt(
        None,
        "Write a line for each completion into samples-<rank>.jsonl in the output folder: prompt, weights, reward, and "
        "the step that learned from it. None: with max_staleness above 0.",
        flag=True,
    )
    vllm_importance_sampling_correction: bool = opt(
        True,
        "Weight completions by the ratio of the trainer's to the engine's probabilities.",
    )
    vllm_importance_sampling_mode: str = opt(
        "sequence_mask",
        "Weights per token or completion, truncated at the bounds or masked beyond them.",
        choices=IMPORTANCE_MODES,
        needs=CORRECTS,
    )
    vllm_importance_sampling_clip_max: float | None = opt(
        3.0,
        "Upper bound of these weights.",
        above=0,
        max=math.inf,
        aliases=("vllm_importance_sampling_cap",),
        needs=CORRECTS,
    )
    vllm_importance_sampling_clip_min: float | None = opt(None, "Lower bound of these weights.", min=0, needs=CORRECTS)

    beta: float = opt(0.0, "Weight of the KL divergence from the reference model. 0: no reference model at all.", min=0)
    epsilon: float = opt(0.2, "How far the ratio to the old policy may move before a token stops teaching.", min=0)
    epsilon_high: float | None = opt(
        None, "The same above 1; None: epsilon. DAPO takes 0.28, CISPO 5.", min=0, max=math.inf
    )
    log_completions: bool = opt(False, "Print some completions, and write all of them to files in the output folder.")
    log_multimodal: bool = opt(
        True, "Keep the images of prompts, in a column of files; off, they are left out.", needs="log_completions"
    )
    num_completions_to_print: int | None = opt(
        None, "How many are printed; None: all of a rollout.", min=0, needs="log_completions"
    )
    log_unique_prompts: bool = opt(False, "Print one completion of each prompt.", needs="log_completions")
    log_trajectories: int = opt(
        0,
        "Completions of each rollout, on each process, that are written token for token into trajectories-<rank>.jsonl "
        "in the output folder, for posttrain trajectories and the report.",
        min=0,
    )
    max_tool_calling_iterations: int | None = opt(None, "Maximum turns with tool calls; None: no limit.", min=0)
    max_tool_calling_seconds: float | None = opt(
        None, "Seconds after which a conversation calls no more tools, and ends; None: no limit.", above=0
    )
    rollout_process: bool = opt(
        False,
        "Run reward functions, tools, environments and agents in a process of their own, whose Python holds up neither "
        "training nor sampling.",
    )

    @property
    def micro_batch_completions(self) -> int:
        """Completions of a micro-batch on each process."""
        return self.per_device_train_batch_size

    def _normalize(self) -> None:
        rows = self.micro_batch_completions * self.data_parallel_size
        if self.steps_per_generation is None:
            whole = self.generation_batch_size is None or self.generation_batch_size % rows
            self.steps_per_generation = (
                self.gradient_accumulation_steps if whole else self.generation_batch_size // rows
            )
        if self.generation_batch_size is None:
            self.generation_batch_size = rows * self.steps_per_generation
        if self.top_k in (None, -1):  # as trl's default was, and as vLLM writes it
            self.top_k = 0

    def _problems(self) -> Iterator[str]:
        if self.max_batch_tokens is not None:
            yield (
                "max_batch_tokens makes batches of a dataset, and here the policy writes what is trained on; set "
                "per_device_train_batch_size instead"
            )
        if self.num_generations is None:
            yield "num_generations=None names no size of a group; set the completions of each prompt, such as 8"
        for name, value in set_among(self, "include_for_metrics", "batch_eval_metrics").items():
            yield (
                f"{name}={value!r} has no effect: evaluations sample and score completions, and no compute_metrics is "
                "called; leave it out"
            )
        b, s, world = self.micro_batch_completions, self.steps_per_generation, self.data_parallel_size
        apart = set_among(self, "use_vllm", "use_transformers_continuous_batching", "max_staleness")
        for name, value in apart.items():
            if world < self.world_size:
                yield (
                    f"{name}={value!r} samples apart from the model, and the processes that split a "
                    "matrix (tp_size) or a row (cp_size) must sample alike; leave it out, or set both sizes to 1 and "
                    "shard the model by fsdp"
                )
        if self.generation_batch_size != b * s * world:
            yield (
                f"generation_batch_size={self.generation_batch_size} must be per_device_train_batch_size * processes "
                f"* steps_per_generation = {b} * {world} * {s} = {b * s * world}; set one of the two and leave out "
                "the other"
            )
        elif self.num_generations and self.generation_batch_size % self.num_generations:
            group = self.num_generations
            yield (
                f"a rollout holds {self.generation_batch_size} completions (per_device_train_batch_size={b} * "
                f"{world} processes * steps_per_generation={s}), which num_generations={group} does not divide, so a "
                "group would be cut in two and its baseline would be wrong; set steps_per_generation to a multiple "
                f"of {group // math.gcd(group, b * world)}"
            )
        low, high = self.vllm_importance_sampling_clip_min, self.vllm_importance_sampling_clip_max
        if low is not None and high is not None and low >= high:
            yield f"vllm_importance_sampling_clip_min={low} must be below vllm_importance_sampling_clip_max={high}"
        if self.vllm_importance_sampling_mode.endswith("truncate") and low is None and high is None:
            yield (
                f"vllm_importance_sampling_mode={str(self.vllm_importance_sampling_mode)!r} needs one of the two bounds"
            )
        if self.max_staleness and self.use_vllm and self.vllm_mode == "colocate":
            yield (
                "max_staleness above 0 samples while the policy is trained, and vllm_mode='colocate' generates and "
                "trains in turn; set vllm_mode='server', or max_staleness=0"
            )
        if self.sample_ahead is not None and self.sample_ahead > self.max_staleness > 0:
            yield (
                f"sample_ahead={self.sample_ahead} samples further ahead than max_staleness={self.max_staleness} lets "
                "completions be old; set it to that or less"
            )
        if self.max_staleness and self.use_transformers_continuous_batching:
            yield (
                "max_staleness above 0 is not supported with use_transformers_continuous_batching=True; set one of "
                "the two back"
            )
        if self.router_replay and self.use_transformers_continuous_batching:
            yield (
                "router_replay=True needs the experts chosen in sampling, which transformers' continuous batching does "
                "not return; set use_transformers_continuous_batching=False"
            )
        if self.router_replay and self.torch_compile:
            yield "router_replay=True does not work with torch_compile=True; set one of them to False"
        if self.generation_batch_invariant and (self.router_replay or self.cache_implementation):
            other = "router_replay" if self.router_replay else "cache_implementation"
            yield f"generation_batch_invariant=True does not work with {other}; unset one of them"
        if isinstance(self.pad_to_multiple_of, str) and self.pad_to_multiple_of != "auto":
            yield f"pad_to_multiple_of={self.pad_to_multiple_of!r} must be a number, 'auto' or None"
        if self.label_smoothing_factor:
            yield "label_smoothing_factor has no effect: sampled completions have no labels; leave it 0"
        if self.train_sampling_strategy != "random":
            yield (
                f"train_sampling_strategy={str(self.train_sampling_strategy)!r} does not apply to prompts; set "
                "shuffle_dataset=False to keep their order"
            )
        if self.sync_ref_model and not self.beta:
            yield "sync_ref_model=True needs a reference model, and beta=0 uses none; set beta above 0"
        if self.dynamic_sampling and (self.num_generations or 0) < 2:
            yield "dynamic_sampling=True compares the completions of a prompt; set num_generations to 2 or more"
