import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # pytest-xdist already uses both cores
sys.path.insert(0, str(Path(__file__).parent))   # for stand_ins, which is a script too
