import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from tiny_training import tiny_config

from dit_repro.cli import main
from dit_repro.training import RESUME_ME, RunFolder, Trainer, launch


def command(*arguments):
    return CliRunner().invoke(main, list(map(str, arguments)))


def test_train_starts_resumes_and_overrides(config, tmp_path):
    (tmp_path / "config.json").write_text(config.to_json())
    done = command("train", tmp_path / "run", "--config", tmp_path / "config.json", "-o", "num_steps=8")
    assert done.exit_code == 0, done.output
    assert command("train", tmp_path / "run", "-o", "num_steps=12").exit_code == 0
    assert RunFolder(tmp_path / "run").checkpoints() == [8, 12]
    for wrong in (("-o", "num_step=3"), ("-o", "seed=1")):
        refused = command("train", tmp_path / "run", *wrong)
        assert refused.exit_code == 1 and wrong[1].split("=")[0] in refused.output and "Traceback" not in refused.output
    assert "no run in" in command("train", tmp_path / "nothing").output
    wrong = command("train", tmp_path / "new", "--config", tmp_path / "config.json", "-o", "model=DiT-bad/2")
    assert "unknown model 'DiT-bad/2'" in wrong.output and not (tmp_path / "new").exists()
    wrong = command("train", tmp_path / "new", "--config", tmp_path / "config.json", "-o", "objective=3")
    assert "objective: expected a JSON object" in wrong.output and not (tmp_path / "new").exists()


def test_train_draws_previews_of_the_classes(config, tmp_path, monkeypatch):
    from dit_repro import latents
    from dit_repro.latents import LatentStore
    store = LatentStore.open(config.latents)
    store.manifest["autoencoder"] = {"id": "fake"}
    monkeypatch.setattr(LatentStore, "open", lambda path: store)
    decoder = type("Decoder", (), {"decode": lambda self, x: (x[:, :3].clamp(0, 1) * 255).to(torch.uint8)})
    monkeypatch.setattr(latents, "load_autoencoder", lambda name: decoder())
    (tmp_path / "config.json").write_text(replace(config, num_steps=4, preview_every=4).to_json())
    done = command("train", tmp_path / "run", "--config", tmp_path / "config.json")
    assert done.exit_code == 0, done.output
    from PIL import Image
    images = {path.name: Image.open(path) for path in RunFolder(tmp_path / "run").previews.glob("*.png")}
    assert set(images) == {"00000004-raw.png", "00000004-ema.png"}
    assert all(image.size == (24, 8) for image in images.values())   # three classes of 8 x 8


def test_runs_lists_and_verifies_and_exports(config, tmp_path):
    Trainer(config, tmp_path / "runs/first").run()
    listed = command("runs", "--folder", tmp_path / "runs").output
    assert "first: finished at step 12 of 12; 2 checkpoints, " in listed and "alarms: none" in listed
    assert command("runs", "verify", tmp_path / "runs/first").output.count("good") == 2
    assert "ema-00000012.safetensors" in command("runs", "export-ema", tmp_path / "runs/first").output
    path, _ = RunFolder(tmp_path / "runs/first").verify()[1]
    path.write_bytes(path.read_bytes()[:-9])
    bad = command("runs", "verify", tmp_path / "runs/first")
    assert bad.exit_code == 1 and "1 of 3 checkpoints are damaged" in bad.output


def test_runs_that_are_not_there_are_errors(config, tmp_path):
    for option, said in (("--folder", "no folder"), ("export-ema", "no run in"), ("verify", "no run in")):
        refused = command("runs", option, tmp_path / "no")
        assert refused.exit_code == 1 and said in refused.output and not (tmp_path / "no").exists()
    with pytest.raises(FileNotFoundError, match="no config"):
        RunFolder(tmp_path / "no").export_ema()
    (tmp_path / "new").mkdir()
    (tmp_path / "new/config.json").write_text(config.to_json())
    with pytest.raises(FileNotFoundError, match="has no checkpoint; it has none yet"):
        RunFolder(tmp_path / "new").export_ema()


def test_convert_takes_the_newest_checkpoint_of_a_run_folder(config, tmp_path):
    Trainer(config, tmp_path / "run").run()
    done = command("convert", tmp_path / "run", tmp_path / "plain.safetensors", "--to", "released")
    assert done.exit_code == 0, done.output
    weights, ema = load_file(tmp_path / "plain.safetensors"), RunFolder(tmp_path / "run").load_model(12).state_dict()
    assert "final_layer.linear.weight" in weights and all(torch.equal(weights[name], ema[name]) for name in weights)


def test_launch_starts_a_process_that_a_scheduler_signal_ends_with_85(latents, tmp_path, monkeypatch):
    started, popen = [], subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **more: started.append(popen(*args, **more)) or started[0])
    monkeypatch.setenv("DIT_REPRO_PROGRESS", str(tmp_path / "progress"))
    config = tiny_config(latents, model="DiT-nano/4", num_steps=2000, log_every=1, checkpoint_every=1000,
                         archive_every=0)
    folder = RunFolder(tmp_path / "run")

    def signal_once_it_trains():
        while not (folder.path / "metrics.jsonl").exists():
            time.sleep(0.02)
        started[0].send_signal(signal.SIGUSR1)

    signaler = threading.Thread(target=signal_once_it_trains)
    signaler.start()
    with pytest.raises(RuntimeError, match=r"interrupted at step \d+; run this again"):
        launch(config, folder.path)
    signaler.join()
    assert started[0].returncode == RESUME_ME == 85
    step = folder.status()["step"]
    assert [event["event"] for event in folder.events()] == ["started", "saved", "interrupted"]
    assert folder.checkpoints() == [step]
    bars = (tmp_path / "progress").read_text()
    assert "run:" in bars and "mse" not in bars   # only the notebook's bar: the process draws its own into its log
    assert Trainer(replace(config, num_steps=step + 3), folder.path).run() == "finished"
    assert folder.metrics()["step"].tolist() == list(range(1, step + 4))


def test_launch_returns_a_finished_run_at_once_and_refuses_another_one(config, tmp_path, monkeypatch):
    Trainer(config, tmp_path / "run").run()
    monkeypatch.setattr(subprocess, "Popen", None)
    assert launch(config, tmp_path / "run").status()["step"] == 12
    with pytest.raises(ValueError, match="seed is 0, asked for 3"):
        launch(replace(config, seed=3), tmp_path / "run")


def test_a_short_run_is_trained_in_the_process_that_asks_for_it(config, tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    Trainer(config, tmp_path / "elsewhere").run()
    here = launch(config, tmp_path / "here", num_processes=0)
    assert here.metrics().mse.tolist() == RunFolder(tmp_path / "elsewhere").metrics().mse.tolist()


def test_launch_of_a_shorter_run_returns_a_folder_that_ends_there(config, tmp_path, monkeypatch):
    whole, asked = RunFolder(tmp_path / "run"), replace(config, num_steps=8)
    Trainer(config, whole.path).run()
    monkeypatch.setattr(subprocess, "Popen", None)
    for processes in (0, 1):
        shorter = launch(asked, whole.path, processes)
        assert shorter.config() == asked and shorter.checkpoints() == [8]
        assert shorter.metrics()["step"].tolist() == [2, 4, 6, 8]
    assert torch.equal(shorter.load_model().pos_embed, whole.load_model(8).pos_embed)
    with pytest.raises(FileNotFoundError, match="no checkpoint of step 12; it has 8"):
        shorter.load_model(12)
    assert whole.config() == config and whole.checkpoints() == [8, 12] and len(whole.metrics()) == 6
    status = whole.status()
    whole.set_status("interrupted", 12, 20)
    assert launch(asked, whole.path).checkpoints() == [8]   # a longer run that has not ended yet
    whole.set_status(**status)
    with pytest.raises(ValueError, match="past num_steps = 10"):
        launch(replace(config, num_steps=10), whole.path)


def test_a_launch_in_the_notebook_joins_a_run_that_another_notebook_trains(config, tmp_path):
    first = threading.Thread(target=launch, args=(replace(config, num_steps=40), tmp_path / "run", 0))
    first.start()
    while not RunFolder(tmp_path / "run").is_locked():
        time.sleep(0.01)
    folder = launch(replace(config, num_steps=40), tmp_path / "run", 0)
    first.join()
    assert folder.status()["state"] == "finished" and folder.metrics()["step"].tolist() == list(range(2, 41, 2))
    assert [event["event"] for event in folder.events()].count("started") == 1


def test_launch_raises_with_the_end_of_the_log_when_its_process_fails(config, tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho $* >&2\necho no latents here >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(RuntimeError, match=r"(?s)new at step 0.*-m dit_repro train .*/run\nno latents here"):
        launch(config, tmp_path / "run")
    with pytest.raises(RuntimeError, match=r"torch\.distributed\.run --standalone --nproc-per-node=2 -m dit_"):
        launch(config, tmp_path / "run", num_processes=2)


def test_tensorboard_that_is_not_installed_is_named(config, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ValueError, match=r"dit-repro\[tensorboard\]"):
        Trainer(replace(config, tensorboard=True), tmp_path / "run").run()
