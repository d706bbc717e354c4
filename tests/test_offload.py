"""offload.py: arenas, copies, streamed state, tracked memory, the report and its refusals."""

import json

import pytest
from spawn import worker

SAME = {"resident": dict(), "some inputs": dict(offload=0.5), "state": dict(offload_state=True),
        "odd chunks": dict(offload=1.0, offload_state=True, stream=7777), "an expert at a time": dict(offload_state=True, stream=1)}
VARIANTS = {
    "muon": dict(),
    "adamw": dict(optimizer="adamw"),
    "production": dict(router="sigmoid", compute="bfloat16", weights="fp8", grads="bfloat16"),
    "layer": dict(dense="layer", weights="bf16"),
}


@pytest.mark.parametrize("nodes, ranks, replicas, variants", [(2, 2, 1, [*VARIANTS]), (4, 1, 2, ["production"])])
def test_where_things_live_changes_no_bit(tmp_path, nodes, ranks, replicas, variants):
    """Activations and state on the host, streamed in chunks that do and do not divide: losses, norm and masters are the same
    bits as with everything on the device, for every optimizer."""
    cases = [VARIANTS[v] | SAME[s] | dict(name=f"{v}, {s}", steps=3) for v in variants for s in SAME]
    worker("layouts", nodes, ranks, tmp_path, replicas=replicas, cases=cases)
    results = json.loads((tmp_path / "results.json").read_text())
    for v in variants:
        resident = results[f"{v}, resident"]
        assert len(set(resident["losses"])) == 3
        assert not [s for s in SAME if results[f"{v}, {s}"] != resident]
