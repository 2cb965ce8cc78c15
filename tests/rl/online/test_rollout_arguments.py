"""What each argument of online training changes, where no other test shows it."""

import inspect
import json
from types import SimpleNamespace

import pytest
import torch

from posttrain.core.errors import ConfigError
from posttrain.rl import GRPOConfig, GRPOTrainer, RLOOTrainer
from posttrain.rl.cli import of_rollouts
from posttrain.rl.generation.block import Block
from posttrain.rl.generation.engines import make_generator
from posttrain.rl.generation.transformers import TransformersGenerator
from posttrain.rl.generation.vllm import VLLMServerGenerator
from posttrain.rl.generation.vllm_colocated import VLLMColocatedGenerator
from posttrain.rl.generation.weights import Weights
from posttrain.rl.online import reporting as told
from tests import tiny
from tests.rl.algorithms.test_grpo import ROWS, Scripted, config, logged, spread, trainer

CHATS = [{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in ROWS]


def first_rollout(run):
    return run.make_rollout(iter(run.get_train_dataloader()))


@pytest.mark.parametrize("kind", [GRPOTrainer, RLOOTrainer])
def test_the_routers_of_a_mixture_of_experts_are_balanced(kind, tmp_path):
    runs = [
        trainer(
            tmp_path / str(coef),
            kind,
            model=tiny.mixture_of_experts(),
            router_aux_loss_coef=coef,
            max_steps=1,
            beta=0.0,
        )
        for coef in (0.0, 0.5)
    ]
    for run in runs:
        run.train()
    (plain,), (balanced,) = (logged(run, "loss") for run in runs)
    (aux,) = logged(runs[1], "aux_loss")
    assert not logged(runs[0], "aux_loss") and aux > 0.5
    assert balanced - plain == pytest.approx(0.5 * aux, abs=1e-5)
    assert trainer(tmp_path, kind, model=tiny.mixture_of_experts()).router_aux_loss_coef == 0.001  # as its config says
    with pytest.raises(ValueError, match="no mixture of experts"):
        trainer(tmp_path, kind, router_aux_loss_coef=0.1)


def test_dropout_can_be_switched_off(tmp_path):
    model = tiny.causal_lm("gpt2", resid_pdrop=0.5, embd_pdrop=0.5, initializer_range=0.2)
    run = trainer(tmp_path, model=model, disable_dropout=True, max_steps=1)
    run.train()
    assert all(module.p == 0 for module in model.modules() if isinstance(module, torch.nn.Dropout))
    assert logged(run, "sampling/sampling_logp_difference/mean") == []


@pytest.mark.parametrize("everything", [None, -1])
def test_all_tokens_are_sampled_among_where_trl_and_vllm_say_so(everything, tmp_path):
    assert config(output_dir=str(tmp_path), top_k=everything).top_k == 0


def test_the_chat_template_is_given_its_variables(tmp_path):
    tokenizer = tiny.tokenizer(chat_template=tiny.CHATML + "{% if slowly %}Let us think.{% endif %}")
    ids = {}
    for slowly in (False, True):
        args = config(output_dir=str(tmp_path), chat_template_kwargs={"slowly": slowly})
        run = GRPOTrainer(tiny.causal_lm(), spread, args, CHATS, None, tokenizer)
        ids[slowly] = run.new_samples(CHATS[:1])[0].prompt_ids
    assert tokenizer.decode(ids[True]) == tokenizer.decode(ids[False]) + "Let us think."


def test_rows_are_padded_to_a_multiple(tmp_path, caplog):
    widths = {}
    for multiple in (None, "auto", 16):
        run = trainer(tmp_path, pad_to_multiple_of=multiple, share_prompts=False)
        widths[multiple] = run.rollout_maker.parts_of(first_rollout(run))[0]["input_ids"].shape[1]
    assert widths[16] == 16 and widths[None] == widths["auto"] < 16
    assert "pad_to_multiple_of" not in caplog.text
    trainer(tmp_path, pad_to_multiple_of=16, share_prompts=True)
    assert "pad_to_multiple_of=16 has no effect" in caplog.text and "share_prompts=False" in caplog.text


def test_a_cache_of_transformers_writes_the_same(tmp_path):
    runs = [trainer(tmp_path, cache_implementation=name) for name in (None, "static")]
    assert [run.generation_config.cache_implementation for run in runs] == [None, "static"]
    assert isinstance(runs[1].generator, TransformersGenerator)
    rollouts = [first_rollout(run) for run in runs]
    assert torch.equal(rollouts[0].completion_ids, rollouts[1].completion_ids)


def test_a_model_is_loaded_by_name_with_its_arguments(tmp_path):
    tiny.causal_lm().save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    args = config(output_dir=str(tmp_path), model_init_kwargs={"dtype": "bfloat16"})
    run = GRPOTrainer(str(tmp_path / "model"), spread, args, ROWS)
    assert next(run.model.parameters()).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="model_init_kwargs"):
        GRPOTrainer(tiny.causal_lm(), spread, args, ROWS, None, tiny.tokenizer())


def test_the_head_of_a_model_in_half_precision_can_be_exact(tmp_path):
    model = tiny.causal_lm(initializer_range=0.3).bfloat16()
    run = trainer(tmp_path, model=model, cast_lm_head_to_fp32=True)
    part = run.rollout_maker.parts_of(first_rollout(run))[0]
    found = run.logps(model, part, with_entropy=False, training=False).logps
    assert model.lm_head.weight.dtype == torch.float32 and found.dtype == torch.float32
    hidden = model.model(input_ids=part["input_ids"], **{k: part[k] for k in ("position_ids", "segments") if k in part})
    exact = (hidden.last_hidden_state.float() @ model.lm_head.weight.t()).log_softmax(-1)
    labels = part["labels"].clamp(min=0).unsqueeze(-1)
    exact = exact.gather(-1, labels).reshape(-1)[part["places"]] * part["loss_mask"]
    torch.testing.assert_close(found, exact, atol=1e-5, rtol=0)


@pytest.mark.parametrize("arch", ["gemma2", "qwen3"])
def test_a_head_that_is_the_embedding_too_can_be_exact(arch, tmp_path):
    model = tiny.causal_lm(arch, initializer_range=0.3, tie_word_embeddings=True).bfloat16()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    run = trainer(tmp_path, model=model, cast_lm_head_to_fp32=True, max_steps=2, learning_rate=1e-2)
    run.train()
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert (
        model.lm_head.weight.dtype == torch.float32 and model.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
    )
    assert not torch.equal(model.lm_head.weight, before["model.embed_tokens.weight"].float())
    ids = torch.tensor([[5, 6, 7]])
    hidden, logits = model.model(ids).last_hidden_state, model(ids).logits
    assert hidden.dtype == torch.bfloat16 and logits.dtype == torch.float32
    exact = hidden.float() @ model.lm_head.weight.t()
    cap = getattr(model.config, "final_logit_softcapping", None)
    torch.testing.assert_close(logits, cap * torch.tanh(exact / cap) if cap else exact, rtol=0, atol=1e-4)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_what_the_policy_writes_itself_is_neither_scored_again_nor_weighted(precision, tmp_path, monkeypatch):
    model = tiny.causal_lm(initializer_range=0.3).to(getattr(torch, precision))
    run = trainer(tmp_path, model=model, max_steps=2, steps_per_generation=1, num_iterations=1)
    passes = []
    monkeypatch.setattr(run.rollout_maker, "logps_of", lambda *args, **kwargs: passes.append(1))
    run.train()
    assert passes == [] and all(grad > 0 for grad in logged(run, "grad_norm"))
    assert logged(run, "sampling/importance_sampling_ratio/mean") == []


@pytest.mark.parametrize(("threshold", "passes"), [(0.5, 1.0), (0.9, 0.0)])
def test_what_passes_is_a_matter_of_the_first_reward(threshold, passes, tmp_path):
    run = trainer(
        tmp_path,
        reward=[lambda completions: [0.7] * len(completions), spread],
        eval_rows=ROWS[:2],
        pass_threshold=threshold,
    )
    metrics = run.evaluate()
    assert metrics["eval_pass@1"] == metrics["eval_pass@4"] == passes


def test_one_completion_of_each_prompt_can_be_shown(tmp_path, capsys):
    run = trainer(tmp_path, log_completions=True, log_unique_prompts=True, steps_per_generation=2, max_steps=2)
    run.train()
    lines = capsys.readouterr().out.partition("Step 0\n")[2].splitlines()
    assert "prompt" in lines[0] and [line[:4].strip() for line in lines[2:4]] == ["0", "0"]
    assert (
        len([line for line in lines[2:] if line[:4].strip() == "0"]) == 2
    )  # of two prompts with four completions each


@pytest.mark.parametrize("keeps", [True, False])
def test_images_can_be_left_out_of_written_prompts(keeps, tmp_path):
    content = [{"type": "image", "image": "a cat"}, {"type": "text", "text": "What is it?"}]
    row = {"step": 0, "prompt": [{"role": "user", "content": content}], "completion": "A cat.", "spread": 1.0}
    from datasets import Dataset

    path = told.write([row], tmp_path / "rows", with_images=keeps)
    written = json.loads(Dataset.from_parquet(str(path))[0]["prompt"])
    assert written[0]["content"] == (content if keeps else content[1:])


@pytest.mark.parametrize(("target", "bound"), [(100.0, "max"), (0.0, "min")])
def test_the_entropy_coefficient_stays_in_its_bounds(target, bound, tmp_path):
    limits = {"entropy_coef_min": 0.098, "entropy_coef_max": 0.102}
    run = trainer(
        tmp_path, use_adaptive_entropy=True, entropy_coef=0.1, entropy_target=target, entropy_coef_delta=0.0015,
        max_steps=3, **limits,
    )  # fmt: skip
    run.train()
    first, second, third = logged(run, "entropy_coef")
    assert abs(first - 0.1) == pytest.approx(0.0015, rel=1e-4)
    assert second == third == pytest.approx(limits[f"entropy_coef_{bound}"])
    with pytest.raises(ConfigError, match="entropy_coef_min=0.5 must not be above"):
        config(entropy_coef_min=0.5, entropy_coef_max=0.4)


class Estranged(Scripted):
    """An engine that finds its completions much likelier than the trainer does."""

    def generate(self, *args):
        from posttrain.rl.generation import Completions

        done = super().generate(*args)
        return Completions(done.ids, [[-1.0] * len(ids) for ids in done.ids], done.finished)


@pytest.mark.parametrize(("changes", "is_corrected", "moves"), [
    ({"vllm_importance_sampling_correction": False}, False, True),
    ({"vllm_importance_sampling_clip_min": 0.5}, True, False),  # each ratio is far below, and left out
    ({"vllm_importance_sampling_clip_min": 1e-12, "vllm_importance_sampling_clip_max": None}, True, True),
])  # fmt: skip
def test_completions_of_an_engine_are_weighted_as_is_asked_for(changes, is_corrected, moves, tmp_path):
    run = trainer(tmp_path, options={"generator": Estranged("ab", "b", "c", "d")}, max_steps=1, **changes)
    run.train()
    ratios = logged(run, "sampling/importance_sampling_ratio/max")
    assert bool(ratios) == is_corrected and (logged(run, "grad_norm")[0] > 0) == moves
    if is_corrected:
        low, high = logged(run, "sampling/importance_sampling_ratio/min")[0], ratios[0]
        assert (low == high == 0) if not moves else 0 < low < high < 0.5


@pytest.mark.parametrize("alpha", [0.25, 1.0])
def test_the_reference_moves_by_its_share(alpha, tmp_path):
    run = trainer(
        tmp_path, beta=0.1, sync_ref_model=True, ref_model_mixup_alpha=alpha, ref_model_sync_steps=2, max_steps=2
    )
    before = run.model.lm_head.weight.detach().clone()
    run.train()
    after, reference = run.model.lm_head.weight, run.ref_model.lm_head.weight
    assert not torch.equal(before, after)
    torch.testing.assert_close(reference, alpha * after + (1 - alpha) * before)


@pytest.mark.parametrize("bound", ["turns", "seconds"])
def test_turns_with_tools_are_bounded_by_the_argument(bound, tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("posttrain.rl.agents.environments.time", SimpleNamespace(monotonic=lambda: clock[0]))

    def calculator(expression: str) -> str:
        """Compute.

        Args:
            expression: What.
        """
        clock[0] += 1
        return "7"

    limit = {"turns": {"max_tool_calling_iterations": 1}, "seconds": {"max_tool_calling_seconds": 0.5}}[bound]
    asks = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "3+4"}}\n</tool_call>'
    engine = Scripted(asks, asks, asks, asks)
    run = trainer(
        tmp_path, rows=CHATS, options={"generator": engine, "tools": [calculator]}, max_completion_length=400,
        max_steps=1, **limit,
    )  # fmt: skip
    run.train()
    assert len(engine.calls) == 2
    for why in ("turns", "tokens", "seconds"):
        assert logged(run, f"tools/cut/{why}") == [float(why == bound)]


def test_tools_can_be_set_between_two_rollouts(tmp_path):
    def find(where: str):
        """Find it.

        Args:
            where: A place.
        """

    def count(number: int):
        """Count up to it.

        Args:
            number: The last one.
        """

    def described(run):
        [row, *_] = first_rollout(run).prompt_ids.tolist()
        text = run.codec.tokenizer.decode(row)
        return [tool.__name__ for tool in (find, count) if f'"{tool.__name__}"' in text]

    run = trainer(tmp_path, rows=CHATS, options={"tools": [find]})
    assert described(run) == ["find"]
    run.tools = [count]
    assert described(run) == ["count"] and run.tools == [count]
    run.tools = None
    assert described(run) == [] and run.tools == []
    plain = trainer(tmp_path, rows=CHATS)
    with pytest.raises(ValueError, match="Tools cannot be used with this chat template"):
        plain.tools = [find]
    assert plain.tools == []


def test_workers_that_read_a_stream_leave_its_groups_whole(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": f"the {word}", "number": i} for i, word in enumerate(" ".join(tiny.CORPUS).split()[:16])]
    stream = datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=2)
    run = trainer(tmp_path, rows=stream, dataloader_num_workers=2, shuffle_dataset=False, steps_per_generation=2)
    batches = [[row["number"] for row in batch] for batch in run.get_train_dataloader()]
    assert all(batch == [batch[0]] * 4 + [batch[4]] * 4 for batch in batches)
    assert sorted({number for batch in batches for number in batch}) == list(range(16))


def test_the_policy_loss_in_the_log_is_that_of_the_update(tmp_path):
    found = []
    for batch, parts in ((8, 1), (4, 2)):
        run = trainer(
            tmp_path / str(batch), entropy_coef=0.1, per_device_train_batch_size=batch,
            gradient_accumulation_steps=parts, max_steps=2, share_prompts=True,
        )  # fmt: skip
        run.train()
        found.append(logged(run, "policy_loss"))
    assert found[0] == pytest.approx(found[1], abs=1e-6) and abs(found[0][1]) > 1e-4


def test_completions_of_an_evaluation_are_shown_and_written_too(tmp_path, capsys):
    from datasets import Dataset

    run = trainer(
        tmp_path, log_completions=True, eval_rows=ROWS[:3], num_generations_eval=2, per_device_eval_batch_size=2
    )
    run.evaluate()
    assert "Evaluation at step 0\n" in capsys.readouterr().out
    written = Dataset.from_parquet(str(tmp_path / "completions" / "eval_completions_00000.parquet"))
    assert written["prompt"] == [row["prompt"] for row in ROWS[:3] for _ in range(2)]


def test_completions_are_a_table_of_trackers(tmp_path, monkeypatch):
    import sys
    import types
    from contextvars import ContextVar

    tables, current_run = {}, ContextVar("current_run", default=None)
    wandb, trackio = types.ModuleType("wandb"), types.ModuleType("trackio")
    wandb.run, wandb.Table = None, lambda columns, data: (columns, data)
    wandb.Image = trackio.Image = lambda image: f"image {image}"
    trackio.Table = lambda dataframe: (list(dataframe.columns), dataframe.to_numpy().tolist())
    trackio.context_vars = types.SimpleNamespace(current_run=current_run)
    wandb.log, trackio.log = tables.update, lambda logged: tables.update({"trackio": logged["completions"]})
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    row = {
        "step": 3,
        "images": [1, 2],
        "prompt": [{"role": "user", "content": "Hi"}],
        "completion": "Yes",
        "spread": 0.5,
        "advantage": -1.0,
    }
    told.track([row], "completions", ["all"])
    assert tables == {}  # no run is under way
    wandb.run = object()
    current_run.set(object())
    told.track([row], "completions", ["wandb", "trackio"])
    expected = [list(row), [[3, ["image 1", "image 2"], "[user] Hi", "Yes", 0.5, -1.0]]]
    assert list(tables["completions"]) == list(tables["trackio"]) == expected


def test_a_quantized_policy_trains_its_adapter(tmp_path):
    pytest.importorskip("bitsandbytes")
    from peft import LoraConfig
    from transformers import BitsAndBytesConfig

    tiny.causal_lm(initializer_range=0.2, hidden_size=64).save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    run = GRPOTrainer(
        str(tmp_path / "model"), spread, config(output_dir=str(tmp_path / "out"), beta=0.1), ROWS,
        quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32),
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
    )  # fmt: skip
    before = {name: weight.detach().clone() for name, weight in run.model.named_parameters()}
    run.train()
    moved = {name for name, weight in run.model.named_parameters() if not torch.equal(weight, before[name])}
    assert moved and all("lora_" in name for name in moved)
    assert logged(run, "sampling/sampling_logp_difference/max") == []  # the engine reads the same weights
    with pytest.raises(ValueError, match="is quantized"):
        list(Weights(run.model))


def test_environments_may_bring_the_prompts(tmp_path):
    class Counter:
        def reset(self):
            return "Count to two."

        def get_reward(self):
            return 1.0

    with pytest.raises(ValueError, match="set max_steps"):
        trainer(tmp_path, rows=None, reward=None, options={"environment_factory": Counter}, max_steps=-1)
    run = trainer(tmp_path, rows=None, reward=None, options={"environment_factory": Counter}, max_steps=2)
    run.train()
    assert run.state.global_step == 2 and logged(run, "reward") == [1.0, 1.0]
    prompt = run.codec.encode([{"role": "user", "content": "Count to two."}])
    [row, *_] = run.make_rollout(iter(run.get_train_dataloader())).prompt_ids.tolist()
    assert row == prompt


def test_the_constructor_names_its_arguments():
    names = list(inspect.signature(GRPOTrainer).parameters)
    assert names[:4] == ["model", "reward_funcs", "args", "train_dataset"] and "environment_factory" in names


def test_every_argument_of_a_vllm_in_this_process_reaches_it():
    args = GRPOConfig(
        output_dir="out", use_vllm=True, vllm_gpu_memory_utilization=0.45, vllm_max_model_length=777,
        vllm_model_impl="auto", vllm_enable_sleep_mode=True, vllm_structured_outputs_regex="[ab]+",
        trust_remote_code=True, bf16=True, use_cpu=True, generation_kwargs={"presence_penalty": 0.5, "stop": ["x"]},
    )  # fmt: skip
    engine = make_generator(None, args)
    assert isinstance(engine, VLLMColocatedGenerator) and engine.sleeps and engine.group_size == 1
    assert engine.engine == {
        "gpu_memory_utilization": 0.45, "max_model_len": 777, "model_impl": "auto", "trust_remote_code": True,
        "dtype": "bfloat16",
    }  # fmt: skip
    assert engine.options == {"presence_penalty": 0.5, "structured_outputs": {"regex": "[ab]+"}}
    with pytest.raises(ValueError, match="vllm_tensor_parallel_size=2 does not divide the 1 processes"):
        make_generator(None, GRPOConfig(output_dir="out", use_vllm=True, vllm_tensor_parallel_size=2, use_cpu=True))


def test_every_argument_of_a_vllm_server_reaches_its_client():
    usual = {"output_dir": "out", "use_vllm": True, "vllm_mode": "server", "use_cpu": True}
    args = GRPOConfig(
        **usual, vllm_server_host="10.0.0.7", vllm_server_port=8123, vllm_server_timeout=7.5, vllm_group_port=51234,
        vllm_weight_folder="/shared", vllm_request_timeout=33.0,
    )  # fmt: skip
    client = make_generator(None, args)
    assert isinstance(client, VLLMServerGenerator)
    (server,) = client.servers
    assert (server.url, client.timeout, client.group_port) == ("http://10.0.0.7:8123", 7.5, 51234)
    assert (server.timeout, client.folder) == (33.0, "/shared")
    named = GRPOConfig(**usual, vllm_server_base_url="https://there:1/, http://here:2", vllm_server_host="10.0.0.7")
    assert [server.url for server in make_generator(None, named).servers] == ["https://there:1", "http://here:2"]


def test_the_local_engine_writes_as_many_completions_at_once_as_is_set():
    args = GRPOConfig(output_dir="out", generation_max_rows=3, use_cpu=True)
    assert make_generator(None, args).max_rows == 3
    assert make_generator(None, GRPOConfig(output_dir="out", use_cpu=True)).max_rows == 256
    with pytest.raises(ValueError, match="generation_max_rows"):
        GRPOConfig(output_dir="out", generation_max_rows=0, use_cpu=True)


def test_the_cache_of_the_local_engine_is_bounded_in_tokens():
    args = GRPOConfig(output_dir="out", generation_cache_tokens=5000, use_cpu=True)
    assert make_generator(None, args).max_tokens == 5000
    assert make_generator(None, GRPOConfig(output_dir="out", use_cpu=True)).max_tokens is None
    with pytest.raises(ValueError, match="generation_cache_tokens"):
        GRPOConfig(output_dir="out", generation_cache_tokens=0, use_cpu=True)


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ({}, 4),
        ({"generation_max_rows": 17}, 2),
        ({"generation_cache_tokens": 3 * (200 + 8 * 50)}, 3),
        ({"generation_cache_tokens": 10}, 1),
    ],
    ids=str,
)
def test_the_plan_counts_a_prompt_once_for_all_its_completions(given, prompts):
    usual = dict(output_dir="out", use_cpu=True, per_device_train_batch_size=8, steps_per_generation=4)
    args = GRPOConfig(**usual, num_generations=8, max_completion_length=50, share_prompts=False, **given)
    planned = of_rollouts(SimpleNamespace(config=args), 250).generated
    assert planned == Block([200] * prompts, 8, torch.device("cpu"), max_new=50).reserved == prompts * (200 + 8 * 50)


@pytest.mark.parametrize(
    ("given", "planned"),
    [
        ({"use_vllm": True}, 0),
        ({"generation_kwargs": {"stop": "a"}}, 4 * (200 + 8 * 50)),
        ({"generation_kwargs": {"temperature": 0.9}}, 4 * (200 + 8 * 50)),
        ({"generation_kwargs": {"min_length": 9}}, 32 * 250),
        ({"cache_implementation": "static"}, 32 * 250),
        ({"use_transformers_continuous_batching": True}, 32 * 250),
    ],
    ids=str,
)
def test_the_plan_counts_the_cache_of_the_engine_that_is_used(given, planned):
    usual = dict(output_dir="out", use_cpu=True, per_device_train_batch_size=8, steps_per_generation=4)
    args = GRPOConfig(**usual, num_generations=8, max_completion_length=50, share_prompts=False, **given)
    assert of_rollouts(SimpleNamespace(config=args), 250).generated == planned
