"""What each trainer sends in an optimizer step, on each mesh and number of processes, as a memory plan counts it.

``python -m tests.core.cli.tools.communication_table`` writes the table again, to `PATH`.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

from transformers import LlamaConfig, Qwen3MoeConfig, T5Config

from posttrain.cli.tools import memory_mesh, memory_plan
from posttrain.core import registry
from posttrain.core.errors import ConfigError
from posttrain.lm.loading.arguments import ModelConfig

PATH = Path(__file__).with_suffix(".json")
LENGTH, ROWS = 512, 2
SIZES = (8, 64, 1024)
WIDTH = dict(hidden_size=1024, num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=8, vocab_size=32_768)
LAYERS, EXPERTS = WIDTH["num_hidden_layers"], 16
MODELS = {
    "dense": LlamaConfig(**WIDTH, intermediate_size=3072, tie_word_embeddings=False),
    "mixture": Qwen3MoeConfig(
        **WIDTH, head_dim=64, intermediate_size=3072, moe_intermediate_size=1024, num_experts=EXPERTS
    ),
    "encoder-decoder": T5Config(
        d_model=1024, d_ff=3072, num_layers=4, num_heads=16, d_kv=64, vocab_size=32_768, decoder_start_token_id=0
    ),
}
TRAINERS: dict[str, dict[str, Any]] = {
    "sft": {},
    "sft with LoRA": {"use_peft": True, "lora_r": 16, "lora_dropout": 0.0, "lora_target_modules": ["all-linear"]},
    "dpo": {},
    "kto": {},
    "orpo": {},
    "reward": {},
    "grpo": {"num_generations": 2, "share_prompts": False},
    "distillation": {},
    "seq2seq": {},
}
LENGTHS = {
    "grpo": {"max_completion_length": LENGTH},
    "distillation": {"max_completion_length": LENGTH},
    "seq2seq": {"max_source_length": LENGTH, "max_target_length": LENGTH},
}


def meshes(processes: int) -> dict[str, dict[str, Any]]:
    """The arguments of each mesh of so many processes, 8 of them on a machine."""
    sharded, replicas = {"fsdp": "full_shard"}, max(processes // 8, 2)
    return {
        "DDP": {},
        "FSDP": sharded,
        "HSDP": {
            "fsdp": "hybrid_shard",
            "parallelism_config": {"dp_replicate_size": replicas, "dp_shard_size": min(processes // 2, 8)},
        },
        "TP 8": sharded | {"parallelism_config": {"tp_size": 8}},
        "CP 8": sharded | {"parallelism_config": {"cp_size": 8}},
        "EP 8": {"parallelism_config": {"ep_size": 8}},
        "TP 2, HSDP": {
            "fsdp": "hybrid_shard",
            "parallelism_config": {
                "tp_size": 2,
                "dp_replicate_size": replicas,
                "dp_shard_size": min(processes // 4, 4),
            },
        },
    }


def measure(trainer: str, mesh: str, processes: int, folder: Path) -> memory_plan.Footprint:
    """What the plan says of one cell of the table, for a model of `MODELS` in `folder`."""
    method = registry.method(trainer.split()[0])
    kind = "encoder-decoder" if trainer == "seq2seq" else "mixture" if mesh.startswith("EP") else "dense"
    given = TRAINERS[trainer] | meshes(processes)[mesh] | LENGTHS.get(method.name, {"max_length": LENGTH})
    of_model = {name: given.pop(name) for name in list(given) if name in ModelConfig.__dataclass_fields__}
    more = {"output_dir": str(folder), "use_cpu": True, "report_to": "none", "per_device_train_batch_size": ROWS}
    with memory_mesh.imagined(processes):
        config = method.config_class(**(more | given))
        model = ModelConfig(model_name_or_path=str(folder / kind), **of_model)
        run = registry.Run(config, model, None)
        assert method.workload is not None
        return memory_plan.measure(run, method.workload(run, None))


def cell(trainer: str, mesh: str, processes: int, folder: Path) -> Any:
    """The calls and bytes of each kind of collective in an optimizer step; or why there is none, as a text."""
    try:
        plan = measure(trainer, mesh, processes, folder)
    except (ConfigError, ValueError) as error:
        return str(error).replace(str(folder), "MODEL")
    found: dict[str, list[int]] = {}
    for one in plan.exchanges:
        place = "inside" if one.is_inside(8) else "between"
        found[f"{one.kind} of {len(one.ranks)} {place}"] = [round(one.calls), round(one.size)]
    return found


def save_models(folder: Path) -> None:
    for kind, config in MODELS.items():
        config.save_pretrained(folder / kind)


def digest(table: dict[str, Any]) -> str:
    """Of all cells: a quick run of the tests measures one of 40 of them again."""
    cells = {trainer: table[trainer] for trainer in TRAINERS}
    return hashlib.sha256(json.dumps(cells, sort_keys=True).encode()).hexdigest()


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_models(folder)
        table = {
            trainer: {
                mesh: {str(size): cell(trainer, mesh, size, folder) for size in SIZES} for mesh in meshes(SIZES[0])
            }
            for trainer in TRAINERS
        }
    PATH.write_text(json.dumps(table | {"digest": digest(table)}, indent=1) + "\n")


if __name__ == "__main__":
    main()
