import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: spinning threads take the cores of the spawned ranks
sys.path.insert(0, str(Path(__file__).parent.parent))
