"""A game of several turns, learned from scratch over HTTP: find a number from 0 to 6 in three guesses, by halving.

python examples/guess_the_number.py                          trains, in minutes on a CPU
python examples/guess_the_number.py out/guess_the_number     evaluates what was trained
"""

import sys

import httpx
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from posttrain.rl import GRPOConfig, GRPOTrainer

WORDS = ["<pad>", "<end>", "guess", "higher", "lower", *"0123456"]


async def agent(episode, row):
    """Plays one game; any program that speaks OpenAI's API would do."""
    messages, headers = [{"role": "user", "content": "guess"}], {"authorization": f"Bearer {episode.api_key}"}
    async with httpx.AsyncClient(headers=headers, timeout=60) as policy:
        for _ in range(3):
            body = {"messages": messages, "max_tokens": 1}
            answer = (await policy.post(f"{episode.base_url}/chat/completions", json=body)).json()
            guess = answer["choices"][0]["message"]["content"]
            if guess == str(row["number"]):
                return 1.0
            hint = "higher" if guess < str(row["number"]) else "lower"
            messages += [{"role": "assistant", "content": guess}, {"role": "user", "content": hint}]
    return 0.0


def trainer(folder=None, out="out/guess_the_number", **changes):
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    special = {"pad_token": "<pad>", "eos_token": "<end>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, chat_template=template, **special)
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    size |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = Qwen3Config(vocab_size=len(WORDS), head_dim=32, max_position_embeddings=32, eos_token_id=1, **size)
    model = Qwen3ForCausalLM.from_pretrained(folder) if folder else Qwen3ForCausalLM(config)
    options = dict(max_steps=200, per_device_train_batch_size=112, num_generations=16, max_completion_length=8)
    options |= dict(
        learning_rate=3e-3, per_device_eval_batch_size=112, save_strategy="no", gradient_checkpointing=False
    )
    rows = [{"number": number} for number in range(7)]
    args = GRPOConfig(output_dir=out, **(options | changes))
    return GRPOTrainer(model, None, args, rows, rows, tokenizer, agent=agent)


def main(folder=None):
    run = trainer(folder)
    before = run.evaluate()["eval_reward"]
    if folder is None:
        run.train()
        run.save_model()
        print(f"Games won: {before:.0%} before training, {run.evaluate()['eval_reward']:.0%} after")


if __name__ == "__main__":
    main(*sys.argv[1:])
