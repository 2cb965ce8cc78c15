"""Trains, saves, loads and samples with the SDK tinker, unchanged, and prints what it got as JSON.

It stands alone: the environment of agents has no torch. Its words: the name of the base model, and the rows as JSON.
"""

import json
import math
import sys

import tinker
from tinker import types

model, rows = sys.argv[1], json.loads(sys.argv[2])
service = tinker.ServiceClient()
training = service.create_lora_training_client(base_model=model, rank=4, seed=1).result()
data = [
    types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs={"target_tokens": targets, "weights": w})
    for tokens, targets, w in rows
]
found = {"start": training.save_weights_for_sampler("start").result().path, "losses": [], "logprobs": []}
pending = []
for _ in range(3):  # without a wait between them
    each = [training.forward_backward([datum], "cross_entropy") for datum in data]
    pending.append((each, training.optim_step(types.AdamParams(learning_rate=1e-2, weight_decay=0.1))))
for each, step in pending:
    found["losses"] += [one.result().metrics["loss:sum"] for one in each]
    found["logprobs"] += [one.result().loss_fn_outputs[0]["logprobs"].tolist() for one in each]
    step.result()
state = training.save_state("state").result().path
prompt = types.ModelInput.from_ints(rows[0][0])
greedy = types.SamplingParams(max_tokens=5, temperature=0.0, stop=[])
sampler = training.save_weights_and_get_sampling_client().result()
sample = sampler.sample(prompt, 2, greedy, include_prompt_logprobs=True).result()
found["sampled"] = [[one.tokens, one.logprobs, one.stop_reason] for one in sample.sequences]
found["prompt"] = [None if value is None or math.isnan(value) else value for value in sample.prompt_logprobs]
found["scored"] = sampler.compute_logprobs(prompt).result()
loaded = service.create_training_client_from_state_with_optimizer(state).result()
for client in (training, loaded):
    client.forward_backward(data, "cross_entropy")
    client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
ends = [client.forward(data, "cross_entropy").result() for client in (training, loaded)]
found["continued"] = [[row["logprobs"].tolist() for row in end.loss_fn_outputs] for end in ends]
found["end"] = training.save_weights_for_sampler("end").result().path
saved = service.create_sampling_client(model_path=found["end"]).result()
found["saved"] = saved.sample(prompt, 1, greedy).result().sequences[0].tokens
found["many"] = len(training.forward(data * 600, "cross_entropy").result().loss_fn_outputs)  # in two requests
found["errors"] = []
for work in (
    lambda: training.forward_backward(data, "gspo").result(),
    lambda: service.create_lora_training_client(base_model="other", rank=4).result(),
    lambda: saved.sample(prompt, 1, types.SamplingParams(max_tokens=10**6)).result(),
):
    try:
        work()
    except Exception as error:
        found["errors"].append(f"{type(error).__name__}: {error}")
print(json.dumps(found))
