import os
import sys
from pathlib import Path

import numpy as np
import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: spinning threads take the cores of the spawned ranks
os.environ["NANO1T_SCHEDULER"] = "none"  # nodes are simulated, whatever is installed here and wherever the tests run
os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent / "startup"), *filter(None, [os.environ.get("PYTHONPATH")])])
sys.path.insert(0, str(Path(__file__).parent.parent))

LONGEST = ("test_wire", "test_layouts", "test_train", "test_checkpoint", "test_slurm", "test_recover", "test_health", "test_offload")


def pytest_collection_modifyitems(items):
    """The files that take longest first, so that parallel workers end at about the same time."""
    order = {name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))


def pytest_xdist_auto_num_workers(config):
    """make test: one more than cores, since some tests wait; a test may start eight ranks, so no more than four."""
    return min(4, 1 + (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1))


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A directory with some texts to train on."""
    path = tmp_path_factory.mktemp("train")
    (path / "texts").mkdir()
    rng = np.random.default_rng(0)
    words = "the model reads a row of tokens and every rank adds its part of the gradient to what the others sent".split()
    for i in range(60):
        text = " ".join(rng.choice(words, rng.integers(5, 400)))
        (path / "texts" / f"{i}.txt").write_text(text)
    return path
