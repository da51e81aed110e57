"""Exchange with diffusers: the folder that its DiTPipeline loads, and the layout of facebook/DiT-XL-2-256."""
import copy
import json
import re
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

from dit_repro.files import write_json
from dit_repro.models.dit import DiT, DiTConfig, TimestepEmbedder, sincos_position_grid
from dit_repro.models.released import build_from_state, has_learned_sigma, read_weights

BETA_SCHEDULES = {"linear": "linear", "cosine": "squaredcos_cap_v2"}   # ours: diffusers'
PIPELINE_NULL_CLASS = 1000   # DiTPipeline writes this number into its loop, whatever the model's class count

# released name -> diffusers name, inside block N; the shared embedders are copied into every block there
_BLOCK_KEYS = {
    "attn.proj": "attn1.to_out.0",
    "mlp.fc1": "ff.net.0.proj",
    "mlp.fc2": "ff.net.2",
    "adaLN_modulation.1": "norm1.linear",
}
_SHARED_KEYS = {
    "t_embedder.mlp.0": "norm1.emb.timestep_embedder.linear_1",
    "t_embedder.mlp.2": "norm1.emb.timestep_embedder.linear_2",
}
_OUTER_KEYS = {
    "x_embedder.proj": "pos_embed.proj",
    "final_layer.adaLN_modulation.1": "proj_out_1",
    "final_layer.linear": "proj_out_2",
}
_LABEL_TABLE = "norm1.emb.class_embedder.embedding_table.weight"

README = """\
A DiT for `diffusers.DiTPipeline`.

DiTPipeline guides all latent channels with scale 4 unless told otherwise; the paper guides three, with scale 1.5.
"""
README_NO_VAE = """
No autoencoder is in here: load with `DiTPipeline.from_pretrained(folder, vae=AutoencoderKL.from_pretrained(...))`.
"""
README_TIMESTEPS = """
diffusers computes the sinusoids of the timestep with exponent i/127 where this model was trained with i/128. For the
trained network exactly, after loading:

    for block in pipeline.transformer.transformer_blocks:
        block.norm1.emb.time_proj.downscale_freq_shift = 0
"""


def to_diffusers(model: DiT, folder: str | Path, autoencoder=None, class_names=None, schedule: str = "linear") -> None:
    """Write a folder that `DiTPipeline.from_pretrained(folder)` loads and samples from.

    autoencoder: a diffusers AutoencoderKL; without one, pass `vae=` to from_pretrained. class_names: one a class, kept
    as id2label. schedule: the one the model was trained with, "linear" or "cosine".
    diffusers computes other timestep sinusoids than DiT (see `use_released_timesteps`): with that correction outputs
    agree to 1e-5. Its pipeline takes class 1000 for the null class, so smaller label tables are filled up to there.
    Raises ValueError for what diffusers cannot express, FileExistsError where the folder has content.
    """
    folder = Path(folder)
    _check_expressible(model, autoencoder, class_names, schedule)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists and is not empty: choose another folder, or delete it")

    from diffusers import DDIMScheduler, DiTPipeline
    transformer = _transformer(model)
    # facebook/DiT-XL-2-256's scheduler; clipping at 1 is for pixels, not latents
    scheduler = DDIMScheduler(beta_schedule=BETA_SCHEDULES[schedule], clip_sample=False)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as temporary:
        written = Path(temporary) / "pipeline"
        DiTPipeline(transformer, autoencoder, scheduler).save_pretrained(written)
        index = json.loads((written / "model_index.json").read_text())
        names = map(str, range(model.num_classes)) if class_names is None else class_names
        write_json(written / "model_index.json", {**index, "id2label": dict(enumerate(names))})
        (written / "README.md").write_text(README + README_NO_VAE * (autoencoder is None)
                                           + README_TIMESTEPS * (model.t_embedder.frequency_shift == 0))
        for file in written.rglob("*.safetensors"):
            file.chmod(0o644)   # written for the owner alone, but meant to be shared
        written.replace(folder)


def from_diffusers(folder: str | Path, frequency_shift: int = 0) -> DiT:
    """The DiT of a diffusers folder in the layout of facebook/DiT-XL-2-256, or of its transformer/ alone; eval mode.

    frequency_shift 0 is right for released weights and for what `to_diffusers` wrote. A model that was trained inside
    diffusers saw other timestep sinusoids and needs 1.
    Raises ValueError for a transformer that DiT cannot express, such as embedders that differ between blocks.
    """
    folder = Path(folder)
    if (folder / "transformer").is_dir():
        folder = folder / "transformer"
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder} has no config.json: expected a DiTPipeline folder or its transformer/")
    config = json.loads((folder / "config.json").read_text())
    if config.get("norm_type") != "ada_norm_zero":
        raise ValueError(f"{folder} is a {config.get('_class_name')} with norm_type {config.get('norm_type')!r}, "
                         "expected a DiT with 'ada_norm_zero'")
    whole_or_shard = r"diffusion_pytorch_model(-\d+-of-\d+)?"
    files = [file for file in folder.iterdir() if re.fullmatch(whole_or_shard, file.stem)]
    files = [file for file in files if file.suffix == ".safetensors"] or [f for f in files if f.suffix == ".bin"]
    if not files:
        raise FileNotFoundError(f"{folder} has no diffusion_pytorch_model.safetensors or .bin")
    state = {key: value for file in files for key, value in read_weights(file).items()}
    try:
        released, classes = _from_diffusers_keys(state, config)
    except KeyError as error:
        raise ValueError(f"{folder} is no diffusers DiT: its weights have no {error}") from None
    heads, patch, channels = config["num_attention_heads"], config["patch_size"], config["in_channels"]
    dit_config = DiTConfig(config["num_layers"], heads * config["attention_head_dim"], heads, patch)
    learn_sigma = has_learned_sigma(folder, config.get("out_channels") or channels, channels)
    model = build_from_state(folder, released, dit_config, config["sample_size"], channels, classes, learn_sigma)
    for block in model.blocks:
        block.norm2.eps = config.get("norm_eps", 1e-6)   # absent in facebook's; stock diffusers trains with 1e-5
    model.t_embedder.frequency_shift = frequency_shift
    return model


def use_released_timesteps(transformer: nn.Module) -> nn.Module:
    """Make a diffusers DiTTransformer2DModel compute DiT's timestep sinusoids, in place; returns it.

    diffusers divides the exponent by half - 1, DiT by half; the setting is not part of its config, so a folder cannot
    carry it. At t = 999 the two differ by several radians in the fast frequencies.
    """
    for block in transformer.transformer_blocks:
        block.norm1.emb.time_proj.downscale_freq_shift = 0
    return transformer


def _check_expressible(model, autoencoder, class_names, schedule) -> None:
    if not isinstance(model, DiT) or not isinstance(model.t_embedder, TimestepEmbedder):
        raise ValueError(f"{type(model).__name__} has no counterpart in DiTPipeline: it takes an unchanged DiT")
    if model.num_classes > PIPELINE_NULL_CLASS:
        raise ValueError(f"{model.num_classes} classes: DiTPipeline takes class {PIPELINE_NULL_CLASS} for the null "
                         f"class, so it guides models of at most {PIPELINE_NULL_CLASS} classes")
    if class_names is not None and len(class_names) != model.num_classes:
        raise ValueError(f"{len(class_names)} class names for a model of {model.num_classes} classes")
    if schedule not in BETA_SCHEDULES:
        raise ValueError(f"schedule {schedule!r}: expected one of {', '.join(BETA_SCHEDULES)}")
    if autoencoder is not None and autoencoder.config.latent_channels != model.in_channels:
        raise ValueError(f"the autoencoder has {autoencoder.config.latent_channels} latent channels, "
                         f"the model {model.in_channels}")


@torch.no_grad()
def _transformer(model: DiT) -> nn.Module:
    """The DiTTransformer2DModel of a model; ValueError where it computes something else from the same weights."""
    from diffusers import DiTTransformer2DModel
    config, model = model.config, copy.deepcopy(model).cpu().float().eval()
    with torch.device("meta"):   # every weight is replaced below
        transformer = DiTTransformer2DModel(
            num_attention_heads=config.heads, attention_head_dim=config.width // config.heads, num_layers=config.depth,
            patch_size=config.patch_size, sample_size=model.input_size, in_channels=model.in_channels,
            out_channels=model.out_channels, num_embeds_ada_norm=PIPELINE_NULL_CLASS,
            norm_eps=model.blocks[0].norm2.eps)
    transformer.load_state_dict(_to_diffusers_keys(model), assign=True)
    # not a weight there, but computed, and by the same formula
    transformer.pos_embed.pos_embed = sincos_position_grid(config.width, model.input_size // config.patch_size)[None]
    transformer.eval()
    if model.t_embedder.frequency_shift == 0:
        use_released_timesteps(transformer)

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, model.in_channels, model.input_size, model.input_size, generator=generator)
    t, y = torch.tensor([10, 900]), torch.tensor([0, model.num_classes])
    expected = model(x, t, y)
    difference = (transformer(x, timestep=t, class_labels=y).sample - expected).abs().max()
    if not difference <= 1e-4 * expected.abs().max():   # NaN is a difference too
        raise ValueError(f"diffusers computes something else from these weights (outputs differ by {difference:.2g}): "
                         "the model was changed in a part that diffusers fixes, such as positions, norms or GELU")
    return transformer


def _to_diffusers_keys(model: DiT) -> dict[str, Tensor]:
    state = model.state_dict()
    table = state["y_embedder.embedding_table.weight"]   # (K + 1, D)
    missing = PIPELINE_NULL_CLASS - model.num_classes
    table = torch.cat([table, table[-1:].expand(missing, -1)])   # (1001, D): unused classes are the null class
    renamed = {f"transformer_blocks.{n}.{_LABEL_TABLE}": table.clone() for n in range(model.config.depth)}
    for kind in ("weight", "bias"):
        renamed |= {f"{new}.{kind}": state[f"{old}.{kind}"] for old, new in _OUTER_KEYS.items()}
        for n in range(model.config.depth):
            block = f"transformer_blocks.{n}"
            for name, part in zip("qkv", state[f"blocks.{n}.attn.qkv.{kind}"].chunk(3), strict=True):
                renamed[f"{block}.attn1.to_{name}.{kind}"] = part.clone()
            for old, new in _BLOCK_KEYS.items():
                renamed[f"{block}.{new}.{kind}"] = state[f"blocks.{n}.{old}.{kind}"]
            for old, new in _SHARED_KEYS.items():
                renamed[f"{block}.{new}.{kind}"] = state[f"{old}.{kind}"].clone()
    return renamed


def _from_diffusers_keys(state: dict[str, Tensor], config: dict) -> tuple[dict[str, Tensor], int]:
    """Released names, and the number of classes: rows equal to the last one are the filling of `to_diffusers`."""
    first = "transformer_blocks.0"
    shared = [_LABEL_TABLE, *(f"{new}.{kind}" for new in _SHARED_KEYS.values() for kind in ("weight", "bias"))]
    for n in range(config["num_layers"]):
        for key in shared:
            if not torch.equal(state[f"{first}.{key}"], state[f"transformer_blocks.{n}.{key}"]):
                raise ValueError(f"transformer_blocks.{n}.{key} differs from block 0: it was trained with an embedder "
                                 "a block, where DiT has one for all")
    table = state[f"{first}.{_LABEL_TABLE}"]
    differs = (table != table[-1]).any(dim=1).nonzero()   # rows that are not the null class
    classes = int(differs[-1]) + 1 if len(differs) else len(table) - 1
    grid = config["sample_size"] // config["patch_size"]
    released = {"pos_embed": sincos_position_grid(table.shape[1], grid)[None],
                "y_embedder.embedding_table.weight": table[: classes + 1]}
    for kind in ("weight", "bias"):
        released |= {f"{old}.{kind}": state[f"{new}.{kind}"] for old, new in _OUTER_KEYS.items()}
        released |= {f"{old}.{kind}": state[f"{first}.{new}.{kind}"] for old, new in _SHARED_KEYS.items()}
        for n in range(config["num_layers"]):
            block = f"transformer_blocks.{n}"
            released[f"blocks.{n}.attn.qkv.{kind}"] = torch.cat([state[f"{block}.attn1.to_{q}.{kind}"] for q in "qkv"])
            released |= {f"blocks.{n}.{old}.{kind}": state[f"{block}.{new}.{kind}"] for old, new in _BLOCK_KEYS.items()}
    return released, classes
