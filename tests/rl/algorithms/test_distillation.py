"""Distillation from outside: who writes what, what the teacher is asked, and what the student becomes."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
import warnings
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from torch.testing import assert_close

from posttrain.core.errors import CheckpointError, ConfigError, DataError
from posttrain.core.training.preflight import PreflightError
from posttrain.lm.loss.distillation import divergence_terms
from posttrain.rl import (
    AsyncDistillationConfig,
    AsyncDistillationTrainer,
    DistillationConfig,
    DistillationTrainer,
    GKDConfig,
    GKDTrainer,
    GOLDTrainer,
    IWOPDConfig,
    IWOPDTrainer,
    ServerDistillationConfig,
    ServerDistillationTrainer,
)
from posttrain.rl.generation.engines import CopiedGenerator
from posttrain.rl.generation.local import LocalGenerator
from posttrain.rl.online.teachers import translate
from tests import tiny

WORDS = " ".join(tiny.CORPUS).split()
ROWS = [{"prompt": " ".join(WORDS[i : i + 3]), "completion": " " + " ".join(WORDS[i + 4 : i + 8])} for i in range(8)]


def config(kind, folder, **changes):
    usual = dict(
        output_dir=str(folder), per_device_train_batch_size=4, max_completion_length=5, max_steps=2, learning_rate=1e-2,
        logging_steps=1, save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True,
        gradient_checkpointing=False,
    )  # fmt: skip
    return kind(**(usual | changes))


def make(folder, kind=DistillationTrainer, rows=ROWS, student=None, teacher=None, options=None, **changes):
    student = student or tiny.causal_lm(initializer_range=0.1)
    given = {"teacher_model": teacher or tiny.causal_lm(seed=3, initializer_range=0.3, hidden_size=48)}
    given |= {"processing_class": tiny.tokenizer(), "train_dataset": rows, "eval_dataset": rows[:4]}
    return kind(student, args=config(kind.config_class, folder, **changes), **(given | (options or {})))


def rollout_of(run):
    run.train_dataset = ROWS
    return run.make_rollout(iter(run.get_train_dataloader()))


def completed(run, rows, number):
    """The samples of a rollout, before they are scored."""
    run.rollout_maker.sync()
    return run.rollout_maker.complete(run.rollout_maker.begin(rows, number))


def logged(run, name):
    return [record[name] for record in run.state.log_history if name in record]


# ------------------------------------------------------------------------------------------------- who writes what


def test_a_share_of_the_completions_is_the_students_and_the_rest_is_the_datasets(tmp_path):
    given = {tuple(tiny.tokenizer()(row["completion"])["input_ids"] + [1]): row for row in ROWS}
    counts = {}
    for share in (0.0, 0.5, 1.0):
        run = make(tmp_path, lmbda=share, per_device_train_batch_size=8, max_completion_length=64)
        run.model.train()
        samples = [sample for number in range(8) for sample in completed(run, ROWS, number)]
        counts[share] = sum(tuple(sample.ids) in given for sample in samples)
    assert counts[0.0] == 64 and counts[1.0] == 0 and 20 <= counts[0.5] <= 44


def test_with_seq_kd_the_teacher_writes_what_the_student_does_not(tmp_path):
    student = tiny.causal_lm(initializer_range=0.1)
    teacher = tiny.causal_lm(seed=3, initializer_range=0.3, hidden_size=48)
    ours = make(tmp_path, lmbda=0.0, seq_kd=True, student=student, teacher=teacher)
    theirs = make(tmp_path, lmbda=1.0, student=teacher, teacher=student)
    for run in (ours, theirs):
        run.model.train()
        run.sampling_seed = None
    rows = [{"prompt": row["prompt"]} for row in ROWS[:4]]
    written = [[sample.ids for sample in completed(run, rows, 0)] for run in (ours, theirs)]
    assert written[0] == written[1]
    assert ours.generator.model is not teacher  # the student's engine is in its place again


def test_what_is_sampled_ahead_takes_the_same_completions_from_the_dataset(tmp_path):
    class Notes(DistillationTrainer):
        def generate(self, samples, sampling):
            self.model.eval()  # as if the trainer evaluated at the time
            samples = super().generate(samples, sampling)
            self.model.train()
            return samples

        def make_rollout(self, batches):
            if (rollout := super().make_rollout(batches)) is None:
                return None
            completions = zip(rollout.completion_ids.tolist(), rollout.completion_lengths.tolist(), strict=True)
            marks.append([tuple(ids[:length]) in given for ids, length in completions])
            if rollout.versions is not None:
                ages.append(self.state.global_step - int(rollout.versions[rollout.loss_mask].min()))
            return rollout

    given = {tuple(tiny.tokenizer()(row["completion"])["input_ids"] + [1]) for row in ROWS}
    found, ages = [], []
    for bound in (0, 2):
        marks = []
        make(tmp_path, Notes, lmbda=0.5, max_staleness=bound, max_steps=6, max_completion_length=64).train()
        found.append(marks)
    assert found[0] == found[1] and {True, False} == {mark for marks in found[0] for mark in marks}
    assert len(ages) == 6 and max(ages) == 2


def test_messages_are_prompt_and_completion(tmp_path):
    rows = [
        {"messages": [{"role": "user", "content": WORDS[i]}, {"role": "assistant", "content": WORDS[i + 1]}]}
        for i in range(8)
    ]
    run = make(tmp_path, rows=rows, lmbda=0.0, max_completion_length=64)
    sample, *_ = completed(run, rows[:4], 0)
    tokenizer = tiny.tokenizer()
    whole = tokenizer.apply_chat_template(rows[0]["messages"], tokenize=False)
    assert tokenizer.decode(sample.prompt_ids + sample.ids) == whole
    assert tokenizer.decode(sample.ids).startswith(WORDS[1]) and run.train_dataset is rows
    run.train()
    assert len(logged(run, "loss")) == 2


def test_evaluation_compares_on_the_datasets_completions_where_training_learns_from_them(tmp_path):
    """It is then the same number each time, and that of whole logits."""
    run = make(tmp_path, lmbda=0.5, beta=0.5)
    first, second = (run.evaluate()["eval_loss"] for _ in range(2))
    assert first == second
    tokenizer, total, count = tiny.tokenizer(), 0.0, 0
    for row in ROWS[:4]:
        prompt = tokenizer(row["prompt"])["input_ids"]
        completion = (tokenizer(row["completion"])["input_ids"] + [1])[:5]
        ids = torch.tensor([prompt + completion])
        with torch.no_grad():
            own, other = (
                m(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1) for m in (run.model, run.teacher_model)
            )
        total, count = total + divergence_terms(own, other, 0.5).sum(), count + len(completion)
    assert first == pytest.approx(float(total / count), rel=1e-5)


# ---------------------------------------------------------------------------------------------------- what is learned


@pytest.mark.parametrize("changes", [{"beta": 0.0}, {"beta": 0.5}, {"beta": 1.0}, {"loss_type": "policy_gradient"}])
def test_the_student_comes_nearer_to_its_teacher(changes, tmp_path):
    run = make(tmp_path, max_steps=30, learning_rate=1e-2, max_completion_length=8, **changes)
    before = run.evaluate()["eval_divergence"]
    run.train()
    assert run.evaluate()["eval_divergence"] < 0.92 * before


def test_the_policy_gradient_is_on_average_that_of_the_reverse_divergence(tmp_path):
    """Of one token, where the expectation over all that can be written is a sum."""
    student = tiny.causal_lm(initializer_range=0.3)
    run = make(tmp_path, student=student, loss_type="policy_gradient", max_completion_length=1, epsilon=0.9)
    ids = torch.tensor([[5, 9, 7]])
    logps = student(ids).logits[0, -1].log_softmax(-1)
    with torch.no_grad():
        teacher = run.teacher_model(ids).logits[0, -1].log_softmax(-1)
    every = logps.unsqueeze(1)  # each token as a completion of one token
    inputs = {"ref_logps": teacher.unsqueeze(1), "loss_mask": torch.ones_like(every)}
    from posttrain.rl.policy.logprobs import CompletionLogps

    losses = run.policy_loss(CompletionLogps(every, None, None), inputs)[:, 0]
    surrogate = (logps.detach().exp() * losses).sum()
    expected = divergence_terms(logps, teacher, 1.0).sum()
    weights = list(student.parameters())
    ours = torch.autograd.grad(surrogate, weights, retain_graph=True)
    for one, other in zip(ours, torch.autograd.grad(expected, weights), strict=True):
        assert_close(one, other, rtol=1e-3, atol=1e-6)


def test_a_model_whose_head_cannot_be_reached_has_the_same_loss(tmp_path, monkeypatch):
    from posttrain.lm.loss import lm_head

    usual = make(tmp_path, beta=0.5, lmbda=0.0).evaluate()
    monkeypatch.setattr(lm_head, "find_head", lambda model: (None, "It is in a box."))
    whole = make(tmp_path, beta=0.5, lmbda=0.0).evaluate()
    for name in ("eval_loss", "eval_entropy"):
        assert usual[name] == pytest.approx(whole[name], rel=1e-5)


def test_reward_functions_are_metrics_and_change_nothing(tmp_path):
    plain, scored = (make(tmp_path, options={"reward_funcs": given}) for given in (None, lambda completions: [1.0] * 4))
    for run in (plain, scored):
        run.train()
    assert logged(plain, "loss") == logged(scored, "loss")
    assert logged(scored, "reward") == [1.0, 1.0] and not logged(plain, "reward")


def test_the_teacher_is_neither_trained_nor_saved(tmp_path):
    run = make(tmp_path, save_strategy="steps", save_steps=1)
    before = {name: value.clone() for name, value in run.teacher_model.state_dict().items()}
    run.train()
    assert all(torch.equal(value, before[name]) for name, value in run.teacher_model.state_dict().items())
    other = make(tmp_path, teacher=tiny.causal_lm(seed=4, initializer_range=0.3, hidden_size=48))
    with pytest.raises(CheckpointError, match="another teacher.*teacher_model_name_or_path"):
        other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


def test_operations_are_those_of_the_student_and_of_the_teachers_forward(tmp_path):
    run = make(tmp_path, max_steps=1)
    run.train()
    batch = {"input_ids": torch.ones(4, 10, dtype=torch.long)}
    student, teacher = (model.num_parameters(exclude_embeddings=True) for model in (run.model, run.teacher_model))
    assert run.floating_point_ops(batch) == 40 * (6 * student + 2 * teacher)
    assert run.state.total_flos % (6 * student + 2 * teacher) == 0 < run.state.total_flos


def test_completions_end_where_the_model_reads_no_further(tmp_path):
    student = tiny.causal_lm(initializer_range=0.1, max_position_embeddings=16)
    prompt = tiny.tokenizer()(ROWS[0]["prompt"])["input_ids"]
    run = make(tmp_path, student=student, max_completion_length=40, generation_kwargs=None)
    samples = completed(run, ROWS[:4], 0)
    assert all(len(sample.prompt_ids) + len(sample.ids) <= 16 for sample in samples)
    assert any(len(sample.prompt_ids) + len(sample.ids) == 16 and not sample.finished for sample in samples)
    with pytest.raises(DataError, match="4 of 4 prompts leave no room for a completion, of the 16 tokens"):
        make(tmp_path, student=student, rows=[{"prompt": ROWS[0]["prompt"] * (16 // len(prompt) + 1)}] * 4)
    messages = [{"role": "user", "content": "why ? " * 20}, {"role": "assistant", "content": "so"}]
    with pytest.raises(DataError, match=r"leave no room for a completion, of the 16 tokens .* \(rows 0, 1, 2, 3\)"):
        make(tmp_path, student=student, rows=[{"messages": messages}] * 4, lmbda=0.0)


def test_a_teacher_in_four_bits(tmp_path):
    pytest.importorskip("bitsandbytes")
    tiny.causal_lm(seed=3, initializer_range=0.3, hidden_size=64, head_dim=16, intermediate_size=128).save_pretrained(
        tmp_path / "teacher"
    )
    run = make(
        tmp_path, options={"teacher_model": None}, lmbda=0.0,
        teacher_model_name_or_path=str(tmp_path / "teacher"), teacher_model_init_kwargs={"load_in_4bit": True},
    )  # fmt: skip
    kinds = {type(module).__name__ for module in run.teacher_model.modules()}
    assert "Linear4bit" in kinds
    whole = tiny.causal_lm(seed=3, initializer_range=0.3, hidden_size=64, head_dim=16, intermediate_size=128)
    whole = make(tmp_path, teacher=whole, lmbda=0.0)
    quantized, exact = (each.evaluate()["eval_loss"] for each in (run, whole))
    assert quantized == pytest.approx(exact, rel=0.3) and quantized != exact
    run.train()


@pytest.mark.parametrize("kind", [DistillationTrainer, GKDTrainer, IWOPDTrainer])
def test_max_length_bounds_prompt_and_completion_whoever_writes(kind, tmp_path):
    prompts = [tiny.tokenizer()(row["prompt"])["input_ids"] for row in ROWS]
    longest = max(map(len, prompts)) + 2
    share = {} if kind is IWOPDTrainer else {"lmbda": 0.5}
    run = make(tmp_path, kind, max_length=longest, max_completion_length=64, per_device_train_batch_size=8, **share)
    run.model.train()
    samples = [sample for number in range(4) for sample in completed(run, ROWS, number)]
    assert max(len(sample.prompt_ids) + len(sample.ids) for sample in samples) == longest
    run.train()


def test_iw_opd_takes_the_divergence_under_trls_name(tmp_path):
    with pytest.warns(FutureWarning, match="distillation_objective"):
        run = make(tmp_path, IWOPDTrainer, distillation_objective="jsd", beta=0.5, top_p=1.0)
    run.train()
    plain = make(tmp_path, DistillationTrainer, beta=0.5, disable_dropout=True)
    plain.train()
    assert run.args.distillation_objective == "jsd" and logged(run, "loss") == logged(plain, "loss")


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_arguments_of_a_teachers_server_are_warned_of_where_there_is_none(tmp_path):
    either = "has no effect without teacher_model_server_url or teacher_server_urls"
    with pytest.warns(UserWarning, match=f"loss_top_k=5 {either}; loss_add_tail=False {either}"):
        DistillationConfig(str(tmp_path), loss_top_k=5, loss_add_tail=False)
    here = {"temperature": 1.0, "loss_top_k": 5}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        DistillationConfig(str(tmp_path), teacher_model_server_url="http://host:1", **here)
        DistillationConfig(str(tmp_path), teacher_server_urls={"a": "http://host:1"}, **here)
    with pytest.raises(ConfigError, match="loss_top_k=0 compares the whole vocabulary, and a server tells some"):
        DistillationConfig(str(tmp_path), teacher_model_server_url="http://host:1", temperature=1.0, loss_top_k=0)
    with pytest.raises(ConfigError, match="use_teacher_server=True names no server; set teacher_model_server_url"):
        IWOPDConfig(str(tmp_path), use_teacher_server=True)


# ------------------------------------------------------------------------------------------------- other tokenizers


def test_texts_are_aligned_where_tokens_of_both_begin():
    student, teacher = tiny.tokenizer(300), tiny.tokenizer(384)
    text = " ".join(WORDS[:6])
    ids = [*student(text)["input_ids"], 1]
    made, common = translate(ids, student, teacher, {1})
    assert teacher.decode(made[:-1]) == text and made[-1] == teacher.eos_token_id
    assert common[0] == (0, 0) and common[-1] == (len(ids) - 1, len(made) - 1)
    for own, other in common:
        assert student.decode(ids[:own]) == teacher.decode(made[:other])
    assert 2 < len(common) < len(ids)


def test_a_teacher_with_other_tokens_teaches(tmp_path):
    other = tiny.tokenizer(300)
    other.save_pretrained(tmp_path / "tokens")
    teacher = tiny.causal_lm(seed=3, initializer_range=0.3, hidden_size=48, vocab_size=300)
    options = dict(teacher_tokenizer_name_or_path=str(tmp_path / "tokens"), max_completion_length=8)
    run = make(tmp_path, teacher=teacher, lmbda=0.0, **options)
    row = ROWS[0]
    loss = make(tmp_path, rows=[row] * 4, teacher=teacher, lmbda=0.0, **options).evaluate()["eval_loss"]
    tokenizer = tiny.tokenizer()
    ids = (tokenizer(row["completion"])["input_ids"] + [1])[:8]
    made, common = translate(ids, tokenizer, other, {1})
    prompt, asked = tokenizer(row["prompt"])["input_ids"], other(row["prompt"])["input_ids"]
    with torch.no_grad():
        own = run.model(torch.tensor([prompt + ids])).logits[0].softmax(-1)
        theirs = run.teacher_model(torch.tensor([asked + made])).logits[0].softmax(-1)
    gaps = [
        torch.nn.functional.pad(theirs[len(asked) + b - 1].sort(descending=True).values, (0, 84))
        - own[len(prompt) + a - 1].sort(descending=True).values
        for a, b in common
    ]
    assert loss == pytest.approx(float(torch.stack(gaps).abs().sum(1).mean()), rel=1e-5)
    before = run.evaluate()["eval_divergence"]
    run = make(tmp_path, teacher=teacher, max_steps=20, learning_rate=3e-2, lmbda=0.5, **options)
    run.train()
    assert run.evaluate()["eval_divergence"] < 0.8 * before


# ------------------------------------------------------------------------------------------------------------ servers


@contextlib.contextmanager
def serving(teacher):
    """(address, requests) of what `vllm serve` answers to a request for log-probabilities of a prompt."""
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.answer({"data": [{"id": "teacher"}]})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(body)
            with torch.no_grad():
                logps = teacher(torch.tensor([body["prompt"]])).logits[0].log_softmax(-1)
            told = [None]
            for place, token in enumerate(body["prompt"][1:]):
                top = {*logps[place].topk(body["prompt_logprobs"]).indices.tolist(), token}
                told.append({str(one): {"logprob": float(logps[place, one])} for one in top})
            self.answer({"choices": [{"text": "", "prompt_logprobs": told}]})

        def answer(self, value):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(value).encode())

        def log_message(self, *_):
            pass

    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{made.server_port}", asked
    made.shutdown()
    made.server_close()


@pytest.fixture
def server():
    """(address, requests, the tiny model behind it)."""
    teacher = tiny.causal_lm(seed=3, initializer_range=0.3, hidden_size=48)
    with serving(teacher) as (url, asked):
        yield url, asked, teacher


@pytest.mark.parametrize("changes", [{"beta": 0.5, "loss_top_k": 383}, {"loss_type": "policy_gradient"}], ids=str)
def test_a_teacher_behind_a_server_teaches_what_it_would_teach_here(changes, server, tmp_path):
    url, asked, teacher = server
    where = dict(teacher_model_server_url=url, teacher_request_timeout=90)
    there = make(tmp_path, options={"teacher_model": None}, lmbda=1.0, **where, **changes)
    assert there.teacher.servers[""].timeout == 90
    here = make(tmp_path, teacher=teacher, **{k: v for k, v in changes.items() if k != "loss_top_k"})
    for run in (there, here):
        run.train()
    assert logged(there, "loss") == pytest.approx(logged(here, "loss"), rel=1e-3)
    assert logged(there, "grad_norm") == pytest.approx(logged(here, "grad_norm"), rel=1e-3)
    assert len(asked) == 8 and asked[0]["model"] == "teacher" and asked[0]["max_tokens"] == 1


def test_few_tokens_of_a_server_lower_the_divergence_too(server, tmp_path):
    url, _, _ = server
    changes = dict(teacher_model_server_url=url, loss_top_k=8, max_steps=20, learning_rate=3e-2, lmbda=0.0, beta=0.0)
    run = make(tmp_path, options={"teacher_model": None}, **changes)
    before = run.evaluate()["eval_loss"]
    run.train()
    assert run.evaluate()["eval_loss"] < 0.6 * before


def test_each_row_names_its_own_of_several_teachers(server, tmp_path):
    url, asked, _ = server
    other = tiny.causal_lm(seed=4, initializer_range=0.3, hidden_size=48)
    rows = [{"prompt": row["prompt"], "teacher_id": "ab"[number % 2]} for number, row in enumerate(ROWS)]
    with serving(other) as (second, asked_second):
        urls = {"a": url, "b": second}
        run = make(tmp_path, rows=rows, options={"teacher_model": None}, teacher_server_urls=urls, loss_top_k=4)
        run.train()
        assert len(asked) == len(asked_second) == 4
        prompts = {tuple(run.processing_class(row["prompt"])["input_ids"]) for row in rows[1::2]}
        assert all(any(tuple(body["prompt"][: len(p)]) == p for p in prompts) for body in asked_second)
        rows = [row | {"teacher_id": "c"} for row in rows]
        run = make(tmp_path, rows=rows, options={"teacher_model": None}, teacher_server_urls=urls, loss_top_k=4)
        with pytest.raises(DataError, match="teacher_id='c', which is not among the teachers"):
            run.train()


def test_trls_trainers_of_teachers_behind_servers(server, tmp_path):
    url, asked, _ = server
    none, changes = {"teacher_model": None}, dict(learning_rate=3e-2, max_steps=4)
    plain = make(tmp_path, options=none, teacher_model_server_url=url, loss_top_k=1, **changes)
    named = ServerDistillationTrainer(
        tiny.causal_lm(initializer_range=0.1),
        config(ServerDistillationConfig, tmp_path, teacher_model_server_url=url, **changes),
        ROWS,
        processing_class=tiny.tokenizer(),
    )
    for run in (plain, named):
        run.train()
    assert logged(plain, "loss") == logged(named, "loss")
    with pytest.raises(ConfigError, match="behind a server, and none is named; set teacher_model_server_url"):
        ServerDistillationConfig(str(tmp_path))

    args = config(AsyncDistillationConfig, tmp_path, teacher_server_urls={"default": url}, teacher_top_k=3, **changes)
    assert (args.max_staleness, args.loss_top_k, args.beta, args.loss_add_tail) == (4, 3, 0.0, True)
    assert AsyncDistillationConfig(str(tmp_path)).teacher_server_urls == {"default": "http://localhost:8001"}
    engine = CopiedGenerator(LocalGenerator(tiny.tokenizer()))
    run = AsyncDistillationTrainer(
        tiny.causal_lm(initializer_range=0.1), args, ROWS, tiny.tokenizer(), generator=engine
    )
    run.train()
    assert run.state.global_step == 4 and 0 < max(logged(run, "staleness/max")) <= 4
    assert asked[-1]["prompt_logprobs"] == 3
    with pytest.raises(ValueError, match="weight_transfer is an object of trl's own loop"):
        AsyncDistillationTrainer(tiny.causal_lm(), args, ROWS, tiny.tokenizer(), weight_transfer=object())


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(("changes", "said"), [
    ({"sync_ref_model": True}, "a teacher stays as it is"),
    ({"loss_type": "policy_gradient", "lmbda": 0.5}, "set lmbda=1"),
    ({"beta": 1.5}, "beta=1.5"),
    ({"reverse_kl_top_1_mode": "argmax"}, "reverse_kl_top_1_mode='argmax' has no effect"),
    ({"max_staleness": 1, "lmbda": 0.5, "seq_kd": True}, "the teacher writes too"),
    ({"teacher_model_server_url": "http://x", "temperature": 0.5}, "loss_temperature=1"),
    ({"teacher_model_server_url": "http://x", "seq_kd": True}, "in this process"),
], ids=str)  # fmt: skip
def test_arguments_that_cannot_be_are_refused(changes, said, tmp_path):
    with pytest.raises(ConfigError, match=said):
        DistillationConfig(str(tmp_path), **changes)


def test_a_missing_teacher_and_missing_completions_are_found_before_anything_is_loaded(tmp_path):
    with pytest.raises((PreflightError, ValueError), match="No teacher"):
        make(tmp_path, options={"teacher_model": None})
    with pytest.raises((PreflightError, ValueError), match="lmbda=0.5 learns from"):
        make(tmp_path, rows=[{"prompt": "a"}] * 8, lmbda=0.5)
    with pytest.raises((PreflightError, ValueError), match="Two teachers"):
        make(tmp_path, teacher_model_server_url="http://x")
    for changes in ({"teacher_model_init_kwargs": {"dtype": "float32"}}, {"teacher_model_revision": "main"}):
        with pytest.raises((PreflightError, ValueError), match=f"{next(iter(changes))} is for a teacher given by name"):
            make(tmp_path, **changes)


def test_a_teacher_with_other_tokens_is_not_compared_token_by_token(tmp_path):
    with pytest.raises(ValueError, match="teacher_tokenizer_name_or_path"):
        make(tmp_path, teacher=tiny.causal_lm(vocab_size=300))


# ------------------------------------------------------------------------------------------------------------------ GKD


def test_gkd_is_distillation_with_its_defaults(tmp_path):
    config = GKDConfig(str(tmp_path), max_new_tokens=7)
    assert (config.lmbda, config.beta, config.temperature, config.measured_at) == (0.5, 0.5, 0.9, 1.0)
    assert config.max_new_tokens == config.max_completion_length == 7
    run = make(tmp_path, kind=GKDTrainer)
    assert run.generation_config.temperature == 0.9 and run.generation_config.max_new_tokens == 5
    run.train()
    assert len(logged(run, "loss")) == 2


def test_the_divergence_of_whole_logits_is_what_training_takes_in_tiles():
    torch.manual_seed(0)
    student, teacher = torch.randn(2, 5, 11), torch.randn(2, 5, 11)
    labels = torch.tensor([[3, -100, 2, 1, -100], [-100, 4, 5, 6, 7]])
    loss = DistillationTrainer.generalized_jsd_loss(student, teacher, labels, beta=0.3, temperature=0.7)
    logps = [(logits[labels != -100] / 0.7).log_softmax(-1) for logits in (student, teacher)]
    assert_close(loss, divergence_terms(*logps, 0.3).sum() / 7)
    assert GKDTrainer.generalized_jsd_loss(student, teacher, reduction="none").shape == student.shape
    whole = [logits.softmax(-1) for logits in (student, teacher)]
    of_probabilities = GOLDTrainer.generalized_jsd_loss(*whole, labels, beta=0.3, logits_are_probs=True)
    assert_close(of_probabilities, GOLDTrainer.generalized_jsd_loss(student, teacher, labels, beta=0.3))


def test_what_a_script_generates_is_labelled_to_its_end_and_gold_adds_the_texts(tmp_path):
    run = make(tmp_path, kind=GOLDTrainer)
    prompts, mask = torch.tensor([[0, 5], [6, 2]]), torch.tensor([[0, 1], [1, 1]])
    written = torch.tensor([[7, 2, 0, 0], [7, 8, 9, 10]])  # 2 ends a completion, and may be in a prompt

    class Model:
        def generate(self, input_ids, **options):
            return SimpleNamespace(sequences=torch.cat([input_ids, written], 1))

    asked = {"prompts": prompts, "prompt_attention_mask": mask}
    ids, attended, labels, *texts = run.generate_on_policy_outputs(Model(), asked, SimpleNamespace(eos_token_id=2))
    assert labels.tolist() == [[-100, -100, 7, 2, -100, -100], [-100, -100, 7, 8, 9, 10]]
    assert attended.tolist() == [[0, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]]
    decode = run.processing_class.decode
    assert texts == [[decode([5]), decode([6, 2])], [decode([7, 2]), decode([7, 8, 9, 10])]]
    *of_gkd, endless = GKDTrainer.generate_on_policy_outputs(Model(), asked, SimpleNamespace(eos_token_id=None))
    assert of_gkd[0].equal(ids) and (endless[:, 2:] == written).all()


@pytest.mark.parametrize("kind", ["list", "dataset", "stream"])
def test_rows_of_gold_have_their_tokens_for_scripts_and_are_learned_from_as_they_were(tmp_path, kind):
    talk = [[{"role": "user", "content": "2 + 3 ?"}, {"role": "assistant", "content": "5 clips"}]] * 4
    rows = [{"messages": messages} for messages in talk]
    words = tiny.tokenizer()
    asked = words.apply_chat_template(talk[0][:1], add_generation_prompt=True)["input_ids"]
    whole = words.apply_chat_template(talk[0])["input_ids"]
    given = {"list": rows, "dataset": Dataset.from_list(rows), "stream": Dataset.from_list(rows).to_iterable_dataset()}
    sets = {"train_dataset": given[kind], "eval_dataset": {"one": given[kind]}}
    run = make(tmp_path, kind=GOLDTrainer, lmbda=0.0, max_length=len(whole) - 1, options=sets)
    row = next(iter(run.train_dataset))
    assert row["input_ids"] == whole[:-1] and row["messages"] == talk[0]
    assert row["completion_mask"] == [0] * len(asked) + [1] * (len(whole) - 1 - len(asked))
    assert next(iter(run.eval_dataset["one"])) == row
    samples = completed(run, [row], 0)
    assert [*samples[0].prompt_ids, *samples[0].ids] == row["input_ids"][: len(asked) + 5]
    run.train()
    assert len(logged(run, "loss")) == 2


def test_rows_of_gold_whose_prompts_environments_make_stay_as_they_are(tmp_path):
    class Asks:
        def reset(self, **row):
            return "Betty ?"

        def look(self) -> str:
            """Look."""
            return ""

    rows = [{"number": 1}] * 8
    given = {"environment_factory": Asks, "train_dataset": rows, "eval_dataset": None}
    given["processing_class"] = tiny.tokenizer(chat_template=tiny.CHATML_WITH_TOOLS)
    assert make(tmp_path, kind=GOLDTrainer, lmbda=1.0, options=given).train_dataset == rows
