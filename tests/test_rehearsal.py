"""The paper profile's code path on stand-ins: ImageNet's layout, a released autoencoder, Inception, two processes."""
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from stand_ins import make_hub, make_inception, make_judge, make_sd_vae, make_tree

from dit_repro.book.chapters import PROFILES as BOOK_PROFILES
from dit_repro.book.chapters import REHEARSALS, chapters
from dit_repro.evaluation import InceptionFeatures, evaluate
from dit_repro.latents import load_autoencoder
from dit_repro.latents.autoencoder import RELEASED
from dit_repro.profiles import PROFILES, get_profile
from dit_repro.sampling import Guidance, SampleSet, draw_labels, sample
from dit_repro.training import launch

NARROW = (8, 8, 16, 16)


@pytest.fixture
def stand_ins(tmp_path, monkeypatch):
    """Everything that the paper's profile asks for, under tmp_path, and the environment that points at it."""
    import huggingface_hub.file_download
    for module in (huggingface_hub.constants, huggingface_hub.file_download):
        monkeypatch.setattr(module, "HF_HUB_CACHE", str(tmp_path / "hub"), raising=False)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setenv("DIT_REPRO_WORKSPACE", str(tmp_path / "workspace"))
    make_hub(tmp_path / "hub", widths=NARROW)
    make_judge(tmp_path / "workspace")
    make_inception(tmp_path / "torch")
    return SimpleNamespace(data=str(make_tree(tmp_path / "imagenet", classes=20, train=3)))


def test_class_folders_that_cannot_be_judged_or_encoded_are_refused_at_once(stand_ins):
    with pytest.raises(ValueError, match="the embedded autoencoder was trained on grey clothes"):
        get_profile("gpu", data=stand_ins.data).data.autoencoder()
    for split in ("train", "val"):
        (Path(stand_ins.data) / split / "n01440764").rename(Path(stand_ins.data) / split / "moss")
    with pytest.raises(ValueError, match=r"class folder 'moss'.*whose folders are named as n01440764"):
        get_profile("paper-rehearsal", data=stand_ins.data).data.autoencoder()


def test_the_papers_path_runs_from_jpegs_to_a_score(stand_ins):
    settings = get_profile("paper-rehearsal", data=stand_ins.data)
    vae = settings.data.autoencoder()
    assert (vae.id, vae.downsampling, vae.latent_channels, vae.scale_factor) == (RELEASED[0], 8, 4, 0.18215)
    store, held_out = (settings.data.store(split, vae) for split in ("train", "test"))
    assert (len(store), len(held_out), store.num_classes, store.latent_shape) == (40, 20, 20, (4, 8, 8))

    config = settings.training(store, num_steps=2, global_batch_size=4, log_every=1, checkpoint_every=2,
                               archive_every=2, export_ema_every=2)
    assert (config.precision, config.num_classes) == ("bf16", 20)
    folder = launch(config, settings.run_path("first_steps", config), settings.recipe.processes)
    assert folder.metrics().mse.between(0.5, 1.5).all()

    model = folder.load_model(2)
    images = vae.decode(sample(model, [0, 19], config.noise_schedule(), "2", seeds=[0, 1], guidance=Guidance(1.5)))
    assert settings.data.judge()(images).logits.shape == (2, 20)
    features = settings.data.features()
    samples = SampleSet(model, draw_labels(8, 20), config.noise_schedule(), load_autoencoder(RELEASED[1]),
                        folder.path / "samples", "random", steps="2")
    scores = evaluate(samples, settings.data.source("test").take(range(8)), features, **samples.protocol)
    assert scores.frechet > 0
    assert "distance (stand-in for Inception)" in scores.report() and "FID" not in scores.report()


@pytest.mark.parametrize("name", ["gpu", "paper"])
def test_a_rehearsal_takes_its_path_from_its_profile_and_its_counts_from_smoke(name):
    rehearsal, path, smoke = PROFILES[f"{name}-rehearsal"], PROFILES[name], PROFILES["smoke"]
    assert replace(rehearsal.data, resolution=256, limit_per_class=None, stand_ins=False) == path.data
    assert (rehearsal.recipe.fid, rehearsal.recipe.processes) == (path.recipe.fid, path.recipe.processes)
    assert rehearsal.divergence.gpus == path.divergence.gpus
    assert rehearsal.sweeps.scales == path.sweeps.scales   # chapter 6 looks some of them up
    assert rehearsal.scores.reference_split == path.scores.reference_split
    assert rehearsal.train.precision == path.train.precision == "bf16"
    assert rehearsal.train.num_steps == smoke.train.num_steps
    assert {*PROFILES} == {*BOOK_PROFILES, *REHEARSALS}


def test_only_a_rehearsal_on_class_folders_takes_stand_ins_and_two_processes():
    gpu, paper = (PROFILES[f"{name}-rehearsal"] for name in ("gpu", "paper"))
    assert (paper.data.stand_ins, paper.data.resolution, paper.divergence.gpus, paper.recipe.fid) == (True, 64, 2, True)
    assert (gpu.data.stand_ins, gpu.divergence.gpus, gpu.recipe.fid) == (False, 0, False)


def test_a_chapter_that_reads_data_can_be_told_where_they_are():
    """Else it would look for ImageNet where the profile says, whatever `-p data=` says."""
    book = chapters(Path(__file__).parents[1])
    silent = [chapter.name for chapter in book if ".data." in chapter.source.read_text(encoding="utf-8")
              and not {"data", "autoencoder"} <= {*chapter.parameters}]
    assert not silent and len(book) == 11


def test_stand_ins_have_the_layout_of_the_released_autoencoder(tmp_path):
    vae = load_autoencoder(make_sd_vae(tmp_path))
    assert sum(weight.numel() for weight in vae.model.parameters()) == 83_653_863   # Stable Diffusion 1's
    assert tuple(vae.model.config.block_out_channels) == (128, 256, 512, 512)


def test_what_is_missing_at_paper_is_named_with_its_place_and_size(tmp_path, monkeypatch):
    monkeypatch.setenv("DIT_REPRO_WORKSPACE", str(tmp_path))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"data=imagenet: .*image-net\.org.*GB.*-p data="):
        get_profile("paper").data.source("train")
    data = make_tree(tmp_path / "imagenet", classes=2)
    with pytest.raises(FileNotFoundError, match=r"huggingface\.co/timm/resnet50\.a1_in1k.*\(102 MB for a ResNet-50\)"):
        get_profile("paper", data=str(data)).data.judge()
    with pytest.raises(FileNotFoundError, match=r"no Inception weights at .*Download"):
        get_profile("paper", data=str(data)).data.features()
    make_inception(tmp_path)
    with pytest.raises(ValueError, match="SHA-256"):
        get_profile("paper", data=str(data)).data.features()
    assert InceptionFeatures(sha256=None).id == "stand-in for Inception"
