"""Prompts with images for vLLM: what the client sends, and what it refuses. `tests/vllm` has the same against vLLM."""

from __future__ import annotations

import base64
import io

import pytest

from posttrain.lm.images.images import Video
from posttrain.rl import GRPOConfig, GRPOTrainer
from posttrain.rl.generation import Sampling
from posttrain.rl.generation.protocol import Pictured
from posttrain.rl.generation.vllm import VLLMServerGenerator
from tests import tiny, tiny_vision
from tests.rl.generation.test_vllm import Direct, OpenAI, Server
from tests.rl.online.test_rollout_images import digit_sum, prompts

image_module = pytest.importorskip("PIL.Image")
TOKENS = 4  # of an image of 16 x 16 pixels, for the tiny LLaVA


class Seeing(OpenAI):
    """What ``vllm serve --enable-scale-out`` answers for a model that sees."""

    def do_POST(self):
        if self.path != "/inference/v1/generate":
            return super().do_POST()
        if (asked := self.asked()) is None:
            return
        self.server.requests.append(asked)
        if self.server.settings.get("closed"):
            return self.answer("not started for it", 404)
        image, read = tiny_vision.number("<image>"), []
        for token in asked["token_ids"]:
            read += [token] * (TOKENS if token == image else 1)
        written = {"content": [{"logprob": -1.5}, {"logprob": -0.5}]}
        choices = [
            {"index": i, "token_ids": [7 + i, 9], "logprobs": written, "finish_reason": "length"}
            for i in range(asked["sampling_params"]["n"])
        ]
        self.answer({"choices": choices[::-1], "prompt_token_ids": read if asked.get("return_token_ids") else None})


@pytest.fixture
def serve():
    made = []

    def begin(handler=Seeing, **settings):
        made.append(Server(tiny.causal_lm(), handler, **settings))
        made[-1].requests, made[-1].version = [], "posttrain-weights-1"  # as if it had got weights
        return made[-1]

    yield begin
    for server in made:
        server.shutdown()


def client_of(server):
    url = f"http://127.0.0.1:{server.server_port}"
    return VLLMServerGenerator(url, timeout=5, transport=Direct(lambda weights, target: None))


def pixels(url):
    kind, _, data = url.partition(",")
    assert kind == "data:image/png;base64"
    return image_module.open(io.BytesIO(base64.b64decode(data))).convert("RGB").tobytes()


def test_a_server_gets_placeholders_and_the_very_pixels(serve, tmp_path):
    server = serve()
    model, processor = tiny_vision.llava()
    args = GRPOConfig(
        output_dir=str(tmp_path), per_device_train_batch_size=4, num_generations=2, report_to="none", use_cpu=True,
        max_completion_length=2, use_vllm=True, vllm_mode="server", gradient_checkpointing=False,
        vllm_server_base_url=f"http://127.0.0.1:{server.server_port}",
    )  # fmt: skip
    trainer = GRPOTrainer(model, digit_sum, args, prompts(), None, processor, generator=client_of(server))
    samples = trainer.new_samples([row for row in prompts()[:3] for _ in range(2)])
    samples = trainer.generate(samples, trainer.sampling())
    assert [sample.ids for sample in samples[:4]] == [[7, 9], [8, 9]] * 2
    seen = {pixels(one["content_parts"][0]["url"]): one for one in server.requests}
    assert len(server.requests) == len(seen) == 2  # one for each group; text alone goes the usual way
    for row in prompts()[:2]:
        asked = seen[row["images"][0].tobytes()]
        assert [part["type"] for part in asked["content_parts"]] == ["image_url"]
        assert asked["token_ids"].count(tiny_vision.number("<image>")) == 1
        assert asked["sampling_params"]["n"] == 2 and asked["return_token_ids"]
        assert asked["sampling_params"]["logit_bias"] == {str(tiny_vision.number("<image>")): -100.0}
    assert server.paths.count("/v1/completions") == 1 and samples[4].shown.tensors == {}


def test_a_conversation_goes_on_behind_the_images(serve):
    from posttrain.lm.images.vision import Shown
    from posttrain.rl.samples.images import pictured

    picture, image = tiny_vision.image(0), tiny_vision.number("<image>")
    shown = Shown("", pictured=Pictured([5, image, 6], [picture], [5, *[image] * TOKENS, 6]))
    whole = [5, *[image] * TOKENS, 6, 30, 31]
    prompt = pictured(whole, shown)
    assert (prompt.ids, prompt.whole) == ([5, image, 6, 30, 31], whole)
    client_of(serve()).generate([prompt], 1, Sampling(2), [0])  # which checks what the server has read
    assert pictured([5, 6], Shown("")) == [5, 6]


def test_servers_without_images_are_refused(serve):
    prompt = Pictured([5, tiny_vision.number("<image>")], [tiny_vision.image(0)], [5, 384, 384])
    with pytest.raises(ValueError, match="takes no prompts with images.*--enable-scale-out"):
        client_of(serve(Seeing, closed=True)).generate([prompt], 1, Sampling(2), [0])


def test_a_server_whose_processor_makes_other_tokens_is_refused(serve):
    image = tiny_vision.number("<image>")
    prompt = Pictured([5, image, 6], [tiny_vision.image(0)], [5, *[image] * (TOKENS + 1), 6])
    with pytest.raises(ValueError, match="reads a prompt with 1 images as 6 tokens, and the trainer as 7"):
        client_of(serve()).generate([prompt], 1, Sampling(2), [0])


def test_videos_are_refused():
    with pytest.raises(ValueError, match="A prompt shows a video, which vLLM is not given"):
        Pictured([5], [Video([tiny_vision.image(0)])], [5])


class Colocated:
    """The part of ``vllm.LLM`` that generates."""

    def __init__(self, read):
        self.read, self.asked = read, []

    def generate(self, prompts, sampling_params, use_tqdm):
        from types import SimpleNamespace

        self.asked += prompts
        logps = [{9: SimpleNamespace(logprob=-0.5)}]
        written = SimpleNamespace(token_ids=[9], logprobs=logps, finish_reason="stop")
        return [SimpleNamespace(prompt_token_ids=self.read, outputs=[written]) for _ in prompts]


@pytest.mark.parametrize("tokens", [TOKENS, TOKENS + 1])
def test_vllm_in_the_process_gets_the_images_themselves(tokens, monkeypatch):
    from posttrain.rl.generation.vllm_colocated import VLLMColocatedGenerator

    image, picture = tiny_vision.number("<image>"), tiny_vision.image(0)
    engine = VLLMColocatedGenerator()
    engine._llm, engine._has_weights = Colocated([5, *[image] * TOKENS, 6]), True
    engine._model = tiny.causal_lm()
    monkeypatch.setattr(engine, "_params", lambda request: request.sampling)
    prompt = Pictured([5, image, 6], [picture], [5, *[image] * tokens, 6])
    if tokens > TOKENS:
        with pytest.raises(ValueError, match="The vLLM in this process reads a prompt with 1 images as 6 tokens"):
            engine.generate([prompt], 1, Sampling(1), [0])
        return
    done = engine.generate([prompt], 2, Sampling(1, never=(image,)), [0, 1])
    assert done.ids == [[9], [9]] and done.logps == [[-0.5], [-0.5]]
    assert engine._llm.asked == [{"prompt_token_ids": [5, image, 6], "multi_modal_data": {"image": [picture]}}] * 2
