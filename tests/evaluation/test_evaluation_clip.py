"""CLIP scores, on weights of CLIP's layout that are made here."""
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor, CLIPTokenizer

from dit_repro.evaluation.clip import ClipScore, describe_classes


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A CLIPModel of 8x8 patches and width 16, with its processor and a tokenizer that spells."""
    path = tmp_path_factory.mktemp("clip")
    letters = [chr(code) for code in range(33, 127)]
    words = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    (path / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(words)}))
    (path / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = CLIPTokenizer(str(path / "vocab.json"), str(path / "merges.txt"), model_max_length=32)
    size = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        model = CLIPModel(CLIPConfig(
            text_config={**size, "vocab_size": len(words), "max_position_embeddings": 32,
                         "bos_token_id": len(words) - 2, "eos_token_id": len(words) - 1}, projection_dim=8,
            vision_config={**size, "image_size": 16, "patch_size": 8}))
    model.save_pretrained(path)
    processor = CLIPImageProcessor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    CLIPProcessor(processor, tokenizer).save_pretrained(path)
    return path


PROMPTS = ["a photo of a bag", "a photo of a ankle boot", "a photo of a tench"]


def draw_images(count=3, size=28):
    return torch.randint(256, (count, 3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def test_the_score_is_the_cosine_behind_clips_own_logits(folder):
    clip, images = ClipScore(folder), draw_images()
    inputs = clip.processor(text=PROMPTS, images=[*images], return_tensors="pt", padding=True)
    with torch.no_grad():
        logits = clip.model(**inputs).logits_per_image   # exp(logit_scale) * cosine, (image, prompt)
    expected = 100 * (logits / clip.model.logit_scale.exp()).diagonal().clamp(min=0)
    assert (expected > 1).any()
    assert torch.allclose(clip(images, PROMPTS), expected, atol=1e-4)


def test_an_image_is_scored_against_its_own_prompt_whatever_its_batch(folder):
    clip, images = ClipScore(folder), draw_images()
    together = clip(images, PROMPTS)
    assert torch.allclose(clip(images, PROMPTS, batch_size=1), together, atol=1e-4)
    assert torch.allclose(clip(images.flip(0), PROMPTS[::-1]), together.flip(0), atol=1e-4)


class Constant(torch.nn.Module):
    def __init__(self, value):
        super().__init__()
        self.value = torch.tensor(value)

    def forward(self, pooled):
        return self.value.expand(len(pooled), -1)


@pytest.mark.parametrize(("text", "expected"), [([3.0, 0.0], 100), ([1.0, 1.0], 100 / 2**0.5), ([-1.0, 0.0], 0)])
def test_a_score_is_a_percentage_and_never_negative(folder, text, expected):
    clip = ClipScore(folder)
    clip.model.visual_projection, clip.model.text_projection = Constant([1.0, 0.0]), Constant(text)
    assert clip(draw_images(1), PROMPTS[:1]).item() == pytest.approx(expected, abs=1e-4)


def test_bad_input_is_named(folder, tmp_path):
    clip = ClipScore(folder)
    with pytest.raises(ValueError, match=r"2 prompts and torch.uint8 images \(3, 3, 28, 28\)"):
        clip(draw_images(), PROMPTS[:2])
    with pytest.raises(ValueError, match=r"torch.float32 images"):
        clip(draw_images().float(), PROMPTS)
    with pytest.raises(ValueError, match=r"images \(3, 1, 28, 28\)"):
        clip(draw_images()[:, :1], PROMPTS)
    with pytest.raises(ValueError, match="no image given"):
        clip(draw_images(0), [])
    with pytest.raises(FileNotFoundError, match=r"no model.safetensors; fetch config.json.*1.7 GB"):
        ClipScore(tmp_path)


def test_a_folder_that_lacks_weights_is_refused(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "half")
    weights = load_file(tmp_path / "half" / "model.safetensors")
    del weights["text_projection.weight"]
    save_file(weights, tmp_path / "half" / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="lacks 1 weights"):
        ClipScore(tmp_path / "half")
    (tmp_path / "half" / "model.safetensors").write_bytes(b"cut short")
    with pytest.raises(ValueError, match="cannot be read as a CLIPModel"):
        ClipScore(tmp_path / "half")


def test_classes_become_prompts():
    assert describe_classes(["Bag", "Ankle boot", " dog, puppy", "n01440764"]) == [
        "a photo of a Bag", "a photo of a Ankle boot", "a photo of a dog", "a photo of a tench"]


def test_no_two_classes_of_imagenet_share_a_prompt():
    from timm.data import ImageNetInfo

    wnids = ImageNetInfo("imagenet-1k").label_names()
    prompts = dict(zip(wnids, describe_classes(wnids)))
    assert len(set(prompts.values())) == 1000
    assert prompts["n02012849"].startswith("a photo of a crane (large long-necked wading bird")
    assert describe_classes(["n03126707"]) == [prompts["n03126707"]]   # whatever other classes are asked for
