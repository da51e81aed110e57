"""CLIP score: how well an image fits a sentence. Needs CLIP's weights, and transformers (the extra `clip`)."""
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

WHERE_CLIP = ("fetch config.json, preprocessor_config.json, tokenizer.json, tokenizer_config.json and "
              "model.safetensors of https://huggingface.co/openai/clip-vit-large-patch14 (1.7 GB) into one folder, "
              "and give its path")


class ClipScore:
    """Cosine of an image and a sentence in CLIP's space, in percent, not below 0 (arXiv 2104.08718, without its 2.5).

    `folder` holds a CLIPModel as transformers saves it; nothing is downloaded. Raises ImportError without transformers,
    FileNotFoundError where there are no weights, ValueError where they are not those of its config.json.
    """

    def __init__(self, folder: str | Path, device: str = "cpu"):
        try:
            from transformers import CLIPModel, CLIPProcessor
        except ImportError as error:
            raise ImportError("a CLIP score needs transformers, of the extra clip: pip install -e '.[clip]'") from error
        if not (Path(folder) / "model.safetensors").is_file():
            raise FileNotFoundError(f"no CLIP weights: {folder} has no model.safetensors; {WHERE_CLIP}")
        try:
            model, info = CLIPModel.from_pretrained(folder, local_files_only=True, use_safetensors=True,
                                                    dtype=torch.float32, output_loading_info=True)
            self.processor = CLIPProcessor.from_pretrained(folder, local_files_only=True)
        except Exception as error:   # theirs are of many kinds and lines
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise ValueError(f"{folder}: cannot be read as a CLIPModel with its processor ({reason}); {WHERE_CLIP}"
                             ) from error
        if info["missing_keys"]:   # they would be left at random
            raise ValueError(f"{folder}: model.safetensors lacks {len(info['missing_keys'])} weights of its "
                             f"config.json; {WHERE_CLIP}")
        self.model = model.to(device).eval()

    @torch.no_grad()
    def __call__(self, images: Tensor, prompts: Sequence[str], batch_size: int = 64) -> Tensor:
        """Scores (N,) of images uint8 (N, 3, H, W), each against the prompt of its index."""
        if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] != 3 or len(images) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts and {images.dtype} images {tuple(images.shape)}: "
                             "expected uint8 (N, 3, H, W) and a prompt an image")
        if len(images) == 0:
            raise ValueError("no image given")
        scores = []
        for first in range(0, len(images), batch_size):
            some = slice(first, first + batch_size)
            inputs = self.processor(text=list(prompts[some]), images=[*images[some]], return_tensors="pt", padding=True,
                                    truncation=True).to(self.model.device)
            output = self.model(**inputs)   # embeddings (n, D), of length 1
            scores.append((output.image_embeds * output.text_embeds).sum(1).clamp(min=0).cpu())
        return 100 * torch.cat(scores)


def describe_classes(class_names: Sequence[str]) -> list[str]:
    """A prompt a class, "a photo of a tench"; ImageNet's folder names are spelled out, what two share with its meaning.
    """
    from timm.data import ImageNetInfo

    imagenet = ImageNetInfo("imagenet-1k")
    short = {wnid: imagenet.label_name_to_description(wnid).split(",")[0] for wnid in imagenet.label_names()}
    counts = Counter(short.values())

    def spelled_out(name: str) -> str:
        if counts[short.get(name)] > 1:   # a bird and a machine are both "crane"
            return f"{short[name]} ({imagenet.label_name_to_description(name, detailed=True).split(': ', 1)[1]})"
        return short.get(name, name.split(",")[0].strip())   # synonyms follow a comma

    return [f"a photo of a {spelled_out(name)}" for name in class_names]   # CLIP's own template knows no "an"
