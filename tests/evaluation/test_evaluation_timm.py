import pytest
import safetensors.torch
import timm
import torch
from timm.data import ImageNetInfo

from dit_repro.evaluation import DINOV2, TimmFeatures
from dit_repro.profiles import Data


def save_random(name, path, **changes):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = timm.create_model(name, **changes).eval()
    safetensors.torch.save_file(network.state_dict(), path)
    return network


def pictures(size, n=2):
    return torch.randint(0, 256, (n, 3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def normalized(network, images):
    mean, std = (torch.tensor(network.pretrained_cfg[key]).view(3, 1, 1) for key in ("mean", "std"))
    return (images / 255 - mean) / std


def test_a_transformers_features_are_timms_tokens_of_the_normalized_image(tmp_path):
    name = "vit_tiny_patch16_224"
    network = save_random(name, tmp_path / "model.safetensors")
    images = pictures(224)
    features = TimmFeatures(tmp_path / "model.safetensors", name)(images)
    with torch.no_grad():
        tokens = network.forward_features(normalized(network, images))   # (2, 1 + 14 * 14, 192)
        logits = network(normalized(network, images))
    torch.testing.assert_close(features.pool, tokens[:, 0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(features.spatial[:, 7:14], tokens[:, 2, :7], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(features.logits, logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name, size", [("test_resnet.r160_in1k", 160), ("test_vit.r160_in1k", 224)])
def test_a_classifier_has_three_heads_at_its_own_size_or_another(tmp_path, name, size):
    network = save_random(name, tmp_path / "model.safetensors")
    extractor = TimmFeatures(tmp_path / "model.safetensors", name, size=None if size == 160 else size)
    features = extractor(pictures(size))
    assert extractor.resize == f"bicubic with antialias to {size}"
    assert features.pool.shape == (2, network.num_features)
    assert features.logits.shape == (2, 1000)
    assert features.spatial.shape[1] % 7 == 0
    if size == 160:
        with torch.no_grad():
            last = network.forward_features(normalized(network, pictures(160)))                # (2, C, h, w)
        torch.testing.assert_close(features.spatial[:, 7:14], last[:, :7, 0, 1], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(features.pool, last.mean((2, 3)), rtol=1e-4, atol=1e-4)


def test_small_images_are_resized_and_a_network_without_classes_has_no_logits(tmp_path):
    save_random("vit_tiny_patch16_224", tmp_path / "model.safetensors", num_classes=0)
    state = safetensors.torch.load_file(tmp_path / "model.safetensors")
    save_random("vit_small_patch14_dinov2.lvd142m", tmp_path / "dino.safetensors", img_size=518)
    features = TimmFeatures(tmp_path / "dino.safetensors", "vit_small_patch14_dinov2.lvd142m", size=56)(pictures(32))
    assert features.pool.shape == (2, 384)
    assert features.logits.shape == (2, 0)
    assert features.spatial.shape == (2, 4 * 4 * 7)
    assert "head.weight" not in state


def test_logits_of_a_part_of_imagenet_are_those_of_its_folders(tmp_path):
    name, path = "test_resnet.r160_in1k", tmp_path / "model.safetensors"
    save_random(name, path)
    whole = TimmFeatures(path, name)(pictures(64)).logits
    wnids = sorted(ImageNetInfo("imagenet-1k").label_names())
    some = TimmFeatures(path, name, class_names=[wnids[999], wnids[3]])(pictures(64)).logits
    torch.testing.assert_close(some, whole[:, [999, 3]])
    torch.testing.assert_close(TimmFeatures(path, name, class_names=wnids)(pictures(64)).logits, whole)
    with pytest.raises(ValueError, match=r"class folder 'cats' \(1 such\).*named as n01440764"):
        TimmFeatures(path, name, class_names=[wnids[0], "cats"])
    save_random("vit_small_patch14_dinov2.lvd142m", path, img_size=518)
    with pytest.raises(ValueError, match="has 0 classes, expected the 1000"):
        TimmFeatures(path, "vit_small_patch14_dinov2.lvd142m", size=56, class_names=wnids[:2])


def test_weights_that_are_missing_or_could_run_code_are_refused(tmp_path):
    (tmp_path / "model.pth").write_bytes(b"")
    with pytest.raises(ValueError, match=r"expected a \.safetensors"):
        TimmFeatures(tmp_path / "model.pth", DINOV2)
    with pytest.raises(FileNotFoundError, match=r"huggingface.co/timm/vit_large_patch14_dinov2.*put it there"):
        TimmFeatures(tmp_path / "none.safetensors", DINOV2)


def test_the_judge_of_class_folders_is_a_classifier_by_wnid_and_says_where_its_weights_belong(tmp_path, monkeypatch):
    monkeypatch.setenv("DIT_REPRO_WORKSPACE", str(tmp_path / "workspace"))
    for wnid in ("n01443537", "n02123045"):
        (tmp_path / "data" / "train" / wnid).mkdir(parents=True)
    data = Data(path=str(tmp_path / "data"), resolution=64, judge_name="test_resnet.r160_in1k")
    expected = tmp_path / "workspace" / "weights" / "test_resnet.r160_in1k.safetensors"
    with pytest.raises(FileNotFoundError, match=f"no weights of test_resnet.r160_in1k at {expected}"):
        data.judge()
    expected.parent.mkdir(parents=True)
    save_random("test_resnet.r160_in1k", expected)
    assert data.judge()(pictures(64)).logits.shape == (2, 2)
    with pytest.raises(FileNotFoundError, match=r"no Inception weights at .*Download"):
        Data(path=str(tmp_path / "data")).features()
    assert Data().judge() is Data().features()
