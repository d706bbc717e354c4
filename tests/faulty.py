"""train.py with faults planted: python launch.py ... -- tests/faulty.py JSON --run=...

JSON: a fault of the last rank -> the steps at which it strikes; or flip or rewound, see below."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import launch  # noqa: E402
import optim  # noqa: E402
import torch  # noqa: E402
import train  # noqa: E402

GRADIENT = {"nan": lambda dx: dx * torch.nan, "inf": lambda dx: dx.index_fill(0, torch.tensor(0), torch.inf),
            "spike": lambda dx: dx * 1000}


def main(argv):
    faults, where, step = json.loads(argv[0]), launch.place(), [0]
    learning_rate, head_loss = optim.learning_rate, train.head_loss

    def noted(now, *args):
        step[0] = now + 1
        return learning_rate(now, *args)

    def faulty(*args):
        loss, dx, *rest = head_loss(*args)
        for fault, steps in faults.items():
            if fault in ("loss", *GRADIENT) and args[5] and where.rank == where.world - 1 and step[0] in steps:
                dx, loss = GRADIENT.get(fault, lambda x: x)(dx), loss * (torch.nan if fault == "loss" else 1)
        return loss, dx, *rest

    optim.learning_rate, train.head_loss = noted, faulty
    if faults.get("flip"):  # the last bit of one initial weight of rank 0
        init_state = train.init_state

        def flipped(*args):
            state = init_state(*args)
            state.master["layers.1.gate_up"].view(torch.int32).view(-1)[1234] ^= int(where.rank == 0)
            return state

        train.init_state = flipped
    if faults.get("rewound"):  # so many steps back
        loader = train.data.Loader

        class Rewound(loader):
            def __init__(self, blends, order, world, rank, step):
                super().__init__(blends, order, world, rank, step - faults["rewound"])

            def take(self, step):
                return super().take(step - faults["rewound"])

        train.data.Loader = Rewound
    return train.main(argv[1:])


if __name__ == "__main__":
    sys.exit(launch.run(main))
