import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_script(name, *arguments):
    command = [sys.executable, Path(__file__).with_name(name), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    print(done.stdout)
    return done.stdout


def test_thirty_kills_lose_nothing_and_change_no_bit(tmp_path):
    printed = run_script("kill_trainer.py", tmp_path, 30)
    counts = {name: int(count) for count, name in (part.split(" ", 1) for part in printed.strip().split(", "))}
    assert counts["killed"] == 30 and counts["killed inside a save"] >= 10 and counts["runs finished"] >= 1
    assert counts["lost or different"] == counts["unreadable"] == 0


def test_a_full_disk_stops_the_run_with_its_last_checkpoint_intact(tmp_path):
    assert "0 checkpoints lost" in run_script("fill_disk.py", tmp_path)
