"""Vision-language models of every family, with their real processors, small enough to train in a test.

`FAMILIES` maps a name to a function that gives (model, processor). Nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers

from tests import tiny

#: Placeholders and edges of images in all families; the ids are the same in each: `WORDS.index(word) + 384`.
WORDS = [
    "<image>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<start_of_image>",
    "<image_soft_token>", "<end_of_image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>", "<img>",
    "<IMG_CONTEXT>", "</img>", "[IMG]", "[IMG_BREAK]", "[IMG_END]", "<video>", "<|image|>", "<|image>", "<image|>",
    "<|video|>", "<|audio|>", "<|audio>", "<audio|>",
]  # fmt: skip
VOCABULARY = 384 + len(WORDS)
TEXT = dict(
    vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=1024, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    tie_word_embeddings=False,
)  # fmt: skip
SIGHT = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_channels=3)
GRID = dict(patch_size=4, spatial_merge_size=2, temporal_patch_size=2)


def number(word: str) -> int:
    return 384 + WORDS.index(word)


def template(image: str, video: str = "") -> str:
    """ChatML for contents in parts, with `image` where an image is, and `video` where a video is."""
    return (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% for part in message['content'] %}"
        "{% if part['type'] == 'image' %}" + image + "{% elif part['type'] == 'video' %}" + video + "{% else %}"
        "{{ part['text'] }}{% endif %}{% endfor %}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


def tokenizer(**named: str) -> Any:
    """The tiny tokenizer with all placeholders; `named` become its attributes, such as ``boi_token``."""
    words = tiny.tokenizer(chat_template=None)
    words.add_special_tokens({"extra_special_tokens": WORDS}, replace_extra_special_tokens=False)
    for name, word in named.items():
        words.SPECIAL_TOKENS_ATTRIBUTES = [*words.SPECIAL_TOKENS_ATTRIBUTES, name]
        setattr(words, name, word)
    return words


def build(model_class: type, config: Any, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = model_class(config)
    with torch.no_grad():  # far from 0, so that an image changes a loss that can be compared
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.mul_(5) if weight.any() else weight.normal_(0, 0.1)
    return model


def build_processor(processor_class: type, *parts: Any, **options: Any) -> Any:
    """A processor without the parts that it is not given: those for videos and sound need packages of their own."""
    from transformers.processing_utils import ProcessorMixin

    check = ProcessorMixin.check_argument_for_proper_class

    def check_given(self, name: str, part: Any) -> Any:
        return None if part is None else check(self, name, part)

    with patch.object(ProcessorMixin, "check_argument_for_proper_class", check_given):
        processor = processor_class(*parts, **options)
    if any(getattr(processor, name) is None for name in processor.get_attributes()):
        processor.save_pretrained = processor.tokenizer.save_pretrained  # transformers saves whole ones alone
    return processor


def _square(size: int) -> dict[str, Any]:
    return {"size": {"height": size, "width": size}}


def llava(seed: int = 0) -> tuple[Any, Any]:
    from transformers import (
        CLIPImageProcessorPil,
        CLIPVisionConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
        Qwen3Config,
    )

    sight = CLIPVisionConfig(**SIGHT, image_size=16, patch_size=8, projection_dim=16)
    options = {"vision_feature_select_strategy": "default", "vision_feature_layer": -1}
    config = LlavaConfig(
        vision_config=sight, text_config=Qwen3Config(**TEXT), image_token_index=number("<image>"), **options
    )
    pixels = CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    rest = {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    processor = LlavaProcessor(pixels, tokenizer(), chat_template=template("<image>"), **rest)
    return build(LlavaForConditionalGeneration, config, seed), processor


def llava_next(seed: int = 0) -> tuple[Any, Any]:
    from transformers import (
        CLIPVisionConfig,
        LlavaNextConfig,
        LlavaNextForConditionalGeneration,
        LlavaNextImageProcessorPil,
        LlavaNextProcessor,
        Qwen3Config,
    )

    sight = CLIPVisionConfig(**SIGHT, image_size=16, patch_size=8, projection_dim=16)
    points = [[16, 32], [32, 16], [32, 32]]
    options = {"vision_feature_select_strategy": "default", "vision_feature_layer": -1, "image_grid_pinpoints": points}
    config = LlavaNextConfig(
        vision_config=sight, text_config=Qwen3Config(**TEXT), image_token_index=number("<image>"), **options
    )
    pixels = LlavaNextImageProcessorPil(
        size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}, image_grid_pinpoints=points
    )
    rest = {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    processor = LlavaNextProcessor(pixels, tokenizer(), chat_template=template("<image>"), **rest)
    return build(LlavaNextForConditionalGeneration, config, seed), processor


def _qwen(name: str, text: dict[str, Any], sight: dict[str, Any], seed: int, processor_name: str) -> tuple[Any, Any]:
    words = tokenizer()
    ids = {
        "image_token_id": number("<|image_pad|>"),
        "video_token_id": number("<|video_pad|>"),
        "vision_start_token_id": number("<|vision_start|>"),
        "vision_end_token_id": number("<|vision_end|>"),
    }
    config = getattr(transformers, f"{name}Config")(text_config=TEXT | text, vision_config=GRID | sight, **ids)
    limits = {"shortest_edge": 16 * 16, "longest_edge": 32 * 32}
    pixels = transformers.Qwen2VLImageProcessorPil(size=limits, patch_size=4, merge_size=2)
    shown = template("<|vision_start|><|image_pad|><|vision_end|>")
    processor = build_processor(getattr(transformers, processor_name), pixels, words, chat_template=shown)
    return build(getattr(transformers, f"{name}ForConditionalGeneration"), config, seed), processor


MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}


def qwen2_vl(seed: int = 0) -> tuple[Any, Any]:
    sight = {"depth": 2, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "mlp_ratio": 2}
    return _qwen("Qwen2VL", MROPE, sight, seed, "Qwen2VLProcessor")


def qwen2_5_vl(seed: int = 0) -> tuple[Any, Any]:
    sight = {"depth": 2, "hidden_size": 16, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 16}
    sight |= {"fullatt_block_indexes": [1], "window_size": 16}
    return _qwen("Qwen2_5_VL", MROPE, sight, seed, "Qwen2_5_VLProcessor")


def qwen3_vl(seed: int = 0) -> tuple[Any, Any]:
    sight = {"depth": 2, "hidden_size": 16, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 16}
    sight |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 64}
    return _qwen("Qwen3VL", MROPE, sight, seed, "Qwen3VLProcessor")


def qwen3_5(seed: int = 0) -> tuple[Any, Any]:
    sight = {"depth": 2, "hidden_size": 16, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 16}
    sight |= {"num_position_embeddings": 64}
    text = {"layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 8, "linear_value_head_dim": 8}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "partial_rotary_factor": 1.0}
    text |= {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "rope_parameters": rope}
    return _qwen("Qwen3_5", text, sight, seed, "Qwen3VLProcessor")


def gemma3(seed: int = 0) -> tuple[Any, Any]:
    from transformers import (
        Gemma3Config,
        Gemma3ForConditionalGeneration,
        Gemma3ImageProcessorPil,
        Gemma3Processor,
    )

    named = {"boi_token": "<start_of_image>", "image_token": "<image_soft_token>", "eoi_token": "<end_of_image>"}
    ids = {f"{part}_token_index": number(named[f"{part}_token"]) for part in ("boi", "image", "eoi")}
    sight = SIGHT | {"image_size": 16, "patch_size": 4, "vision_use_head": False}
    text = TEXT | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64}
    config = Gemma3Config(text_config=text, vision_config=sight, mm_tokens_per_image=4, **ids)
    pixels = Gemma3ImageProcessorPil(**_square(16))
    shown = template("<start_of_image>")
    processor = Gemma3Processor(pixels, tokenizer(**named), chat_template=shown, image_seq_length=4)
    return build(Gemma3ForConditionalGeneration, config, seed), processor


def _with_torchvision() -> None:
    """Skip the test where transformers 5.17 is without torchvision, which it needs for more families than 5.23."""
    if transformers.__version__.startswith("5.17."):
        pytest.importorskip("torchvision")


def gemma4(seed: int = 0) -> tuple[Any, Any]:
    _with_torchvision()
    from transformers import (
        Gemma4Config,
        Gemma4ForConditionalGeneration,
        Gemma4ImageProcessorPil,
        Gemma4Processor,
    )

    named = {"boi_token": "<|image>", "image_token": "<|image|>", "eoi_token": "<image|>", "audio_token": "<|audio|>"}
    named |= {"boa_token": "<|audio>", "eoa_token": "<audio|>"}
    ids = {f"{name}_id": number(named[name]) for name in ("boi_token", "image_token", "eoi_token", "audio_token")}
    ids |= {"video_token_id": number("<|video|>"), "boa_token_id": number("<|audio>")}
    ids |= {"eoa_token_index": number("<audio|>")}
    sight = SIGHT | {"num_key_value_heads": 2, "head_dim": 8, "patch_size": 4, "pooling_kernel_size": 2}
    sight |= {"position_embedding_size": 64}
    text = TEXT | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64}
    text |= {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 4, "global_head_dim": 8}
    text |= {"use_bidirectional_attention": "vision"}
    config = Gemma4Config(text_config=text, vision_config=sight, audio_config=None, **ids)
    pixels = Gemma4ImageProcessorPil(patch_size=4, max_soft_tokens=70, pooling_kernel_size=2)
    parts = {"feature_extractor": None, "image_processor": pixels, "tokenizer": tokenizer(**named)}
    options = {"video_processor": None, "chat_template": template("<|image|>"), "image_seq_length": 70}
    processor = build_processor(Gemma4Processor, **parts, **options)
    return build(Gemma4ForConditionalGeneration, config, seed), processor


def _idefics(name: str, seed: int) -> tuple[Any, Any]:
    _with_torchvision()
    sight = SIGHT | {"image_size": 16, "patch_size": 4}
    text = transformers.LlamaConfig(**TEXT)
    options = {"image_token_id": number("<image>"), "scale_factor": 2, "pad_token_id": 0}
    config = getattr(transformers, f"{name}Config")(vision_config=sight, text_config=text, **options)
    pixels = transformers.Idefics3ImageProcessorPil(
        size={"longest_edge": 32}, max_image_size={"longest_edge": 16}, do_image_splitting=True
    )
    processor = transformers.Idefics3Processor(pixels, tokenizer(), image_seq_len=4, chat_template=template("<image>"))
    model = build(getattr(transformers, f"{name}ForConditionalGeneration"), config, seed)
    return model, processor


def idefics3(seed: int = 0) -> tuple[Any, Any]:
    return _idefics("Idefics3", seed)


def smolvlm(seed: int = 0) -> tuple[Any, Any]:
    return _idefics("SmolVLM", seed)


def idefics2(seed: int = 0) -> tuple[Any, Any]:
    """Its processor does not report what it puts in the place of an image."""
    from transformers import (
        Idefics2Config,
        Idefics2ForConditionalGeneration,
        Idefics2ImageProcessorPil,
        Idefics2Processor,
        MistralConfig,
    )

    sight = SIGHT | {"image_size": 16, "patch_size": 4}
    perceiver = {"hidden_size": 16, "resampler_n_latents": 4, "resampler_n_heads": 2, "resampler_head_dim": 8}
    perceiver |= {"num_key_value_heads": 1, "resampler_depth": 1}
    options = {"image_token_id": number("<image>"), "perceiver_config": perceiver}
    text = MistralConfig(**TEXT, sliding_window=None)
    config = Idefics2Config(vision_config=sight, text_config=text, **options)
    pixels = Idefics2ImageProcessorPil(size={"longest_edge": 16, "shortest_edge": 12}, do_image_splitting=False)
    processor = Idefics2Processor(pixels, tokenizer(), image_seq_len=4, chat_template=template("<image>"))
    model = build(Idefics2ForConditionalGeneration, config, seed)
    with torch.no_grad():  # a mean over patches, which differs little between images
        for weight in model.model.connector.parameters():
            weight.mul_(4)
    return model, processor


def internvl(seed: int = 0) -> tuple[Any, Any]:
    from transformers import (
        GotOcr2ImageProcessorPil,
        InternVLConfig,
        InternVLForConditionalGeneration,
        InternVLProcessor,
        Qwen3Config,
    )

    named = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"}
    named |= {"video_token": "<video>"}
    sight = SIGHT | {"image_size": [16, 16], "patch_size": [4, 4]}
    options = {"image_token_id": number("<IMG_CONTEXT>"), "image_seq_length": 4}
    config = InternVLConfig(vision_config=sight, text_config=Qwen3Config(**TEXT), **options)
    pixels = GotOcr2ImageProcessorPil(**_square(16), crop_to_patches=True, min_patches=1, max_patches=2)
    shown = template("<IMG_CONTEXT>")
    processor = build_processor(InternVLProcessor, pixels, tokenizer(**named), image_seq_length=4, chat_template=shown)
    return build(InternVLForConditionalGeneration, config, seed), processor


def _pixtral_processor(merge: int) -> Any:
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
    from transformers.models.pixtral.processing_pixtral import PixtralProcessor

    side = {"height": 4 * merge, "width": 4 * merge}
    pixels = PixtralImageProcessorPil(size={"longest_edge": 32}, patch_size=side)
    rest = {"patch_size": 4, "spatial_merge_size": merge, "chat_template": template("[IMG]")}
    return PixtralProcessor(pixels, tokenizer(), **rest)


def pixtral(seed: int = 0) -> tuple[Any, Any]:
    from transformers import LlavaConfig, LlavaForConditionalGeneration, MistralConfig, PixtralVisionConfig

    sight = PixtralVisionConfig(**SIGHT, image_size=32, patch_size=4, rope_parameters={"rope_theta": 1e4})
    options = {"vision_feature_select_strategy": "full", "vision_feature_layer": -1}
    text = MistralConfig(**TEXT, sliding_window=None)
    config = LlavaConfig(vision_config=sight, text_config=text, image_token_index=number("[IMG]"), **options)
    return build(LlavaForConditionalGeneration, config, seed), _pixtral_processor(1)


def mistral3(seed: int = 0) -> tuple[Any, Any]:
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration, MistralConfig, PixtralVisionConfig

    sight = PixtralVisionConfig(**SIGHT, image_size=32, patch_size=4, rope_parameters={"rope_theta": 1e4})
    options = {"image_token_index": number("[IMG]"), "spatial_merge_size": 2, "vision_feature_layer": -1}
    config = Mistral3Config(vision_config=sight, text_config=MistralConfig(**TEXT, sliding_window=None), **options)
    return build(Mistral3ForConditionalGeneration, config, seed), _pixtral_processor(2)


FAMILIES: dict[str, Callable[..., tuple[Any, Any]]] = {
    function.__name__: function
    for function in (
        llava, llava_next, qwen2_vl, qwen2_5_vl, qwen3_vl, qwen3_5, gemma3, gemma4, idefics2, idefics3, smolvlm,
        internvl, pixtral, mistral3,
    )
}  # fmt: skip


def _with_video_processor(name: str, shown: str) -> Callable[..., tuple[Any, Any]]:
    def make(seed: int = 0) -> tuple[Any, Any]:
        model, processor = FAMILIES[name](seed)
        sizes: dict[str, Any] = {"size": {"shortest_edge": 16 * 16, "longest_edge": 64 * 32 * 32}}
        sizes |= {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
        kind = {"qwen3_vl": "Qwen3VLVideoProcessor", "internvl": "InternVLVideoProcessor"}
        reader = getattr(transformers, kind.get(name, "Qwen2VLVideoProcessor"))
        processor.video_processor = reader(**_square(16)) if name == "internvl" else reader(**sizes)
        processor.chat_template = template(template_image(processor), shown)
        return model, processor

    return make


def template_image(processor: Any) -> str:
    """What stands for an image in the chat template of `processor`."""
    return processor.chat_template.split("'image' %}")[1].split("{%")[0]


def llava_next_video(seed: int = 0) -> tuple[Any, Any]:
    from transformers import (
        CLIPVisionConfig,
        LlavaNextImageProcessorPil,
        LlavaNextVideoConfig,
        LlavaNextVideoForConditionalGeneration,
        LlavaNextVideoProcessor,
        LlavaNextVideoVideoProcessor,
        Qwen3Config,
    )

    sight, points = CLIPVisionConfig(**SIGHT, image_size=16, patch_size=4, projection_dim=16), [[16, 32], [32, 16]]
    options = {"vision_feature_select_strategy": "default", "vision_feature_layer": -1, "image_grid_pinpoints": points}
    ids = {"image_token_index": number("<image>"), "video_token_index": number("<video>")}
    config = LlavaNextVideoConfig(vision_config=sight, text_config=Qwen3Config(**TEXT), **ids, **options)
    square = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
    pixels = LlavaNextImageProcessorPil(**square, image_grid_pinpoints=points)
    rest = {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    shown = {"chat_template": template("<image>", "<video>")}
    processor = LlavaNextVideoProcessor(LlavaNextVideoVideoProcessor(**square), pixels, tokenizer(), **shown, **rest)
    return build(LlavaNextVideoForConditionalGeneration, config, seed), processor


#: Those whose processors read videos; transformers' video processors need torchvision.
VIDEO_FAMILIES: dict[str, Callable[..., tuple[Any, Any]]] = {
    "qwen2_vl": _with_video_processor("qwen2_vl", "<|vision_start|><|video_pad|><|vision_end|>"),
    "qwen2_5_vl": _with_video_processor("qwen2_5_vl", "<|vision_start|><|video_pad|><|vision_end|>"),
    "qwen3_vl": _with_video_processor("qwen3_vl", "<|vision_start|><|video_pad|><|vision_end|>"),
    "llava_next_video": llava_next_video,
    "internvl": _with_video_processor("internvl", "<video>"),
}


def image(seed: int = 0, width: int = 16, height: int = 16) -> Any:
    """Random pixels."""
    import numpy as np
    from PIL import Image

    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))
