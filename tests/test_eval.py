"""The count tables against a brute-force version, the forward pass of eval.py, and the program end to end."""

import dataclasses
import json
import math
import os
import re
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import data
import eval as ev
import order
import tokenizer
from model import ConfigError, model_of
from parallel import Transport, init_state, make_grid
from spawn import write_documents

ROOT = Path(__file__).parent.parent
SIZES = ("--layers=2", "--width=64", "--heads=4", "--kv_heads=2", "--head_dim=16", "--expert_width=32", "--vocab=300",
         "--seq_len=64")



@pytest.fixture(autouse=True)
def one_thread():
    """Threads that wait for a busy core would make the small products here many times slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# ------------------------------------------------------------------------------------------------------------------
# Tables
# ------------------------------------------------------------------------------------------------------------------

V = 13


def toy_pairs(n: int, seed: int) -> np.ndarray:
    """Keys of a chain where the next token mostly follows from the last; tokens 11 and 12 never occur."""
    rng, at, keys = np.random.default_rng(seed), 0, []
    for _ in range(n):
        to = (at * 3 + 1) % 11 if rng.random() < 0.7 else int(rng.integers(11) * rng.random())
        keys.append(at * V + to)
        at = to
    return np.array(keys, np.int64)


class BruteForce:
    """Jelinek-Mercer with dictionaries and loops, for a given table's edges."""

    def __init__(self, counted, edges, use_pair):
        self.pair, self.context, self.target = Counter(), Counter(), Counter()
        self.edges, self.use_pair = list(edges), use_pair
        self.add(counted)

    def add(self, keys):
        for key in keys:
            self.pair[key // V, key % V] += 1
            self.context[key // V] += 1
            self.target[key % V] += 1

    def bucket(self, c):
        n = self.context[c]
        return 0 if not (n and self.use_pair) else 1 + sum(edge <= n for edge in self.edges)

    def parts(self, c, t):
        pair = self.pair[c, t] / self.context[c] if self.context[c] else 0
        return pair, self.target[t] / sum(self.target.values()), 1 / V

    def fit(self, left_out):
        prior = {b: (0, 1 / 2, 1 / 2) if b == 0 else (1 / 3,) * 3 for b in range(len(self.edges) + 2)}
        self.weights = dict(prior)
        for _ in range(ev.EM_ROUNDS):
            total = defaultdict(lambda: [0.0] * 3, {b: list(p) for b, p in prior.items()})
            for key in left_out:
                b = self.bucket(key // V)
                share = [w * p for w, p in zip(self.weights[b], self.parts(key // V, key % V))]
                total[b] = [old + s / sum(share) for old, s in zip(total[b], share)]
            self.weights = {b: [x / sum(t) for x in t] for b, t in total.items()}

    def probability(self, c, t):
        return sum(w * p for w, p in zip(self.weights[self.bucket(c)], self.parts(c, t)))


@pytest.mark.parametrize("name", ["unigram", "bigram"])
def test_table_equals_brute_force(name):
    counted, left_out = toy_pairs(400, 0), toy_pairs(60, 1)
    table = ev.fit_tables(counted, left_out, V)[name]
    other = BruteForce(counted.tolist(), table.edges.tolist(), name == "bigram")
    other.fit(left_out.tolist())
    other.add(left_out.tolist())
    everything = np.arange(V * V)
    expected = [other.probability(key // V, key % V) for key in everything.tolist()]
    np.testing.assert_allclose(ev.probability(table, everything), expected, rtol=1e-12)
    assert name == "unigram" or len(table.edges) > 2


@pytest.mark.parametrize("counted, left_out", [(400, 60), (400, 0), (1, 0), (0, 0), (0, 3), (3, 400)])
def test_probabilities_sum_to_one_in_every_context(counted, left_out):
    for table in ev.fit_tables(toy_pairs(counted, 0), toy_pairs(left_out, 1), V).values():
        p = ev.probability(table, np.arange(V * V)).reshape(V, V)
        if counted + left_out:
            np.testing.assert_allclose(p.sum(1), 1, rtol=1e-12)  # 11 and 12 are contexts that never occurred
        assert (p > 0).all()


def test_large_vocabulary_stays_sparse():
    vocab = 131_072
    keys = np.random.default_rng(0).integers(vocab * vocab, size=20_000)
    table = ev.fit_tables(keys[:18_000], keys[18_000:], vocab)["bigram"]
    assert len(table.counts.keys) == len(np.unique(keys))
    for context in (int(keys[0] // vocab), int(np.flatnonzero(table.counts.context_V == 0)[0])):
        assert ev.probability(table, context * vocab + np.arange(vocab)).sum() == pytest.approx(1, rel=1e-9)


def test_pairs_help_where_there_is_structure_and_do_no_harm_where_there_is_none():
    def nats(keys):
        tables = ev.fit_tables(keys[:4000], keys[4000:4500], V)
        return {name: -np.log(ev.probability(table, keys[4500:])).mean() for name, table in tables.items()}

    chain = nats(toy_pairs(6000, 0))
    assert chain["bigram"] < chain["unigram"] - 0.5
    assert chain["unigram"] < math.log(V)
    noise = nats(np.random.default_rng(0).integers(V * V, size=6000))
    assert noise["bigram"] < noise["unigram"] + 0.01
    assert noise["unigram"] < math.log(V) + 0.01


class FakeRows:
    """Row r holds the tokens r, r, r and one target less."""

    seq_len, vocab, path = 3, 100, None

    def __getitem__(self, r):
        return data.Row(np.array([r, r, r]), np.array([r, -1, r]), [0, 2, 3], 3)


@pytest.mark.parametrize("steps, fit_rows", [(1, 99), (2, 99), (7, 99), (40, 99), (7, 3), (7, 0)])
def test_tables_count_the_rows_seen_as_often_as_they_were_seen(steps, fit_rows):
    """Two corpora of 20 rows, two stages, 2 and then 4 rows a step."""
    sources = [order.Source(name * 16, np.zeros(20, np.uint8)) for name in "ab"]
    stages = [order.Stage(0, sources[:1], [1], 3), order.Stage(128, sources, [1, 2], 3)]
    blends = [SimpleNamespace(corpora=[FakeRows()] * n, seq_len=3) for n in (1, 2)]
    seen = ev.Seen(blends, order.Order(stages, [(0, 2), (128, 4)], 5), 128 - 4 + steps)
    rows, tokens = ev.seen_rows(seen, (2 * 124 + fit_rows) * 3)
    want = [(s, c, r) for step in range(seen.step) for s, cs, rs in [seen.order.rows(step)] for c, r in zip(cs.tolist(), rs.tolist())]
    want = want[: 2 * 124 + fit_rows]
    assert Counter((s, c, r) for (s, c), ids in rows.items() for r in ids.tolist()) == Counter(want) and tokens == 3 * len(want)
    counted, left_out = ev.seen_pairs(seen, rows)
    assert Counter((np.concatenate([counted, left_out]) % 100).tolist()) == Counter([r for _, _, r in want for _ in range(2)])
    assert 0 < len(left_out) <= len(counted)


def test_of_a_single_row_nothing_is_left_out():
    blend = SimpleNamespace(corpora=[FakeRows()], seq_len=3)
    single = order.Order([order.Stage(0, [order.Source("a" * 16, np.zeros(20, np.uint8))], [1], 3)], [(0, 1)], 5)
    for steps, tokens in ((1, 99), (9, 0)):
        rows, n = ev.seen_rows(seen := ev.Seen([blend], single, steps), tokens)
        counted, left_out = ev.seen_pairs(seen, rows)
        assert len(counted) == 2 and not len(left_out) and n == 3


def test_bits_per_byte_by_hand():
    # 3 tokens at probabilities 1/2, 1/4, 1/8: 6 bits, for "ab", "c" and an end of document
    assert ev.bits_per_byte(-math.log(1 / 2 * 1 / 4 * 1 / 8), 3) == pytest.approx(2.0)


# ------------------------------------------------------------------------------------------------------------------
# Forward pass
# ------------------------------------------------------------------------------------------------------------------


def random_model(**changes):
    m = model_of("debug", layers=2, width=64, heads=4, kv_heads=2, head_dim=16, expert_width=32, vocab=90, seq_len=48,
                 **changes)
    grid = make_grid(0, 1, 1, 1, m, connect=False)
    state = init_state(m, grid, 3, torch.device("cpu"))
    state.bias_LX += torch.linspace(-0.1, 0.1, m.experts)
    return m, ev.whole_weights(state, grid, m, Transport(torch.float32))


@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
@pytest.mark.parametrize("max_per_group", [1, 2, 4])
def test_causality_and_isolation(router, max_per_group):
    m, weights = random_model(router=router, max_per_group=max_per_group, rope_every=1 + max_per_group % 2)
    tokens, bounds = torch.randint(m.vocab, (48,), generator=torch.Generator().manual_seed(1)), [0, 11, 30, 48]
    before = ev.logits(tokens, bounds, weights, m)
    assert before.shape == (48, 90) and before.dtype == torch.float32
    for t in (0, 10, 11, 20, 29, 30, 47):
        end = next(b for b in bounds if b > t)
        changed = tokens.clone()
        changed[t] = (changed[t] + 1) % m.vocab
        moved = (ev.logits(changed, bounds, weights, m) - before).abs().amax(1)
        assert moved[:t].sum() < 1e-5 and moved[end:].sum() < 1e-5, f"token {t} is seen where it must not be"
        assert (moved[t:end] > 1e-4).all(), f"token {t} is not seen where it must be"
    torch.testing.assert_close(ev.logits(tokens, bounds, weights, m, last=True), before[-1:])


def test_pick():
    rng = np.random.default_rng(0)
    logits = np.log(np.array([0.1, 0.5, 0.25, 0.15]))
    assert ev.pick(logits, 0, 1, rng) == 1
    drawn = Counter(ev.pick(logits, 1, 1, rng) for _ in range(4000))
    for token, p in enumerate((0.1, 0.5, 0.25, 0.15)):
        assert drawn[token] / 4000 == pytest.approx(p, abs=0.03)
    assert {ev.pick(logits, 1, 0.7, rng) for _ in range(200)} == {1, 2}
    assert {ev.pick(logits, 1, 1e-9, rng) for _ in range(50)} == {1}
    assert Counter(ev.pick(logits, 0.2, 1, rng) for _ in range(500))[1] > 450
    logits[1] = -np.inf
    assert 1 not in {ev.pick(logits, 1, 1, rng) for _ in range(200)}


class Tokenizer:
    """Two of the model's ids lie beyond its pieces; 0 is <unk>, 1 ends a document, 2 is another control piece."""

    def vocab_size(self):
        return 88

    def eos_id(self):
        return 1

    def is_unknown(self, i):
        return i == 0

    def is_control(self, i):
        return i in (1, 2)


def test_continuation_reads_the_last_row_and_writes_text_only():
    m, weights = random_model()
    for i in (0, 2, 88, 89):  # the ids that must not come are made the likeliest
        weights["head"][i] = weights["head"][5] * 3
    s = ev.SampleSettings(tokens=20, temperature=1.0, top_p=1.0)

    def drawn(prompt, seed=0, **changes):
        rng = np.random.default_rng(seed)
        settings = dataclasses.replace(s, **changes)
        return ev.continuation(prompt, settings, weights, m, Tokenizer(), rng, torch.device("cpu"))

    long = np.random.default_rng(0).integers(3, 88, 100).tolist()
    out = drawn(long)
    assert 0 < len(out) <= 20 and not {0, 1, 2, 88, 89} & set(out)
    assert out == drawn(long) == drawn(long[-48:])
    assert any(drawn(long, seed) != out for seed in (1, 2))
    assert drawn(long, temperature=0.0, tokens=5) == drawn(long, 9, temperature=0.0, tokens=5)


def test_continuation_ends_with_the_document(monkeypatch):
    says = iter([5, 6, 1, 7])
    monkeypatch.setattr(ev, "logits", lambda *_, last: torch.eye(90)[next(says)][None])
    s = ev.SampleSettings(tokens=9, temperature=0.0)
    assert ev.continuation([3], s, {}, model_of("debug", vocab=90), Tokenizer(), None, torch.device("cpu")) == [5, 6]


# ------------------------------------------------------------------------------------------------------------------
# The program
# ------------------------------------------------------------------------------------------------------------------


def start(cwd: Path, *command, code=0) -> subprocess.CompletedProcess:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {name: value for name, value in os.environ.items() if name not in names}
    env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT), "LC_ALL": "C"}
    done = subprocess.run([sys.executable, *map(str, command)], cwd=cwd, env=env, capture_output=True, timeout=120)
    assert done.returncode == code, done.stdout.decode() + done.stderr.decode()
    return done


def ranks(n: int) -> tuple:
    return () if n == 1 else (ROOT / "launch.py", "--ranks-per-node", n, "--")


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A folder with out/x, trained on one rank, and out/y, on two."""
    cwd = tmp_path_factory.mktemp("trained")
    write_documents(cwd / "text", 300)
    for run, n in (("x", 1), ("y", 2)):
        start(cwd, *ranks(n), ROOT / "train.py", f"--run={run}", "--steps=8", *SIZES, "--data=text", "--wandb=off")
    return cwd


def evals(cwd: Path, run: str) -> list[dict]:
    return [json.loads(line) for line in (cwd / "out" / run / "evals.jsonl").read_text().splitlines()]


def test_loss_of_a_trained_run(trained):
    table = start(trained, ROOT / "eval.py", "loss", "--run=x").stdout.decode()
    (found,) = evals(trained, "x")
    trained_on = json.loads((trained / "out/x/metrics.jsonl").read_text().splitlines()[-1])
    assert found["nats"]["model"] == pytest.approx(trained_on["val_loss"], abs=1e-5)
    assert found["nats"]["bigram"] < found["nats"]["unigram"] < found["nats"]["chance"] == pytest.approx(math.log(300))
    assert found["tokens"] == found["fit_tokens"] == 8 * 64

    (path,) = (trained / "data").glob("rows-*")
    rows, tok = data.Rows(path, "val"), tokenizer.load_tokenizer(path)
    targets = np.concatenate([rows[r].targets_S[rows[r].targets_S >= 0] for r in range(len(rows))])
    assert (found["rows"], found["targets"]) == (len(rows), len(targets))
    assert found["bytes"] == len(tok.decode(targets.tolist()).encode())  # end-of-document decodes to nothing
    for name, nats in found["nats"].items():
        assert found["bits_per_byte"][name] == pytest.approx(nats * len(targets) / math.log(2) / found["bytes"])

    shown = re.findall(r"^(.+?)  +([\d.]+) +([\d.,]+) +([\d.]+)$", table, re.M)
    assert [name for name, *_ in shown] == list(ev.LABELS.values())
    assert [float(nats) for _, nats, _, _ in shown] == pytest.approx(list(found["nats"].values()), abs=1e-4)
    worse = found["nats"]["model"] >= found["nats"]["bigram"]
    assert worse and "does not beat: bigram table" in table  # after 8 steps


def test_the_text_of_a_run_may_be_gone_while_what_was_made_of_it_is_there(trained):
    (trained / "text").rename(trained / "elsewhere")
    try:
        start(trained, ROOT / "eval.py", "loss", "--run=x")
        first, *_, last = evals(trained, "x")
        assert last["nats"] == first["nats"]
        start(trained, ROOT / "export.py", "export", "--run=x")
    finally:
        (trained / "elsewhere").rename(trained / "text")


def test_an_evaluation_of_a_run_that_cannot_be_written_is_shown_all_the_same(tmp_path, capsys):
    run = SimpleNamespace(path=tmp_path / "file" / "ckpt" / "step-00000001", hp=None)
    (tmp_path / "file").touch()
    ev.record({"nats": {}}, run, "auto")
    assert "evals.jsonl cannot be written" in capsys.readouterr().err


def test_warning_only_where_it_is_due(capsys):
    result = {"checkpoint": "c", "tokens": 5, "fit_tokens": 5, "rows": 1, "targets": 1, "bytes": 1, "dtype": "float32",
              "seconds": 0.0, "step": 1, "bits_per_byte": dict.fromkeys(ev.LABELS, 1.0)}
    for nats, warned in ((1.0, ""), (2.5, "bigram table."), (9.0, "bigram table; unigram table; chance"),
                         (float("nan"), "bigram table; unigram table; chance")):
        ev.print_table(result | {"nats": {"model": nats, "bigram": 2.0, "unigram": 3.0, "chance": 4.0}})
        printed = capsys.readouterr().out
        assert ("does not beat" in printed) == bool(warned) and warned in printed


def test_any_number_of_ranks_finds_the_same_loss(trained):
    for n in (1, 2):
        start(trained, *ranks(n), ROOT / "eval.py", "loss", "--run=y", "--step=8", "--rows=3")
    one, two = evals(trained, "y")
    assert (one["ranks"], two["ranks"]) == (1, 2)
    assert one["targets"] == two["targets"] and one["rows"] == two["rows"]
    assert one["nats"]["model"] == pytest.approx(two["nats"]["model"], abs=1e-5)
    assert one["nats"]["bigram"] == two["nats"]["bigram"]


def texts(output: str) -> list[str]:
    """What was sampled, behind the marked prompt."""
    return [part.split("]]", 1)[1].strip("\n") for part in output.split("\n--- sample ")[1:]]


SAMPLES = (("--seed=0", "--samples=2"), ("--seed=0", "--samples=1"), ("--seed=1", "--samples=1"),
           ("--greedy=True",), ("--temperature=0", "--seed=7"),
           ("--prompt=" + "the value of a list " * 40, "--samples=1"),
           ("--prompt=caf\u00e9 \u4e2d", "--samples=1", "--temperature=5", "--top_p=1"),
           ("--prompts=prompts.txt", "--seed=0", "--samples=2"), ("--prompts=prompts.jsonl", "--samples=1"))


def test_samples_of_a_trained_run(trained):
    shown = start(trained, ROOT / "eval.py", "sample", "--run=x", "--tokens=20", "--samples=2").stdout.decode()
    assert shown.count("[[Return the]]") == 2
    # the rest in one process, since starting takes most of the time
    script = ("import sys, json, eval\nimport torch.distributed as dist\n"
              "for argv in json.loads(sys.argv[1]):\n"
              "    eval.sample(argv)\n    print('=====')\n    dist.destroy_process_group()\n")
    calls = [["--run=x", "--tokens=20", *more] for more in SAMPLES]
    (trained / "prompts.txt").write_text("the value\n\nReturn the\r\n")
    (trained / "prompts.jsonl").write_text('"two\\nlines"\n\n{"prompt": "caf\\u00e9", "id": 7}\n')
    out = start(trained, "-c", script, json.dumps(calls)).stdout.decode()  # decode: valid UTF-8 in a C locale too
    two, one, other, greedy, cold, long, foreign, listed, lines = out.split("=====\n")[:-1]
    assert texts(two) == texts(shown) and len(texts(two)) == 2 and texts(two)[0] != texts(two)[1]
    assert texts(one) == texts(two)[:1]
    assert texts(other) != texts(one)
    assert texts(greedy) == texts(cold) and len(texts(greedy)) == 1
    assert "of which the last 64 are read" in long
    assert "[[caf\u00e9 \u4e2d]]" in foreign
    assert listed.count("[[the value]]") == 2 and texts(listed)[2:] == texts(two)  # one prompt does not change another
    assert "[[two\nlines]]" in lines and "[[caf\u00e9]]" in lines and len(texts(lines)) == 2
    kept = [json.loads(line) for line in (trained / "out" / "x" / "samples.jsonl").read_text().splitlines()]
    assert kept[0]["prompt"] == "Return the" and ev.printable(kept[0]["text"]).strip("\n") == texts(shown)[0] and kept[-1]["prompt"] == "caf\u00e9"


@pytest.mark.parametrize("argv, said", [
    ([], "eval.py loss"),
    (["lose"], "'lose'"),
    (["loss", "--run=nowhere"], "--run=nowhere: no finished checkpoint.*name a run that has one: x, y"),
    (["loss", "--run=x", "--step=7"], "--step=7: .* use one of 8"),
    (["loss", "--checkpoint=out/x"], "--checkpoint=out/x: not a complete checkpoint"),
    (["loss", "--checkpoint=out/x/ckpt/step-00000008", "--step=8"], "give one of them"),
    (["loss", "--run=x", "--dtype=float16"], "--dtype=float16: unknown"),
    (["loss", "--run=x", "--rows=-1"], "--rows=-1: must be"),
    (["loss", "--run=x", "--data=gone"], "--data='gone' does not exist"),
    (["loss", "--prompt=a"], "--prompt=a: no such setting"),
    (["sample", "--run=x", "--prompt="], "--prompt=: empty"),
    (["sample", "--run=x", "--prompt=\udcff"], "not valid UTF-8"),
    (["sample", "--run=x", "--prompts=gone.txt"], "--prompts=gone.txt: cannot be read"),
    (["sample", "--run=x", "--prompts=text/docs.jsonl"], "--prompts=text/docs.jsonl: line 1 is neither"),
    (["sample", "--run=x", "--prompts=empty.txt"], "--prompts=empty.txt: holds no prompt"),
    (["sample", "--run=x", "--prompts=empty.jsonl"], "--prompts=empty.jsonl: line 2 is not JSON"),
    (["sample", "--run=x", "--temperature=-1"], "--temperature=-1: must be"),
    (["sample", "--run=x", "--tokens=0"], "--tokens=0: must be at least 1"),
    (["sample", "--run=x", "--samples=0"], "--samples=0: must be at least 1"),
    (["sample", "--run=x", "--top_p=0"], "--top_p=0.0: must be above 0"),
    (["sample", "--run=x", "--top_p=1.5"], "--top_p=1.5: must be"),
])
def test_bad_input_is_refused(trained, monkeypatch, argv, said):
    monkeypatch.chdir(trained)
    Path("empty.txt").write_text("\n \n")
    Path("empty.jsonl").write_text("\n{half\n")
    with pytest.raises(ConfigError) as error:
        ev.main(argv)
    assert re.search(said, str(error.value)) and "\n" not in str(error.value)


def test_sample_on_two_ranks_is_refused(trained, monkeypatch):
    monkeypatch.chdir(trained)
    for name, value in dict(RANK=0, WORLD_SIZE=2, LOCAL_RANK=0, LOCAL_WORLD_SIZE=2).items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(ConfigError, match="WORLD_SIZE=2: sample runs on one rank"):
        ev.main(["sample", "--run=x"])


def test_bad_input_ends_with_one_line_and_code_2(trained):
    (trained / "other").mkdir()
    (trained / "other" / "docs.txt").write_text((trained / "text" / "docs.jsonl").read_text().replace("value", "word"))
    done = start(trained, ROOT / "eval.py", "loss", "--run=x", "--data=other", code=2)
    lines = [line for line in done.stderr.decode().splitlines() if not line.startswith("data: ")]
    assert len(lines) == 1 and not done.stdout
    assert lines[0].startswith("error: --data=other: not what out/x/ckpt/step-00000008 was trained on")
