import importlib.machinery
import sys
import types

import pytest
import torch
import transformers

from posttrain.core.models.wrapping import base_model
from posttrain.lm.attention import context_parallel, document_kernels, varlen_attention
from posttrain.lm.attention.document_kernels import block_mask
from posttrain.lm.attention.segments import Segments, shared_beginning, without_padding
from posttrain.lm.attention.varlen_attention import enable_segments, segment_attention, segments_problem
from tests.flash_stand_in import stand_in_for_flash_attention
from tests.tiny import causal_lm

#: Two documents; a prompt with two completions, the second of which is continued twice.
TREE = Segments((7, 5, 4, 6, 3, 2), (-1, -1, 1, 1, 3, 3))
TEXTS = ((0,), (1, 2), (1, 3, 4), (1, 3, 5))  # every segment is the last or on the way of one of them
SMALL = dict(vocab_size=384, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
SMALL |= dict(num_key_value_heads=2, head_dim=8, max_position_embeddings=512, pad_token_id=0, eos_token_id=1)
OTHERS = {
    "gemma2": ("Gemma2Config", dict(sliding_window=4, layer_types=["sliding_attention", "full_attention"])),
    "gemma3": ("Gemma3TextConfig", dict(sliding_window=4, layer_types=["sliding_attention", "full_attention"])),
    "gpt-oss": ("GptOssConfig", dict(sliding_window=4, num_local_experts=4, num_experts_per_tok=2)),
    "olmo2": ("Olmo2Config", {}),
    "phi3": ("Phi3Config", dict(sliding_window=5)),
    "qwen3-moe": ("Qwen3MoeConfig", dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)),
}
ARCHITECTURES = ["qwen3", "llama", "mistral", "gemma", "gpt2", *OTHERS]


def model_of(arch, **options):
    if arch not in OTHERS:
        return causal_lm(arch, **({"sliding_window": 4} if arch == "mistral" else {}), **options)
    name, extra = OTHERS[arch]
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**SMALL, **extra), **options)


def row_of(segments, seed=0):
    return torch.randint(2, 384, (1, segments.num_tokens), generator=torch.Generator().manual_seed(seed))


def alone(model, row, segments, texts):
    """(N, V) logits of each segment in a text of its own, which is read by itself."""
    pieces, found = row[0].split(segments.lengths), {}
    for text in texts:
        whole = torch.cat([pieces[i] for i in text])[None]
        parts = model(input_ids=whole, use_cache=False).logits[0].split([segments.lengths[i] for i in text])
        found |= dict(zip(text, parts, strict=True))
    return torch.cat([found[i] for i in range(len(segments.lengths))])


def together(model, row, segments):
    return model(input_ids=row, **segments.model_inputs(row.shape)).logits[0]


def gradients(model, logits):
    """Of a sum in which each logit has its own weight."""
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    (logits * weights).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_near(found, expected):
    """Each gradient within 1e-5 of its length; those that are zero but for rounding within 1e-5."""
    assert found.keys() == expected.keys()
    far = {name: (found[name] - expected[name]).norm() / (expected[name].norm() + 1) for name in found}
    assert {name: value for name, value in far.items() if not value < 1e-5} == {}


def test_positions_go_on_from_the_parents_end():
    assert Segments.documents([3, 2]).position_ids().tolist() == [[0, 1, 2, 0, 1]]
    assert Segments.groups([(2, [3, 1]), (1, [2])]) == Segments((2, 3, 1, 1, 2), (-1, 0, 0, -1, 3))
    assert Segments.groups([(2, [3, 1])]).position_ids().tolist() == [[0, 1, 2, 3, 4, 2]]
    assert Segments((1, 2, 2), (-1, 0, 1)).position_ids().tolist() == [[0, 1, 2, 3, 4]]


def test_the_mask_is_the_definition():
    mask = Segments.groups([(2, [2, 1])]).dense_mask().int().tolist()
    assert mask == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 0, 0, 1],
    ]
    windowed = Segments.groups([(2, [2, 1])]).dense_mask(window=2).int().tolist()
    assert windowed[3] == [0, 0, 1, 1, 0] and windowed[4] == [0, 1, 0, 0, 1]


@pytest.mark.parametrize(
    ("lengths", "parents", "said"),
    [
        ((2, 0), (-1, -1), "Segment 1 has 0 tokens"),
        ((2, 3), (-1, 1), "Segment 1 continues segment 1"),
        ((2, 3), (-1,), "2 lengths and 1 parents"),
        ((), (), "0 lengths"),
    ],
)
def test_segments_that_cannot_be_are_refused(lengths, parents, said):
    with pytest.raises(ValueError, match=said):
        Segments(lengths, parents)


def by_definition(query, key, value, mask, scale, softcap=None, sinks=None):
    key, value = (t.repeat_interleave(query.shape[1] // key.shape[1], 1) for t in (key, value))
    scores = query @ key.transpose(2, 3) * scale
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    weights = scores.masked_fill(~mask, -torch.inf).exp()
    extra = 0 if sinks is None else sinks.exp().view(1, -1, 1, 1)
    return weights / (weights.sum(-1, keepdim=True) + extra) @ value


@pytest.mark.parametrize("way", ["blocks", "tiles"])
@pytest.mark.parametrize("segments", [TREE, Segments.documents([5, 1, 9, 5]), Segments.groups([(6, [4, 4, 7])] * 2)])
@pytest.mark.parametrize(
    "rule",
    [{}, {"window": 3}, {"softcap": 1.5}, {"softcap": 1.5, "window": 4}, {"sinks": True}, {"window": 100}],
    ids=str,
)
def test_attention_and_its_gradients_are_those_of_the_dense_mask(segments, rule, way, monkeypatch):
    assert varlen_attention.tiles_of(segments) is not None, "short documents are computed in one call"
    if way == "blocks":
        monkeypatch.setattr(varlen_attention, "tiles_of", lambda segments: None)
    torch.manual_seed(0)
    heads, groups, size = 6, 2, 8
    query = torch.randn(1, heads, segments.num_tokens, size, dtype=torch.float64, requires_grad=True)
    key, value = (
        torch.randn(1, groups, segments.num_tokens, size, dtype=torch.float64, requires_grad=True) for _ in "kv"
    )
    rule = dict(rule)
    inputs = [query, key, value]
    if rule.get("sinks"):
        rule["sinks"] = torch.randn(heads, dtype=torch.float64, requires_grad=True)
    mask = segments.dense_mask(rule.get("window"))
    expected = by_definition(*inputs, mask, 0.3, rule.get("softcap"), rule.get("sinks"))
    found = segment_attention(*inputs, segments, scale=0.3, **rule)
    weights = torch.randn(expected.shape, dtype=torch.float64)
    exact = {} if not (rule.get("softcap") or rule.get("sinks") is not None) else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(found, expected, **exact)
    for ours, theirs in zip(
        torch.autograd.grad(found, inputs, weights), torch.autograd.grad(expected, inputs, weights), strict=True
    ):
        torch.testing.assert_close(ours, theirs, **exact)


@pytest.mark.parametrize(
    "segments",
    [Segments.documents([65] * 4), Segments.documents([2] * 9 + [60]), Segments.groups([(40, [20, 30])])],
)
def test_what_one_call_would_pad_or_mask_too_much_is_computed_in_blocks(segments):
    assert varlen_attention.tiles_of(segments) is None


@pytest.mark.parametrize(
    "length", [5, 40, 900]
)  # tiles; blocks; blocks long enough for the kernel in bfloat16 is long enough for the kernel in bfloat16
def test_attention_in_bfloat16_is_as_near_as_its_numbers_allow(length):
    torch.manual_seed(0)
    segments = Segments.groups([(length, [20, 30])])
    exact = [torch.randn(1, heads, segments.num_tokens, 16, requires_grad=True) for heads in (4, 2, 2)]
    half = [tensor.detach().bfloat16().requires_grad_() for tensor in exact]
    weights = torch.randn(1, 4, segments.num_tokens, 16)
    expected = segment_attention(*exact, segments, scale=0.25)
    found = segment_attention(*half, segments, scale=0.25)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=2e-2)
    for ours, theirs in zip(
        torch.autograd.grad(found, half, weights.bfloat16()), torch.autograd.grad(expected, exact, weights), strict=True
    ):
        assert (ours.float() - theirs).norm() < 1e-2 * theirs.norm()


def test_autocast_gives_the_type_it_asks_for():
    query = torch.randn(1, 2, 9, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert segment_attention(query, query, query, Segments.documents([4, 5]), scale=1.0).dtype == torch.bfloat16


def test_dropout_drops_from_the_weights():
    torch.manual_seed(0)
    value = torch.ones(1, 2, 400, 8)
    out = segment_attention(value * 0, value * 0, value, Segments.documents([400]), scale=1.0, dropout=0.5)
    assert out[0, :, 200:].mean().item() == pytest.approx(1.0, abs=0.05) and out[0, :, 200:].std() > 0.01


#: What a GPU computes, computed here; the kernels themselves are not verified by these.
ON_A_GPU = [{}, {"window": 3}, {"softcap": 1.5, "window": 4}]


def heads_of(segments, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shape = segments.num_tokens, 8
    return [torch.randn(1, heads, *shape, generator=generator).to(dtype) for heads in (6, 2, 2)]


@pytest.mark.parametrize("segments", [TREE, Segments.documents([5, 1, 9, 5])])
@pytest.mark.parametrize("rule", ON_A_GPU, ids=str)
def test_flex_attention_is_given_the_rule_of_the_segments(segments, rule, monkeypatch):
    from torch.nn.attention.flex_attention import flex_attention

    monkeypatch.setattr(varlen_attention, "_flex_attention", lambda kind: flex_attention)  # not compiled
    window, softcap = rule.get("window"), rule.get("softcap")
    found = varlen_attention._on_gpu(*heads_of(segments), segments, 0.3, window, softcap)
    expected = by_definition(*heads_of(segments), segments.dense_mask(window), 0.3, softcap)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 100, 300])
@pytest.mark.parametrize(
    "segments",
    [
        Segments.documents([300, 1, 128, 511, 60, 40]),
        Segments.groups([(400, [70, 200]), (30, [90, 10, 256])]),
        Segments((200, 150, 90, 130, 300), (-1, 0, 1, 1, 3)),
        Segments.documents([128] * 8),
        TREE,
    ],
)
def test_blocks_are_those_that_torch_finds_by_trying_each_pair(segments, window):
    from torch.nn.attention.flex_attention import create_block_mask

    found = block_mask(segments, window, torch.device("cpu"))
    size = segments.num_tokens
    expected = create_block_mask(found.mask_mod, None, None, size, size, device="cpu")
    assert found.shape == expected.shape
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    assert torch.equal(found.to_dense(), expected.to_dense())
    for name in ("", "full_"):
        counts, listed = getattr(found, f"{name}kv_num_blocks")[0, 0], getattr(found, f"{name}kv_indices")[0, 0]
        theirs = getattr(expected, f"{name}kv_indices")[0, 0]
        for number, ours, other in zip(counts.tolist(), listed.tolist(), theirs.tolist(), strict=True):
            assert ours[:number] == other[:number]


def test_blocks_are_found_without_a_tensor_of_all_pairs():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, (tuple, list)) else [out]:
                self.numel = max(self.numel, tensor.numel() if isinstance(tensor, torch.Tensor) else 0)
            return out

    segments = Segments.groups([(500, [300, 299, 301])] * 6)
    with Largest() as largest:
        block_mask(segments, None, torch.device("cpu"))
    assert largest.numel < segments.num_tokens**2 / 100


def test_flash_attn_4_alone_is_no_flash_attn(tmp_path, monkeypatch):
    """It is a folder flash_attn/cute without flash_attn/__init__.py."""
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    assert not document_kernels._has_flash_attn()
    monkeypatch.setitem(
        sys.modules, "flash_attn", importlib.import_module("flash_attn")
    )  # as another library imports it
    assert not document_kernels._has_flash_attn()
    monkeypatch.delitem(sys.modules, "flash_attn")
    (tmp_path / "flash_attn" / "__init__.py").touch()
    importlib.invalidate_caches()
    assert document_kernels._has_flash_attn()


def test_a_kernel_whose_package_is_broken_is_not_passed_over(monkeypatch):
    def broken(*args, **kwargs):
        raise ImportError("libcudart.so.12 is missing", name="flash_attn")

    monkeypatch.setattr(varlen_attention, "segment_attention", broken)
    with pytest.raises(ImportError, match="libcudart"):
        segments_problem(causal_lm())


@pytest.mark.parametrize("device", ["xpu", "mps", "cuda"])
def test_every_accelerator_is_given_flex_attention(device, monkeypatch):
    from torch._subclasses.fake_tensor import FakeTensorMode

    given = []
    monkeypatch.setattr(varlen_attention, "_flex_attention", lambda kind: lambda q, k, v, **options: given.append(q))
    monkeypatch.setattr(varlen_attention, "block_mask", lambda *args: None)
    monkeypatch.setattr(document_kernels.torch.cuda, "get_device_capability", lambda: (7, 0))
    with FakeTensorMode():
        heads = [torch.empty(1, 2, 8, 16, device=device) for _ in range(3)]
        segment_attention(*heads, Segments.documents([5, 3]), scale=1.0)
    assert [one.device.type for one in given] == [device]


@pytest.mark.parametrize("version", [2, 3, 4])
@pytest.mark.parametrize("rule", ON_A_GPU, ids=str)
def test_documents_are_computed_by_the_flash_attention_that_a_model_names(rule, version, monkeypatch):
    segments = Segments.documents([5, 1, 9, 5])
    calls = stand_in_for_flash_attention(monkeypatch, version=version)
    causal_lm("qwen3", attn_implementation=f"flash_attention_{version}")
    window, softcap = rule.get("window"), rule.get("softcap")
    inputs = heads_of(segments, torch.bfloat16)
    found = varlen_attention._on_gpu(*inputs, segments, 0.3, window, softcap)
    expected = by_definition(*(tensor.float() for tensor in inputs), segments.dense_mask(window), 0.3, softcap)
    assert calls == [segments.lengths] and found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("arch", ["qwen3", "gemma2"])
def test_a_model_with_flash_attention_reads_segments_and_has_it_back(arch, monkeypatch):
    stand_in_for_flash_attention(monkeypatch, any_dtype=True)
    model = causal_lm(arch, attn_implementation="flash_attention_2")
    before = model.config._attn_implementation
    assert segments_problem(model) is None and model.config._attn_implementation == before
    assert "knows no slices" in context_parallel.problem_of(model)
    assert_texts_are_as_alone(model)
    assert model.config._attn_implementation == ("segments_eager" if arch == "gemma2" else "segments_sdpa")


@pytest.mark.parametrize("rule", ON_A_GPU, ids=str)
def test_flash_attention_is_told_where_each_document_ends(rule, monkeypatch):
    segments = Segments.documents([5, 1, 9, 5])

    def varlen(q, k, v, ends_q, ends_k, longest_q, longest_k, *, softmax_scale, causal, window_size, softcap, **rest):
        """`flash_attn.flash_attn_varlen_func` as its documentation has it: (T, H, D), a window of positions to the
        left.
        """
        assert causal and window_size[1] in (-1, 0) and longest_q == longest_k == 9 and ends_q.dtype == torch.int32
        assert rest == {"deterministic": False}
        outputs = []
        for start, end in zip(ends_q.tolist(), ends_q.tolist()[1:], strict=False):
            distance = torch.arange(end - start)[:, None] - torch.arange(end - start)
            mask = (distance >= 0) & ((distance <= window_size[0]) | (window_size[0] < 0))
            parts = (tensor[start:end].transpose(0, 1)[None].float() for tensor in (q, k, v))
            outputs.append(by_definition(*parts, mask, softmax_scale, softcap)[0].transpose(0, 1))
        return torch.cat(outputs).to(q.dtype)

    module = types.ModuleType("flash_attn")
    module.flash_attn_varlen_func, module.__spec__ = varlen, importlib.machinery.ModuleSpec("flash_attn", None)
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    window, softcap = rule.get("window"), rule.get("softcap")
    inputs = heads_of(segments, torch.bfloat16)
    found = varlen_attention._on_gpu(*inputs, segments, 0.3, window, softcap)
    expected = by_definition(*(tensor.float() for tensor in inputs), segments.dense_mask(window), 0.3, softcap)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, rtol=1e-2, atol=1e-2)


def assert_texts_are_as_alone(model):
    row = row_of(TREE)
    expected = alone(model, row, TREE, TEXTS)
    expected_gradients = gradients(model, expected)
    enable_segments(model)
    found = together(model, row, TREE)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert_near(gradients(model, found), expected_gradients)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_each_text_has_the_logits_and_gradients_it_has_alone(arch):
    model = model_of(arch).eval()
    assert_texts_are_as_alone(model)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_model_without_segments_is_what_it_was(implementation):
    model = causal_lm(attn_implementation=implementation).eval()
    ids = row_of(TREE).view(3, -1)
    mask = torch.ones_like(ids)
    mask[0, -4:] = 0
    before = model(input_ids=ids, attention_mask=mask).logits
    generated = model.generate(ids, max_new_tokens=4, do_sample=False)
    enable_segments(model)
    enable_segments(model)  # once is enough
    assert torch.equal(model(input_ids=ids, attention_mask=mask).logits, before)
    assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), generated)


def test_a_batch_of_rows_is_one_row_after_the_other():
    model = causal_lm().eval()
    segments = Segments.documents([5, 3, 2, 6])
    ids = row_of(segments).view(2, 8)
    enable_segments(model)
    batched = model(input_ids=ids, **segments.model_inputs(ids.shape)).logits
    torch.testing.assert_close(batched.view(16, -1), together(model, ids.view(1, 16), segments))
    with pytest.raises(ValueError, match="16 tokens, and input_ids of .* 24"):
        segments.model_inputs((3, 8))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("arch", ["qwen3", "gemma2", "gpt2"])
def test_recomputed_layers_see_the_same_segments(arch, reentrant):
    model = model_of(arch).eval()
    enable_segments(model)
    row = row_of(TREE)
    expected = gradients(model, together(model, row, TREE))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    found = gradients(model, together(model, row, TREE))
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name])


def test_adapters_are_trained_through_segments():
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(causal_lm(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    assert_texts_are_as_alone(model)


def test_wrapped_models_pass_segments_on(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = causal_lm()
        enable_segments(model)
        row = row_of(TREE)
        expected = gradients(model, together(model, row, TREE))
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        found = gradients(wrapped, together(wrapped, row, TREE))
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected[name.removeprefix("module.")])
        with torch.autocast("cpu", torch.bfloat16):
            half = together(wrapped, row, TREE)
        torch.testing.assert_close(half.float(), together(model, row, TREE), rtol=5e-2, atol=5e-2)
    finally:
        torch.distributed.destroy_process_group()


def test_models_that_cannot_keep_segments_apart_say_why():
    from transformers import AutoModelForCausalLM, BloomConfig, Lfm2Config, MambaConfig

    lfm = Lfm2Config(**{k: v for k, v in SMALL.items() if k != "head_dim"}, layer_types=["conv", "full_attention"])
    bloom = BloomConfig(vocab_size=384, hidden_size=32, n_layer=2, n_head=4)
    mamba = MambaConfig(vocab_size=384, hidden_size=32, num_hidden_layers=2, state_size=4)
    for config, said in ((lfm, "layers of conv"), (bloom, "AttentionInterface"), (mamba, "segments")):
        model = AutoModelForCausalLM.from_config(config)
        before = model.config._attn_implementation
        assert said in segments_problem(model)
        assert model.config._attn_implementation == before
        with pytest.raises(ValueError, match=said):
            enable_segments(model)
    assert "no model of transformers" in segments_problem(torch.nn.Linear(2, 2))
    assert "compiled" in segments_problem(torch.compile(causal_lm()))


def test_a_window_that_only_the_mask_knows_is_noticed(monkeypatch):
    model = model_of("gemma3")
    for layer in model.model.layers:
        layer.self_attn.sliding_window = None
    assert "sliding window is not passed" in segments_problem(model)


def test_the_trial_leaves_the_model_as_it_was():
    model = causal_lm().train()
    model.model.layers[0].eval()
    state = [module.training for module in model.modules()]
    assert segments_problem(model) is None
    assert [module.training for module in model.modules()] == state
    assert base_model(model).config._attn_implementation == "sdpa"
    assert all(p.grad is None for p in model.parameters())


def padded(lengths, width):
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    ids = torch.arange(1, 1 + mask.numel()).view(mask.shape) * mask
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": torch.where(mask, ids, -100)}


def test_a_batch_without_its_padding_is_one_row_of_documents():
    batch = without_padding(padded([2, 3], 4))
    assert batch["input_ids"].tolist() == [[1, 2, 5, 6, 7]] and batch["position_ids"].tolist() == [[0, 1, 0, 1, 2]]
    assert batch["labels"].tolist() == [[-100, 2, -100, 6, 7]]
    assert batch["segments"] == Segments.documents([2, 3])


def test_the_loss_of_a_batch_without_its_padding_is_that_of_the_batch():
    model, batch = causal_lm(), padded([9, 4, 12, 1], 14)
    expected = model(**batch, num_items_in_batch=torch.tensor(22)).loss
    enable_segments(model)
    found = model(**without_padding(batch), num_items_in_batch=torch.tensor(22)).loss
    torch.testing.assert_close(found, expected)


def test_batches_that_are_not_padded_on_the_right_stay_as_they_are():
    left = {name: value.flip(1) for name, value in padded([2, 3], 4).items()}
    more = padded([2, 3], 4) | {"token_type_ids": torch.zeros(2, 4)}
    for batch in (left, more, padded([2, 0], 4), {"input_ids": torch.ones(1, 2)}):
        assert (
            without_padding(batch).keys() == batch.keys() and without_padding(batch)["input_ids"] is batch["input_ids"]
        )


def test_what_all_documents_begin_with_is_in_the_row_once():
    ids = torch.tensor([[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7, 0], [1, 2, 3, 8, 9, 0]])
    mask = (ids != 0).long()
    labels = torch.tensor([[-100] * 4 + [5, 6], [-100] * 4 + [7, -100], [-100] * 4 + [9, -100]])
    row = without_padding({"input_ids": ids, "attention_mask": mask, "labels": labels})
    assert row["input_ids"].tolist() == [[1, 2, 3, 4, 5, 6, 4, 7, 8, 9]]
    assert row["labels"].tolist() == [[-100] * 4 + [5, 6, -100, 7, -100, 9]]
    assert row["position_ids"].tolist() == [[0, 1, 2, 3, 4, 5, 3, 4, 3, 4]]
    assert row["segments"] == Segments.groups([(3, [3, 2, 2])])


def test_the_token_that_predicts_a_label_is_not_shared():
    ids, nothing = torch.tensor([1, 2, 3, 4, 1, 2, 3, 4]), torch.zeros(8, dtype=torch.bool)
    assert shared_beginning(ids, nothing, (4, 4)) == 3  # a token of its own stays
    first = nothing.clone()
    first[2] = True  # predicted by the second token of the first document
    assert shared_beginning(ids, first, (4, 4)) == 1
    assert shared_beginning(ids, ~nothing, (4, 4)) == 0
    assert shared_beginning(ids, nothing, (8,)) == 0 and shared_beginning(ids, nothing, (7, 1)) == 0
    long = torch.tensor([1, 2, *range(10, 30), 1, 2, *range(40, 60)])  # 1 of 44 tokens would be saved, or 2
    assert shared_beginning(long, torch.zeros(44, dtype=torch.bool), (22, 22)) == 0


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_a_shared_beginning_changes_neither_loss_nor_gradients(arch):
    from posttrain.lm.loss.lm_head import loss_in_head

    model = causal_lm(arch)
    ids = torch.randint(1, 90, (5, 17), generator=torch.Generator().manual_seed(0))
    ids[:, :9] = ids[0, :9]
    mask = torch.arange(17) < torch.tensor([17, 12, 11, 16, 14])[:, None]
    labels = torch.where(mask & (torch.arange(17) >= 10), ids, -100)
    batch = {"input_ids": ids * mask, "attention_mask": mask.long(), "labels": labels}

    def loss_and_gradients(inputs):
        model.zero_grad()
        with loss_in_head(model, inputs.pop("labels")):
            loss, correct, entropy = model(**inputs, use_cache=False).logits
        loss.backward()
        return [loss.detach(), correct, entropy, *(p.grad.clone() for p in model.parameters())]

    expected = loss_and_gradients(dict(batch))
    enable_segments(model)
    row = without_padding(batch)
    assert row["input_ids"].numel() == int(mask.sum()) - 4 * 9
    for found, wanted in zip(loss_and_gradients(row), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
