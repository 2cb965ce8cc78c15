"""Generation of our own: the tokens of `generate`, the model's log-probabilities, and rows that leave and are
replaced.
"""

import functools

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from posttrain.lm.images.image_positions import SeenPrompt
from posttrain.lm.loading.loading import obey_softcap
from posttrain.lm.loss import lm_head
from posttrain.rl import GRPOConfig, GRPOTrainer
from posttrain.rl.generation import Sampling, local, local_steps
from posttrain.rl.generation.decoding import DecoderStep, Decoding, decoding_attention
from posttrain.rl.generation.local import LocalGenerator, problem
from posttrain.rl.generation.transformers import TransformersGenerator
from tests import tiny

SIZE = dict(vocab_size=384, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
SIZE |= dict(num_key_value_heads=2, head_dim=8, max_position_embeddings=512, pad_token_id=0, eos_token_id=1)
SIZE |= dict(bos_token_id=None, tie_word_embeddings=False, initializer_range=0.3)
SLIDING = dict(sliding_window=6, layer_types=["sliding_attention", "full_attention"])
GPT2 = dict(vocab_size=384, n_embd=32, n_layer=2, n_head=4, n_positions=512, pad_token_id=0, eos_token_id=1)
GPT2 |= dict(bos_token_id=None, initializer_range=0.3)
MODELS = {
    "llama": ("LlamaConfig", SIZE),
    "qwen3": ("Qwen3Config", SIZE),
    "mistral": ("MistralConfig", SIZE | dict(sliding_window=6)),
    "gemma2": ("Gemma2Config", SIZE | SLIDING),
    "gemma3": ("Gemma3TextConfig", SIZE | SLIDING),
    "gpt2": ("GPT2Config", GPT2),
    "gpt-oss": ("GptOssConfig", SIZE | SLIDING | dict(num_local_experts=4, num_experts_per_tok=2)),
    "mixtral": ("MixtralConfig", SIZE | dict(num_local_experts=4, num_experts_per_tok=2)),
    "phi3": ("Phi3Config", SIZE | dict(sliding_window=6)),
}
PROMPTS = [
    [5, 9, 14],
    [40, 41, 42, 43, 44, 45, 46, 47, 48, 49],
    [7],
    [8, 9, 10, 11, 12, 13, 14, 15, 16],
    [60, 61, 62, 63],
]


def make(arch="qwen3", max_rows=256, **overrides):
    name, size = MODELS[arch]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**(size | overrides)))
    obey_softcap(model)
    made = LocalGenerator(tiny.tokenizer(), max_rows)
    made.sync_weights(model.eval())
    return made, model


def teacher_forced(model, prompt, ids, temperature):
    logps = (model(torch.tensor([prompt + ids])).logits[0].float() / temperature).log_softmax(-1)
    return [logps[len(prompt) - 1 + place, token].item() for place, token in enumerate(ids)]


@pytest.fixture
def packed(monkeypatch):
    """Weights are packed as those of a large model are; notes their outputs."""
    monkeypatch.setattr(lm_head, "PACKED_FROM", 0)
    calls, pack = [], torch.ops.mkldnn._reorder_linear_weight
    monkeypatch.setattr(
        torch.ops.mkldnn, "_reorder_linear_weight", lambda weight: calls.append(len(weight)) or pack(weight)
    )
    return calls


@pytest.mark.parametrize("arch", MODELS)
def test_a_packed_head_gives_the_same(arch, packed):
    test_greedy_is_token_for_token_what_generate_gives(arch, 256)
    test_log_probabilities_are_those_of_the_whole_text(arch)
    assert packed.count(SIZE["vocab_size"]) == 2 and (len(packed) > 2) == (DecoderStep.of(make(arch)[1]) is not None)


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_packed_projections_give_the_same(arch, packed):
    _made, model = make(arch, attention_bias=True)
    trial = local._Trial.of(model)
    for name, bias in model.named_parameters():
        torch.nn.init.normal_(bias) if name.endswith("bias") else None
    with torch.no_grad(), decoding_attention(model):
        ways = [local._written(model, trial, torch.device("cpu"), way) for way in (None, DecoderStep.of(model))]
    assert packed == [64, 32, 128, 32] * 2 and local._gap(*ways) < 1e-5


def test_a_head_is_packed_anew_after_its_weight_changed(packed):
    made, model = make()
    before = made.generate(PROMPTS, 1, Sampling(6, temperature=0)).ids
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.flip(0))
    after = made.generate(PROMPTS, 1, Sampling(6, temperature=0)).ids
    assert [row[0] for row in after] == [SIZE["vocab_size"] - 1 - row[0] for row in before]
    assert "forward" not in vars(model.lm_head)


def test_a_head_is_packed_only_where_its_products_are_in_float32(packed):
    made, model = make()
    model.bfloat16()
    made.generate(PROMPTS, 2, Sampling(6), seeds=range(10))
    with torch.autocast("cpu", torch.bfloat16):
        make()[0].generate(PROMPTS, 2, Sampling(6), seeds=range(10))
    assert packed == []


@pytest.mark.parametrize("max_rows", [256, 4])
@pytest.mark.parametrize("arch", MODELS)
def test_greedy_is_token_for_token_what_generate_gives(arch, max_rows):
    made, model = make(arch, max_rows)
    assert problem(model) is None
    done = made.generate(PROMPTS, 2, Sampling(14, temperature=0, eos_token_ids=(1,)))
    for number, prompt in enumerate(PROMPTS):
        expected = model.generate(
            torch.tensor([prompt]), max_new_tokens=14, do_sample=False, eos_token_id=1, pad_token_id=0
        )[0, len(prompt) :].tolist()
        assert done.ids[2 * number] == done.ids[2 * number + 1] == expected


@pytest.mark.parametrize("arch", MODELS)
def test_log_probabilities_are_those_of_the_whole_text(arch):
    made, model = make(arch)
    done = made.generate(PROMPTS, 3, Sampling(14, temperature=0.7, eos_token_ids=tuple(range(40))), seeds=range(15))
    assert done.is_exact and len({len(ids) for ids in done.ids}) > 3
    for i, (ids, logps) in enumerate(zip(done.ids, done.logps, strict=True)):
        assert logps == pytest.approx(teacher_forced(model, PROMPTS[i // 3], ids, 0.7), abs=1e-5)


@pytest.mark.parametrize("is_fixed", [False, True], ids=["CPU", "as on a GPU"])
def test_tokens_are_as_frequent_as_the_model_finds_them_probable(is_fixed, monkeypatch):
    """Pearson's chi-squared of the third token: how often it was the first, the second, ... most probable one."""
    monkeypatch.setattr(local_steps, "Decoding", functools.partial(Decoding, is_fixed=is_fixed))
    made, model = make()
    prompts, n = [PROMPTS[1], PROMPTS[3]], 300
    ids = torch.tensor(made.generate(prompts, n, Sampling(3, temperature=0.8), seeds=range(2 * n)).ids)
    with torch.no_grad():
        logits = [model(torch.cat([torch.tensor([prompt] * n), rows[:, :2]], 1)).logits[:, -1]
                  for prompt, rows in zip(prompts, ids.split(n), strict=True)]  # fmt: skip
    sizes = [1, 1, 2, 4, 8, 16, 32, 320]  # tokens of each class, the most probable ones first

    def chi_squared(temperature):
        ordered, order = (torch.cat(logits).double() / temperature).softmax(-1).sort(dim=-1, descending=True)
        expected = torch.stack([part.sum() for part in ordered.split(sizes, 1)])
        drawn = torch.stack([part.sum() for part in (order == ids[:, 2:]).split(sizes, 1)])
        return float(((drawn - expected) ** 2 / expected).sum())

    assert chi_squared(0.8) < 24.3 < chi_squared(1.0)  # one in a thousand exceeds 24.3 at 7 degrees of freedom


def test_a_completion_is_that_of_its_seed_whatever_is_written_beside_it():
    sampling = Sampling(12, eos_token_ids=tuple(range(60)))
    together = make()[0].generate(PROMPTS, 2, sampling, seeds=range(10))
    in_turns = make(max_rows=3)[0].generate(PROMPTS, 2, sampling, seeds=range(10))
    alone = make()[0].generate([PROMPTS[1]], 1, sampling, seeds=[3])
    assert together.ids == in_turns.ids and together.finished == in_turns.finished and alone.ids[0] == together.ids[3]
    assert together.ids[0] != together.ids[1]


@pytest.mark.rotated(one_in=4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("arch", ["qwen3", "gemma2", "gpt2", "gpt-oss", "mixtral"])
def test_a_completion_is_written_as_it_is_alone_to_the_bit_where_that_is_asked(arch, dtype):
    """Rows that end at other times, more of them than are read at a time, or than are written at once."""
    model = make(arch, vocab_size=383)[1].to(dtype)
    sampling = Sampling(70, temperature=1.3, eos_token_ids=tuple(range(20)))
    prompts = [[(7 * i + 3 * j) % 383 for j in range(1 + 9 * i)] for i in range(6)]

    def written(prompts, n, seeds, max_rows=256):
        made = LocalGenerator(tiny.tokenizer(), max_rows, batch_invariant=True)
        made.sync_weights(model)
        done = made.generate(prompts, n, sampling, seeds=seeds)
        return [*zip(done.ids, done.logps, strict=True)]

    together = written(prompts, 3, range(18))
    assert together == [one for i in range(18) for one in written([prompts[i // 3]], 1, [i])]
    assert together == written(prompts, 3, range(18), max_rows=4)


def test_what_is_not_written_here_is_not_called_batch_invariant(monkeypatch):
    made = LocalGenerator(tiny.tokenizer(), batch_invariant=True)
    made.sync_weights(make()[1])
    monkeypatch.setattr(local, "problem", lambda model, example: "it is another kind.")
    with pytest.raises(ValueError, match="batch_invariant=True needs the local engine, .*: it is another kind. Set"):
        made.generate(PROMPTS, 1, Sampling(4))


@pytest.mark.parametrize("settings", [
    {"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.2}, {"repetition_penalty": 1.7}, {"stop": ("e", "a", "o")},
    {"temperature": 0.5, "eos_token_ids": tuple(range(30))}, {"temperature": 0, "repetition_penalty": 1.7},
], ids=str)  # fmt: skip
def test_both_engines_write_the_same(settings):
    made, model = make()
    other = TransformersGenerator(tiny.tokenizer())
    other.sync_weights(model)
    mine, theirs = (engine.generate(PROMPTS, 2, Sampling(12, **settings), seeds=range(10)) for engine in (made, other))
    assert mine.ids == theirs.ids and mine.finished == theirs.finished
    for a, b in zip(mine.logps, theirs.logps, strict=True):
        assert a == pytest.approx(b, abs=1e-5)


def test_a_prompt_is_read_once_and_finished_rows_are_not_computed():
    made, model = make()
    problem(model)
    shapes = []
    model.register_forward_pre_hook(
        lambda m, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    done = made.generate([PROMPTS[1]], 6, Sampling(20, eos_token_ids=tuple(range(60))), seeds=range(6))
    assert shapes[0] == (1, len(PROMPTS[1]))
    going = [sum(len(ids) > step for ids in done.ids) for step in range(1, 20)]
    assert [rows for rows, _ in shapes[1:]] == [count for count in going if count] and going[0] > going[3]


def test_places_that_become_free_are_filled_with_the_next_prompts():
    sampling, n, rows = Sampling(40, eos_token_ids=tuple(range(40))), 2, 8
    prompts = [[50 + number, 60, 70] for number in range(16)]
    together = make()[0].generate(prompts, n, sampling, seeds=range(32))
    made, model = make(max_rows=rows)
    problem(model)
    reads, steps = [], []

    def count(module, args, kwargs):
        shape = kwargs["input_ids"].shape
        (steps if shape[1] == 1 else reads).append((shape[0], shape[1] // 3, len(reads)))

    model.register_forward_pre_hook(count, with_kwargs=True)
    done = made.generate(prompts, n, sampling, seeds=range(32))
    lengths = [len(ids) for ids in done.ids]
    assert done.ids == together.ids and max(lengths) > 3 * sum(lengths) / len(lengths) > 12
    # No row is computed after its end, and never more than there is room for.
    assert (
        sum(count for count, *_ in steps) == sum(lengths) - len(lengths) and max(count for count, *_ in steps) <= rows
    )
    assert sum(prompts for _, prompts, _ in reads) == len(prompts) and len(reads) > len(prompts) * n // rows
    # Batches that wait for their longest would take so many forwards.
    order = range(len(prompts))[::-1]
    in_turns = [order[start : start + rows // n] for start in range(0, len(prompts), rows // n)]
    waited = sum(max(lengths[number * n + copy] for number in batch for copy in range(n)) for batch in in_turns)
    assert len(steps) + len(reads) < 0.8 * waited
    before_the_last = [count for count, _, read in steps if read < len(reads)]
    assert sum(before_the_last) / len(before_the_last) > 0.8 * rows


def test_bfloat16_and_autocast_tell_that_they_are_not_exact():
    made, model = make()
    model.bfloat16()
    done = made.generate(PROMPTS, 2, Sampling(6), seeds=range(10))
    assert problem(model) is None and not done.is_exact and all(len(ids) == 6 for ids in done.ids)


def test_what_cannot_be_done_here_is_done_by_generate_and_said_once(caplog):
    made, model = make()
    model.generate = lambda input_ids, **kwargs: torch.cat([input_ids, torch.tensor([[8, 1, 0]] * len(input_ids))], 1)
    with caplog.at_level("INFO"):
        for _ in range(2):
            assert made.generate(PROMPTS, 1, Sampling(3, eos_token_ids=(1,))).ids == [[8, 1]] * 5
    assert caplog.text.count("overrides generate") == 1


def test_generation_leaves_the_model_as_it_was():
    made, model = make("gpt2")
    model.train()
    before = model.config._attn_implementation
    made.generate(PROMPTS, 1, Sampling(3))
    assert model.training and model.config._attn_implementation == before


# ------------------------------------------------------------------------------------------------- memory of the cache


def cache_bytes(decoding):
    """Bytes of the storages behind the keys and values of all blocks."""
    kept = [layers for block in decoding.blocks for layers in (block.prompts, block.own)]
    storages = [part.untyped_storage() for layers in kept for pair in layers.values() for part in pair]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def watch(monkeypatch, is_fixed=False):
    """(bytes of the cache, rows) behind each token that is written from now on."""
    found, go_on = [], local_steps.LocalSteps._go_on

    def watched(steps, calls):
        go_on(steps, calls)
        found.append((cache_bytes(steps.decoding), sum(len(call.index) for call in calls)))

    monkeypatch.setattr(local_steps, "Decoding", functools.partial(Decoding, is_fixed=is_fixed))
    monkeypatch.setattr(local_steps.LocalSteps, "_go_on", watched)
    return found


TOKEN = 2 * 4 * SIZE["num_hidden_layers"] * SIZE["num_key_value_heads"] * SIZE["head_dim"]  # bytes in float32


@pytest.mark.parametrize("is_fixed", [False, True], ids=["CPU", "as on a GPU"])
@pytest.mark.parametrize(("length", "share"), [(256, 0.31), (1024, 0.18)])
def test_the_cache_holds_the_prompt_of_a_group_once(length, share, is_fixed, monkeypatch):
    made, model = make(max_position_embeddings=2048)
    prompt, new = [5 + i % 300 for i in range(length)], 64
    found = watch(monkeypatch, is_fixed)
    made.generate([prompt], 8, Sampling(new), seeds=range(8))
    mine = max(size for size, _ in found)
    assert mine == (length + 8 * new) * TOKEN
    out = model.generate(
        torch.tensor([prompt] * 8), max_new_tokens=new, min_new_tokens=new, return_dict_in_generate=True
    )
    layers = out.past_key_values.layers
    theirs = sum(part.untyped_storage().nbytes() for layer in layers for part in (layer.keys, layer.values))
    assert theirs == 8 * (length + new - 1) * TOKEN and mine / theirs < share


@pytest.mark.parametrize("is_fixed", [False, True], ids=["CPU", "as on a GPU"])
@pytest.mark.parametrize("new", [20, 70])  # below 64 tokens, at which the cache doubles, and above
def test_the_cache_stays_within_its_tokens_while_rows_leave_and_others_come(new, is_fixed, monkeypatch):
    prompts = [[50 + i for i in range(length)] for length in (120, 100, 30, 90, 110, 40, 95, 60)]
    sampling = Sampling(new, eos_token_ids=tuple(range(30)))
    expected = make()[0].generate(prompts, 4, sampling, seeds=range(32))
    model, bound = make()[1], 3 * (120 + 4 * new)
    made = LocalGenerator(tiny.tokenizer(), max_tokens=bound)
    made.sync_weights(model)
    problem(model)
    found = watch(monkeypatch, is_fixed)
    done = made.generate(prompts, 4, sampling, seeds=range(32))
    assert done.ids == expected.ids and len({len(ids) for ids in done.ids}) > 3
    assert max(size for size, _ in found) <= bound * TOKEN
    # More than would fit if each completion held its prompt; one prompt is let in whatever it needs.
    assert max(rows for _, rows in found) >= 8 > bound // (120 + new)
    found.clear()
    made.max_tokens = 10
    assert made.generate(prompts[:2], 4, sampling, seeds=range(8)).ids == expected.ids[:8]
    assert max(rows for _, rows in found) <= 4


# ------------------------------------------------------------------------------------------------ the step of a decoder


class Operations(TorchDispatchMode):
    """Counts what is dispatched."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("arch", ["llama", "qwen3", "mistral"])
def test_models_of_llamas_kind_take_the_short_step(arch):
    _made, model = make(arch)
    with decoding_attention(model):
        assert isinstance(local._step_of(model), DecoderStep)


@pytest.mark.parametrize("adapter", [False, True])
def test_a_trainer_with_gradient_checkpointing_takes_the_short_step(adapter, tmp_path):
    from peft import LoraConfig

    class Looks(GRPOTrainer):
        def generate(self, samples, sampling):
            with decoding_attention(self.model):
                steps.append(local._step_of(self.model))
            return super().generate(samples, sampling)

    steps = []
    args = GRPOConfig(max_steps=1, per_device_train_batch_size=2, num_generations=2, max_completion_length=2,
                      output_dir=str(tmp_path), report_to="none", use_cpu=True)  # fmt: skip
    assert args.gradient_checkpointing
    Looks(
        tiny.causal_lm(), reward_funcs=lambda completions, **_: [0.0] * len(completions), args=args,
        train_dataset=[{"prompt": "a"}], processing_class=tiny.tokenizer(),
        peft_config=LoraConfig(r=2, target_modules=["q_proj"]) if adapter else None,
    ).train()  # fmt: skip
    assert [type(step) for step in steps] == [DecoderStep]


@pytest.mark.parametrize("arch", ["gemma2", "gemma3", "gpt2", "gpt-oss", "phi3"])
def test_other_models_do_not(arch):
    _made, model = make(arch)
    with decoding_attention(model):
        assert local._step_of(model) is None


def test_a_model_that_someone_listens_to_runs_its_own_modules():
    _made, model = make()
    model.model.layers[0].register_forward_hook(lambda *args: None)
    with decoding_attention(model):
        assert local._step_of(model) is None


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "autocast"])
def test_an_adapter_is_part_of_the_step(precision):
    from peft import LoraConfig, get_peft_model

    _made, model = make(tie_word_embeddings=True)
    targets = ["q_proj", "v_proj", "down_proj"]
    model = get_peft_model(model, LoraConfig(r=2, target_modules=targets, init_lora_weights=False)).eval()
    if precision == "bfloat16":
        model.bfloat16()
    with torch.no_grad(), torch.autocast("cpu", enabled=precision == "autocast"), decoding_attention(model):
        trial = local._Trial.of(model.get_base_model())
        expected = local._written(model, trial, torch.device("cpu"))
        found = local._written(model, trial, torch.device("cpu"), DecoderStep.of(model))
        with model.disable_adapter():
            without = local._written(model, trial, torch.device("cpu"))
    assert local._gap(expected, found) < (1e-5 if precision == "float32" else 4e-2)
    assert local._gap(expected, without) > 0.2


@pytest.mark.parametrize(
    ("lengths", "is_fixed", "share"),
    [([40, 40], False, 0.7), ([10, 20, 30, 40], False, 0.7), ([40, 40], True, 0.65), ([10, 20, 30, 40], True, 0.6)],
    ids=["equal", "ragged", "equal, as on a GPU", "ragged, as on a GPU"],
)
def test_a_token_costs_less_than_seven_tenths_of_the_operations_of_generate(lengths, is_fixed, share, monkeypatch):
    monkeypatch.setattr(local_steps, "Decoding", functools.partial(Decoding, is_fixed=is_fixed))
    prompts = [[5] * length for length in lengths]
    made, model = make(num_hidden_layers=4)
    new = 64
    made.generate(prompts, 8, Sampling(2))
    with Operations() as mine:
        made.generate(prompts, 8, Sampling(new))
    width = max(map(len, prompts))
    rows = [row for row in prompts for _ in range(8)]
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    config = transformers.GenerationConfig(
        max_new_tokens=new, do_sample=True, top_k=0, pad_token_id=0, eos_token_id=None
    )
    with Operations() as theirs, torch.no_grad():
        assert model.generate(ids, attention_mask=mask, generation_config=config).shape[1] == width + new
    assert mine.count <= share * theirs.count, f"{mine.count / new:.0f} and {theirs.count / new:.0f} a token"


# ------------------------------------------------------------------------------------------------ steps of fixed shapes


@pytest.mark.parametrize("arch", ["qwen3", "gemma2", "gpt-oss"])
def test_steps_of_fixed_shapes_write_the_same_completions(arch, monkeypatch):
    """As on a GPU: completions end at different times, prompts are ragged, and the cache grows beyond 64 tokens."""
    prompts = [[50 + i for i in range(n)] for n in (9, 4, 7)]
    model = make(arch)[1] if arch == "gpt-oss" else tiny.causal_lm(arch, initializer_range=0.2, sliding_window=6)
    found = []
    for is_fixed in (False, True):
        monkeypatch.setattr(local_steps, "Decoding", functools.partial(Decoding, is_fixed=is_fixed))
        made = LocalGenerator(tiny.tokenizer(), max_rows=6)
        made.sync_weights(model)
        sampling = Sampling(max_new_tokens=70, eos_token_ids=tuple(range(100, 103)))
        found.append(made.generate(prompts, 4, sampling, seeds=range(12)))
    expected, fixed = found
    assert fixed.ids == expected.ids and fixed.finished == expected.finished
    assert len({len(ids) for ids in fixed.ids}) > 3 and max(len(ids) for ids in fixed.ids) == 70
    for one, other in zip(fixed.logps, expected.logps, strict=True):
        assert one == pytest.approx(other, abs=1e-4)


@pytest.mark.parametrize("prompts", [(6, 6), (6, 3)])
def test_a_step_is_one_graph_that_stays_the_same_for_32_tokens(prompts):
    model, graphs = tiny.causal_lm(initializer_range=0.2).eval(), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def logits(compiled):
        decoding, found = Decoding(torch.device("cpu"), is_fixed=True), []
        read = local_steps.PromptsRead([SeenPrompt([5 + i for i in range(length)]) for length in prompts])
        block, _ = decoding.read(model, read.inputs([0, 1]), 2)
        step = DecoderStep.of(model)
        step.prepare(64)
        step = torch.compile(step, backend=backend, fullgraph=True) if compiled else step
        for token in range(32):
            found.append(step(torch.arange(4) + token, block.positions, decoding.attend_rows))
            block.advance()
        return torch.stack(found)

    torch._dynamo.reset()
    with torch.no_grad(), decoding_attention(model):
        torch.testing.assert_close(logits(True), logits(False), rtol=1e-4, atol=1e-5)
    assert len(graphs) == 1


# --------------------------------------------------------------------------------------------- completions that join


def written(steps, begins):
    """{(call, row): (completion, step at which it ended)}; `begins` maps a step to what ``add`` is given there."""
    found, number, calls = {}, 0, []
    while steps or begins:
        for given in begins.pop(number, ()):
            calls.append(steps.add(*given))
        number += 1
        for call, rows in steps.step():
            found |= {(calls.index(call), row): (call.completion(row), number) for row in rows}
    return found


@pytest.mark.parametrize("arch", ["qwen3", "gemma2", "gpt2"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_completions_join_and_leave_at_any_token_and_are_those_of_a_batch_alone(arch, temperature):
    made, _ = make(arch)
    sampling, others = Sampling(12, temperature, eos_token_ids=(1,)), Sampling(20, temperature, repetition_penalty=1.3)
    with made.steps() as steps:
        found = written(
            steps,
            {
                0: [(PROMPTS[:2], 2, sampling, [1, 2, 3, 4])],
                3: [(PROMPTS[2:3], 3, sampling, [5, 6, 7], [12, 4, 9]), (PROMPTS[3:], 1, others, [8, 9])],
                7: [(PROMPTS[:1], 1, sampling, [10])],
            },
        )
    alone = [
        made.generate(PROMPTS[:2], 2, sampling, [1, 2, 3, 4]),
        made.generate(PROMPTS[2:3], 3, sampling, [5, 6, 7]),
        made.generate(PROMPTS[3:], 1, others, [8, 9]),
        made.generate(PROMPTS[:1], 1, sampling, [10]),
    ]
    most = {(1, 1): 4, (1, 2): 9}
    assert len(found) == 10
    for (call, row), (done, _) in found.items():
        length = most.get((call, row), 20)
        assert done.ids[0] == alone[call].ids[row][:length]
        assert done.logps[0] == pytest.approx(alone[call].logps[row][:length], abs=1e-5)
        assert done.finished[0] == (alone[call].finished[row] and len(alone[call].ids[row]) <= length)
        assert done.is_exact


def test_a_short_completion_does_not_wait_for_a_long_one():
    made, _ = make()
    with made.steps() as steps:
        found = written(steps, {0: [(PROMPTS[:1], 1, Sampling(90), [1])], 10: [(PROMPTS[1:2], 1, Sampling(5), [2])]})
    assert {key: number for key, (_, number) in found.items()} == {(0, 0): 89, (1, 0): 14}


def test_completions_that_join_wait_for_room():
    made, _ = make(max_rows=4)
    begins = {0: [(PROMPTS[:1], 4, Sampling(9), range(4))], 2: [(PROMPTS[1:2], 2, Sampling(3), [5, 6])]}
    with made.steps() as steps:
        found = written(steps, begins)
    ends = {key: number for key, (_, number) in found.items()}
    assert all(ends[0, row] == 8 for row in range(4)) and ends[1, 0] == ends[1, 1] == 10


def test_what_needs_generate_has_no_steps():
    made, _ = make()
    made.with_routes = True
    assert made.steps() is None
    other = LocalGenerator(tiny.tokenizer())
    other.sync_weights(torch.nn.Linear(2, 2))
    assert other.steps() is None


# ------------------------------------------------------------------------------------------- prompts that go on


def conversations(steps, turns=3):
    """The completions of `turns` turns of 4 conversations, each behind the one before and 5 tokens of an answer."""
    sampling, prompts, found = Sampling(9, 1.0, eos_token_ids=(1,)), [p for p in PROMPTS[:2] for _ in range(2)], []
    read = []
    for turn in range(turns):
        seeds = [10 * turn + i for i in range(4)]
        call = steps.add(PROMPTS[:2], 2, sampling, seeds) if not turn else steps.add(prompts, 1, sampling, seeds)
        before = steps.num_read
        while steps:
            steps.step()
        read.append(steps.num_read - before)
        found += [call.completion(row) for row in range(4)]
        prompts = [[*p, *one.ids[0], *range(20, 25)] for p, one in zip(prompts, found[-4:], strict=True)]
    return found, read


@pytest.mark.parametrize("is_fixed", [False, True], ids=["", "fixed"])
@pytest.mark.parametrize("arch", sorted(MODELS))
def test_a_turn_reads_only_what_is_new_and_writes_the_same(arch, is_fixed):
    made, _ = make(arch)
    results = []
    for keeps in (True, False):
        with made.steps() as steps:
            steps.decoding = Decoding(torch.device("cpu"), is_fixed)
            steps.texts = steps.texts if keeps else None
            results.append(conversations(steps))
    (found, read), (expected, all_read) = results
    assert read == [13, *[4 * (1 + 5)] * 2]  # the last token of a turn is read with the answer behind it
    assert all_read[1] == 2 * 13 + sum(len(one.ids[0]) for one in expected[:4]) + 4 * 5
    for one, other in zip(found, expected, strict=True):
        assert one.ids == other.ids and one.finished == other.finished and one.is_exact
        assert one.logps[0] == pytest.approx(other.logps[0], abs=2e-5)


def test_texts_that_are_kept_are_bounded_with_what_is_written(monkeypatch):
    held, bound_texts = [], local_steps.LocalSteps._bound_texts

    def bound(steps):
        bound_texts(steps)
        rows = sum(len(call.index) for call in steps._calls)
        held.append((rows + len(steps.texts), steps.decoding.reserved + sum(map(len, steps.texts))))

    monkeypatch.setattr(local_steps.LocalSteps, "_bound_texts", bound)
    made, _ = make()
    expected = conversations_of(made)
    for name, most in (("max_rows", 6), ("max_rows", 4), ("max_tokens", 80)):
        held.clear()
        found, read = conversations_of(made, **{name: most})
        assert max(h[name == "max_tokens"] for h in held) <= most and sum(read) >= sum(expected[1])
        assert [one.ids for one in found] == [one.ids for one in expected[0]]
    assert sum(read) > sum(expected[1]), "some were dropped"


def conversations_of(made, **bounds):
    with made.steps() as steps:
        vars(steps).update(bounds)
        return conversations(steps)


def test_a_prompt_goes_on_from_the_longest_text_that_it_begins_with():
    made, model = make()
    with made.steps() as steps:
        steps.add([[5, 9], [5, 9, 14, 3]], 1, Sampling(1), [1, 2])
        steps.step()
        assert {*steps.texts} == {(5, 9), (5, 9, 14, 3)}
        call = steps.add([[5, 9, 14, 3, 7], [5, 9, 15], [5, 9]], 1, Sampling(4), [3, 4, 5])
        before = steps.num_read
        while steps:
            steps.step()
        assert steps.num_read - before == 1 + 1 + 2
    for row, prompt in enumerate(call.prompts):
        done = call.completion(row)
        assert done.logps[0] == pytest.approx(teacher_forced(model, list(prompt), done.ids[0], 1.0), abs=2e-5)
