"""Trains until the disk is full, then with space again. Usage: fill_disk.py FOLDER

On a small tmpfs where one may be mounted; elsewhere under a limit on the size of a file, which fails writes as well.
Prints which of the two it was.
"""
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
from tiny_training import final_bytes, tiny_config, write_store

from dit_repro.training import RunFolder, Trainer

torch.set_num_threads(1)


def train(config, folder):
    """The error that ended the run, or None."""
    try:
        return Trainer(config, folder).run() and None
    except RuntimeError as error:
        return str(error)


def main(folder):
    config = replace(tiny_config(write_store(folder / "latents")), keep_last=9, archive_every=0)
    Trainer(config, folder / "whole").run()
    size = max(path.stat().st_size for path in folder.glob("whole/checkpoints/*"))
    small = folder / "small"
    small.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={int(2.5 * size)}", "tmpfs", small],
                           capture_output=True, check=False)
    on_tmpfs = mount.returncode == 0
    try:
        # The free space is checked first; told a lie, the write itself must fail and leave nothing behind.
        lie = mock.patch("shutil.disk_usage", return_value=mock.Mock(free=1 << 40))
        for attempt in ("checked", "written"):
            run = RunFolder(small / "run")
            if on_tmpfs:
                with lie if attempt == "written" else mock.patch.dict({}):
                    error = train(config, run.path)
            else:
                Trainer(replace(config, num_steps=8), run.path).run()
                limits = resource.getrlimit(resource.RLIMIT_FSIZE)
                resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, limits[1]))
                error = train(config, run.path)
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            expected = "MB free, a checkpoint needs" if on_tmpfs and attempt == "checked" else "could not be written"
            assert error and expected in error, error
            assert run.checkpoints() == [4, 8] and all(problem is None for _, problem in run.verify())
            assert not list(run.checkpoint_folder.glob("*.tmp"))
            assert run.load_model().training is False and run.status()["state"] == "failed"
        if on_tmpfs:
            subprocess.run(["mount", "-o", f"remount,size={9 * size}", small], check=True)
        assert train(config, run.path) is None
        assert final_bytes(run.path) == final_bytes(folder / "whole")
    finally:
        if on_tmpfs:
            subprocess.run(["umount", small], check=True)
    print(f"disk full on {'a tmpfs' if on_tmpfs else 'a file size limit'}: 2 times, 0 checkpoints lost, 0 unreadable")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
