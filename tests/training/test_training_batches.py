from dataclasses import replace

import pytest
import torch
from tiny_training import write_store

from dit_repro.diffusion import Objective
from dit_repro.latents import LatentStore
from dit_repro.training.batches import batch_indices, draw_batch


@pytest.fixture
def store(latents):
    return LatentStore.open(latents)


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(vars(a).values(), vars(b).values()))


def test_each_epoch_visits_every_image_once_in_its_own_order():
    seen = torch.cat([batch_indices(0, step, 6, 40) for step in range(1, 41)])   # 240 draws: six epochs of 40
    epochs = seen.view(6, 40)
    assert all(torch.equal(epoch.sort().values, torch.arange(40)) for epoch in epochs)
    assert len({tuple(epoch.tolist()) for epoch in epochs}) == 6


def test_a_batch_larger_than_the_data_still_visits_images_evenly():
    assert torch.bincount(batch_indices(0, 3, 25, 10), minlength=10).tolist() != [0] * 10
    assert torch.bincount(torch.cat([batch_indices(0, s, 25, 10) for s in (1, 2)])).tolist() == [5] * 10


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_shares_of_all_ranks_together_are_the_global_batch(config, store, world_size):
    whole = draw_batch(config, store, 5)
    shares = [draw_batch(config, store, 5, rank, world_size) for rank in range(world_size)]
    parts = [[part] for share in shares for part in share.split(1)]
    assert len(parts) == 8
    for name, tensor in vars(whole).items():
        assert torch.equal(torch.cat([getattr(share, name) for share in shares]), tensor), name
        assert torch.equal(torch.cat([getattr(part[0], name) for part in parts]), tensor), name


def test_a_batch_depends_on_seed_and_step_alone(config, store):
    torch.manual_seed(1)
    first = draw_batch(config, store, 7)
    draw_batch(config, store, 3)
    torch.manual_seed(2)
    assert same(first, draw_batch(config, store, 7))
    for other in (draw_batch(config, store, 8), draw_batch(replace(config, seed=1), store, 7)):
        assert not torch.equal(first.noise, other.noise) and not torch.equal(first.t, other.t)


def test_another_objective_or_augmentation_leaves_the_other_draws_alone(config, store):
    first = draw_batch(config, store, 7)
    unflipped = draw_batch(replace(config, flip=False), store, 7)
    perturbed = draw_batch(replace(config, objective=Objective(input_perturbation=0.1)), store, 7)
    for other in (unflipped, perturbed):
        assert all(torch.equal(getattr(first, name), getattr(other, name)) for name in ("indices", "t", "y", "noise"))
    assert not torch.equal(first.x0, unflipped.x0)
    assert torch.equal(first.noise, first.input_noise) and not torch.equal(perturbed.noise, perturbed.input_noise)


def test_after_a_roll_back_noise_is_new_and_the_images_are_the_same(config, store):
    first, again = draw_batch(config, store, 7), draw_batch(config, store, 7, retry=1)
    assert torch.equal(first.indices, again.indices) and not torch.equal(first.noise, again.noise)


def test_draws_have_the_distributions_they_claim(tmp_path, config):
    store = LatentStore.open(write_store(tmp_path / "flat", num_images=2000))
    batch = draw_batch(replace(config, global_batch_size=20_000), store, 1)
    assert abs(float((batch.y == 3).float().mean()) - 0.1) < 0.01
    assert torch.equal(batch.y[batch.y < 3], torch.as_tensor(store.labels)[batch.indices][batch.y < 3])
    assert batch.t.min() == 0 and batch.t.max() == 999
    assert abs(float(batch.t.float().mean()) - 499.5) < 10
    assert abs(float(batch.noise.mean())) < 0.002 and abs(float(batch.noise.std()) - 1) < 0.002
    means = store.moments(batch.indices, torch.ones(20_000, dtype=torch.bool))[:, :4] * store.scale_factor
    flipped = (batch.x0 - means).square().mean((1, 2, 3)) < 0.2   # the posterior's own spread is 0.04
    assert abs(float(flipped.float().mean()) - 0.5) < 0.02
