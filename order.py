"""Which row comes at which place of a run: pure functions of a few integers, so no order is ever stored.

    position p of the run  ->  (corpus, index in it)   blend: a tree of two-way splits
    index in a corpus      ->  row                     shuffled: a random permutation for each epoch
    block of 128 steps     ->  its steps               balanced: rows of about equal cost fill a step
    step                   ->  rows of a rank          dealt

Neither the run's length nor the world size enters, so a run can be extended, or resumed on other machines, and sees the
same rows. Blocks are whole and epochs wrap. What a run must remember is how many rows each step has, and since when.
"""

import hashlib
import heapq
import itertools
import math
from collections import Counter
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from errors import ConfigError

BLOCK_STEPS = 128  # steps whose rows are sorted together, a power of two
RESOLUTION = 1 << 30  # weights that are not small whole numbers, nor ratios of such, are multiples of 1 / RESOLUTION
MAX_EXPONENT = 400  # of a weight; every float has a smaller one, and each more is a digit to compute with
BALANCE = ("auto", "sorted", "buckets", "none")
SORTED_FROM = 4096  # seq_len from which on auto sorts: below, attention is a small part of a row's work, and rows that are alike
# in a step cost more in learning than they save (debug size, 4 rows of 512 tokens: held-out loss +0.06 at step 100)
BUCKET = 1.15  # costs of a bucket of the published method differ by at most this factor (its own is not known)
# A token costs as much as attention to so many others, as the keys see it. The linear work is larger in every model of the
# table, but a larger value would leave fewer of the 256 keys to what differs between rows, their attention.
LINEAR_TOKENS = 2048


# ------------------------------------------------------------------------------------------------------------------
# Blend: position -> (corpus, index in the corpus)
# ------------------------------------------------------------------------------------------------------------------


def exact_weight(weight) -> Fraction:
    """Of a number or its text. Raises ConfigError where it is no finite number, or far from what a weight can be."""
    text = str(weight)
    try:
        _, _, exponent = text.lower().partition("e")
        if exponent and abs(int(exponent)) > MAX_EXPONENT:
            raise ConfigError(f"--data: weight {weight} has an exponent beyond {MAX_EXPONENT}; write e.g. 0.7 or 3")
        return Fraction(text)
    except (ValueError, ZeroDivisionError):
        raise ConfigError(f"--data: weight {weight} is not a finite number; write e.g. 0.7 or 3") from None


def integer_weights(weights: list) -> list[int]:
    """Whole numbers in proportion to the weights, which are numbers or their text and need not sum to 1.

    Exact where their sum stays below RESOLUTION (7 and 3, 0.7 and 0.3, 1/3 and 2); else shares are rounded to multiples of
    1 / RESOLUTION, and none that is above 0 becomes 0. Raises ConfigError where one is negative or no number, or none is
    above 0."""
    exact = []
    for weight in weights:
        exact.append(exact_weight(weight))
        if exact[-1] < 0:
            raise ConfigError(f"--data: weight {weight} is negative; leave the corpus out, or give it 0")
    if not sum(exact):
        raise ConfigError(f"--data: the weights {', '.join(map(str, weights))} are all 0; give one corpus more")
    scale = math.lcm(*(w.denominator for w in exact))
    whole = [int(w * scale) for w in exact]
    common = math.gcd(*whole)
    if sum(whole) // common < RESOLUTION:
        return [w // common for w in whole]
    return [max(1, round(w / sum(exact) * RESOLUTION)) if w else 0 for w in exact]


class Node(NamedTuple):
    """Of the tree of splits: a corpus, or two nodes."""

    weight: int
    tie: int  # of equal weights the lower comes first, so that the tree is a function of the weights
    inside: object  # corpus number | (Node, Node)


def split_tree(weights: tuple[int, ...]) -> Node:
    """Huffman's tree over the weights above 0: light corpora are deep, and a position passes few splits on average."""
    heap = [Node(w, i, i) for i, w in enumerate(weights) if w]
    heapq.heapify(heap)
    for tie in itertools.count(len(weights)):
        if len(heap) == 1:
            return heap[0]
        light, heavy = heapq.heappop(heap), heapq.heappop(heap)
        heapq.heappush(heap, Node(light.weight + heavy.weight, tie, (heavy, light)))


def passed(n, weight: int, total: int):
    """How many of the first n (int or int64 array) go to the side with `weight` of `total`: n * weight / total, rounded
    (Bresenham's line). By quotient and remainder, since n * weight could be beyond 2^63."""
    q, r = divmod(n, total)
    return q * weight + (r * weight + total // 2) // total


def blend(position_P: np.ndarray, tree: Node) -> tuple[np.ndarray, np.ndarray]:
    """(corpus_P, index_P), int64, of positions int64 [P] >= 0: the corpus, and how many earlier positions it has.

    Among the first n positions a corpus has its share of n but for less than one row a split on its way."""
    corpus_P, index_P = np.empty_like(position_P), np.empty_like(position_P)

    def descend(node: Node, place: np.ndarray, n: np.ndarray):
        if isinstance(node.inside, int):
            corpus_P[place], index_P[place] = node.inside, n
            return
        left, right = node.inside
        before = passed(n, left.weight, node.weight)
        goes_left = passed(n + 1, left.weight, node.weight) > before
        descend(left, place[goes_left], before[goes_left])
        descend(right, place[~goes_left], (n - before)[~goes_left])

    descend(tree, np.arange(len(position_P)), position_P)
    return corpus_P, index_P


def counts(n: int, tree: Node) -> dict[int, int]:
    """How many of the first n positions each corpus has."""
    if isinstance(tree.inside, int):
        return {tree.inside: n}
    left, right = tree.inside
    to_left = passed(n, left.weight, tree.weight)
    return counts(to_left, left) | counts(n - to_left, right)


# ------------------------------------------------------------------------------------------------------------------
# Shuffle: index in a corpus -> row
# ------------------------------------------------------------------------------------------------------------------


INCREMENT = np.uint64(0x9E3779B97F4A7C15)  # splitmix64's: 2^64 over the golden ratio


def mix(x: np.ndarray) -> np.ndarray:
    """u64 [...] -> u64 [...]: a bijection, every input bit reaches every output bit (splitmix64's finalizer)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def splitmix(x: np.ndarray) -> np.ndarray:
    """u64 [...] -> u64 [...]: splitmix64 with its increment, so that 0 is mixed, too."""
    return mix(x + INCREMENT)


def hashed(*numbers: int) -> np.ndarray:
    """u64 [1]: a random-looking function of whole numbers and of their order."""
    h = np.zeros(1, np.uint64)
    for number in numbers:
        h = mix((h + INCREMENT) ^ np.array([number % 2**64], np.uint64))
    return h


def shuffled(index_P: np.ndarray, n_rows: int, key: int) -> np.ndarray:
    """int64 [P]: rows at the given indices (int64 >= 0) of a corpus. Each epoch of n_rows indices has each row once, in an
    order keyed by (key, epoch); an index costs O(1).

    Four Feistel rounds permute the 2^bits numbers that are at least n_rows; what falls outside [0, n_rows) is permuted
    again (cycle walking; Black and Rogaway 2002)."""
    if n_rows < 1:
        raise ConfigError(f"a corpus of {n_rows} rows cannot be shuffled: give one with text")
    epoch_P, x_P = np.divmod(index_P, n_rows)
    x_P, bits = x_P.astype(np.uint64), max(2, int(n_rows - 1).bit_length())
    low = np.uint64(bits // 2)
    masks = (np.uint64((1 << bits - bits // 2) - 1), np.uint64((1 << bits // 2) - 1))
    key_P = mix(hashed(key) ^ epoch_P.astype(np.uint64))
    if len(epoch_P) and epoch_P.min() == epoch_P.max():
        key_P = key_P[:1]  # one key for all is quicker
    todo = np.arange(len(x_P))
    while len(todo):
        key = key_P if len(key_P) == 1 else key_P[todo]
        a, b = x_P[todo] >> low, x_P[todo] & masks[1]
        for n in range(0, 4, 2):
            a ^= mix(mix(key + np.uint64(n)) ^ b) & masks[0]
            b ^= mix(mix(key + np.uint64(n + 1)) ^ a) & masks[1]
        x_P[todo] = a << low | b
        todo = todo[x_P[todo] >= n_rows]
    return x_P.astype(np.int64)


# ------------------------------------------------------------------------------------------------------------------
# Balance: the rows of a block -> its steps
# ------------------------------------------------------------------------------------------------------------------


def cost_range(seq_len: int) -> tuple[float, float]:
    """Natural logarithms of the least and the greatest cost of a token: its linear work, and attention to one or all."""
    return math.log(LINEAR_TOKENS + 1), math.log(LINEAR_TOKENS + seq_len)


def cost_keys(squares_R: np.ndarray, seq_len: int) -> np.ndarray:
    """uint8 [R]: cost of each row on a logarithmic scale. squares: sum of squared lengths of the row's documents; the cost
    is LINEAR_TOKENS * seq_len + squares, as attention is within documents."""
    least, greatest = cost_range(seq_len)
    cost_R = np.log(LINEAR_TOKENS + np.asarray(squares_R, np.float64) / seq_len)
    return np.clip((cost_R - least) / (greatest - least) * 256, 0, 255).astype(np.uint8)


def key_cost(key_R: np.ndarray, seq_len: int) -> np.ndarray:
    """fp64 [R]: cost of a row with this key, in units of attention between two tokens; within half a key's width."""
    least, greatest = cost_range(seq_len)
    return seq_len * np.exp(least + (key_R.astype(np.float64) + 0.5) / 256 * (greatest - least))


def balanced(key_P: np.ndarray, rows_per_step: int, seq_len: int, method: str, draw: int) -> np.ndarray:
    """int64 [P]: the order in which P = steps * rows_per_step rows with these cost keys are taken. draw: a random number.

    sorted   by cost, so that consecutive rows fill a step; steps in bit-reversed order, each number XOR a random one, so
             that few consecutive steps already have costs, and corpora, as the whole block (steps: a power of two)
    buckets  as published: rows that differ by less than BUCKET, in random order, fill a step; steps in random order
    none     as they come
    auto     sorted from SORTED_FROM tokens on, else none"""
    steps = len(key_P) // rows_per_step
    if method == "auto":
        method = "sorted" if seq_len >= SORTED_FROM else "none"
    if method == "none":
        return np.arange(len(key_P))
    if method == "sorted":
        order = np.argsort(key_P, kind="stable")  # radix sort, for 8 bits
        bits = steps.bit_length() - 1
        reverse = [int(f"{step:0{bits}b}"[::-1], 2) if bits else 0 for step in range(steps)]
        return order.reshape(steps, -1)[np.array(reverse) ^ (draw % steps)].ravel()
    least, greatest = cost_range(seq_len)
    bucket_P = (key_P * ((greatest - least) / 256 / math.log(BUCKET))).astype(np.uint8)
    order = np.argsort(bucket_P, kind="stable")  # rows come shuffled, and stay so inside a bucket
    random = mix(hashed(draw) + np.arange(steps, dtype=np.uint64))
    return order.reshape(steps, -1)[np.argsort(random, kind="stable")].ravel()


def dealt(rows_per_step: int, world: int, rank: int) -> np.ndarray:
    """int64 [rows_per_step / world]: which of a step's rows a rank takes.

    The step's rows ascend by cost. Dealt as cards are, back and forth (0 1 2 3, 3 2 1 0, ...), so that not only the sums
    of ranks are close but also what they compute at the same time, their first rows, their second rows and so on."""
    turn = np.arange(rows_per_step // world)
    return turn * world + np.where(turn % 2 == 0, rank, world - 1 - rank)


# ------------------------------------------------------------------------------------------------------------------
# The whole run
# ------------------------------------------------------------------------------------------------------------------


class Source(NamedTuple):
    """What the order needs to know of a packed corpus."""

    identity: str  # hex digits: of its content, so that it is known again in another stage
    key_R: np.ndarray  # uint8 [rows]


class Stage(NamedTuple):
    from_step: int
    sources: list[Source]
    weights: list[int]
    seq_len: int


class Leg(NamedTuple):
    """Steps from `step` on, until the next leg: of the same stage and with the same number of rows."""

    step: int
    row: int  # rows of the run before this step ...
    tokens: int  # ... and tokens
    rows_per_step: int
    stage: int
    stage_row: int  # rows of the run before the stage
    taken: tuple[int, ...]  # rows of each of the stage's corpora before the stage: one that goes on does not begin anew
    block_steps: int


class Order:
    """The rows of every step of a run of some stages. anchors: [(step, rows per step from there on), ...], the first at 0.

    Raises ConfigError where a stage or an anchor does not lie at the end of a block."""

    def __init__(self, stages: list[Stage], anchors: list, seed: int, balance: str = "auto"):
        if balance not in BALANCE:
            raise ConfigError(f"--balance={balance}: unknown; use one of {', '.join(BALANCE)}")
        self.stages, self.seed, self.balance = stages, seed, balance
        self.trees = [split_tree(tuple(stage.weights)) for stage in stages]
        self.legs = self.lay_out([(int(step), int(rows)) for step, rows in anchors])
        self.block = lru_cache(maxsize=2)(self._block)  # the loader is some steps ahead of who else asks

    def lay_out(self, anchors: list[tuple[int, int]]) -> list[Leg]:
        legs, total = [], Counter()  # total: rows of each corpus, of the stages that are over
        for step in sorted({stage.from_step for stage in self.stages} | {step for step, _ in anchors}):
            number = sum(stage.from_step <= step for stage in self.stages) - 1
            rows_per_step = [rows for start, rows in anchors if start <= step][-1]
            row = tokens = stage_row = 0
            if legs:
                last = legs[-1]
                check_boundary(step, last.step, "another stage or another number of rows per step")
                row, stage_row = last.row + (step - last.step) * last.rows_per_step, last.stage_row
                tokens = last.tokens + (row - last.row) * self.stages[last.stage].seq_len
                if number != last.stage:
                    for corpus, n in counts(row - stage_row, self.trees[last.stage]).items():
                        total[self.stages[last.stage].sources[corpus].identity] += n
                    stage_row = row
            stage = self.stages[number]
            taken = tuple(total[source.identity] for source in stage.sources)
            legs.append(Leg(step, row, tokens, rows_per_step, number, stage_row, taken, block_steps(stage, rows_per_step)))
        return legs

    def leg(self, step: int) -> Leg:
        return [leg for leg in self.legs if leg.step <= step][-1]

    def rows_before(self, step: int) -> int:
        leg = self.leg(step)
        return leg.row + (step - leg.step) * leg.rows_per_step

    def tokens_before(self, step: int) -> int:
        leg = self.leg(step)
        return leg.tokens + (step - leg.step) * leg.rows_per_step * self.stages[leg.stage].seq_len

    def rows(self, step: int) -> tuple[int, np.ndarray, np.ndarray]:
        """(stage, corpus_R, row_R) of all rows of a step, int64."""
        leg = self.leg(step)
        block, inside = divmod(step - leg.step, leg.block_steps)
        corpus_BR, row_BR = self.block(leg, block)
        return leg.stage, corpus_BR[inside], row_BR[inside]

    def _block(self, leg: Leg, block: int) -> tuple[np.ndarray, np.ndarray]:
        """(corpus_BR, row_BR) of the leg's block with this number, int64 [steps, rows per step]."""
        stage, size = self.stages[leg.stage], leg.block_steps * leg.rows_per_step
        first = leg.row - leg.stage_row + block * size
        corpus_P, row_P = blend(np.arange(first, first + size), self.trees[leg.stage])  # row_P: indices so far
        key_P = np.empty(size, np.uint8)
        for corpus, source in enumerate(stage.sources):
            if len(here := np.flatnonzero(corpus_P == corpus)):
                key = int(hashed(self.seed, int(source.identity[:16], 16))[0])
                row_P[here] = shuffled(row_P[here] + leg.taken[corpus], len(source.key_R), key)
                key_P[here] = source.key_R[row_P[here]]
        draw = int(hashed(self.seed, leg.stage, first)[0])
        order = balanced(key_P, leg.rows_per_step, stage.seq_len, self.balance, draw)
        shape = leg.block_steps, leg.rows_per_step
        return corpus_P[order].reshape(shape), row_P[order].reshape(shape)

    def digest(self, step: int) -> str:
        """Of the rows of a step; equal where the step is the same."""
        _, corpus_R, row_R = self.rows(step)
        return hashlib.sha256(np.stack([corpus_R, row_R]).astype("<i8").tobytes()).hexdigest()[:16]

    def same_rows(self, a: int, b: int) -> bool:
        """Whether two steps have the same rows, in any order: so it is meant to be where an epoch has few steps."""
        first, second = (sorted(zip([self.stages[stage].sources[c].identity for c in corpus_R], row_R.tolist()))
                         for stage, corpus_R, row_R in map(self.rows, (a, b)))
        return first == second


def check_boundary(step: int, anchor: int, what: str):
    """Raises ConfigError where a step is not at the end of a block: its rows would be cut in two, some would never come,
    others twice."""
    if over := (step - anchor) % BLOCK_STEPS:
        raise ConfigError(f"{what} from step {step} on: rows are balanced in blocks of {BLOCK_STEPS} steps, of which this is "
                          f"none's end; the nearest are steps {step - over} and {step - over + BLOCK_STEPS}")


def block_steps(stage: Stage, rows_per_step: int) -> int:
    """BLOCK_STEPS, halved until no corpus has more rows in a block than there are: sorting would bring the copies of a row
    together in a step. (Two may still meet where an epoch ends inside a block.)"""
    steps = BLOCK_STEPS
    for source, weight in zip(stage.sources, stage.weights):
        while steps > 1 and weight * steps * rows_per_step > len(source.key_R) * sum(stage.weights):
            steps //= 2
    return steps
