"""Speech to characters in the form of Deep Speech, on any number of workers.

apt-get install asterisk-core-sounds-en-wav asterisk-core-sounds-en
python examples/speech.py
torchrun --nproc-per-node 2 examples/speech.py

Recordings and their texts are of uneven length. The loss is the mean over the characters of a
global batch: each micro-batch gives the sum over its own, and how many they are.

Source: Hannun et al., 2014, arXiv:1412.5567.
"""

import argparse
import gzip
import re
import sys
import wave
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import ctc_loss, interpolate
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import Dataset

import allstep

SAMPLE_RATE = 8000
WINDOW, HOP = 160, 80  # samples, 20 and 10 ms
NUM_FREQUENCIES = WINDOW // 2 + 1
SILENCE = 1e-4  # power that is added, so that pauses with and without noise look alike
BLANK, CHARACTERS = 0, " 'abcdefghijklmnopqrstuvwxyz"  # these are numbered from 1 on
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
PACKAGES = "asterisk-core-sounds-en-wav asterisk-core-sounds-en"


@dataclass(frozen=True)
class Options:
    """The flags and what is fixed."""

    folder: Path = Path("/usr/share/asterisk/sounds/en_US_f_Allison")
    transcripts: Path = Path("/usr/share/doc/asterisk-core-sounds-en/core-sounds-en.txt.gz")
    max_s: float = 10.0  # longer recordings are left out
    held_out: float = 0.15  # share of the texts
    epochs: int = 35
    global_batch: int = 16
    micro_batch: int = 8  # one for each of two workers
    width: int = 192
    context: int = 11  # frames that the first layer sees at once
    stride: int = 3  # frames from one step of the recurrent layer to the next
    dropout: float = 0.2
    lr: float = 2e-3
    clip_norm: float = 1.0
    seed: int = 0
    run_dir: Path | None = None
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Recording:
    """A text and how it was spoken, [sample] in -1 to 1."""

    text: str
    waveform: Tensor


def spoken(text: str) -> str:
    """A transcript in the characters that are to be predicted; empty if it can't be."""
    text = re.sub(r"\[.*?\]|<.*?>|\(.*?\)", "", text.lower())  # sounds and remarks
    text = re.sub(r"\b\d\b", lambda found: DIGITS[int(found[0])], text)
    text = text.replace("*", " star ").replace("#", " pound ")
    text = " ".join(re.sub(r'[-.,:;!?"]', " ", text).split())
    return text if set(text) <= set(CHARACTERS) else ""


def read_recordings(options: Options) -> list[Recording]:
    """The recordings that have a text and are short enough, in the order of the transcripts.

    Raises:
        UsageError: if the recordings or the transcripts are not there.
    """
    for name in ("folder", "transcripts"):
        path = getattr(options, name)
        if not path.exists():
            raise allstep.UsageError(
                f"`{name}` (={path}) is not there. Debian and Ubuntu have these recordings as"
                f" packages: apt-get install {PACKAGES}"
            )
    with gzip.open(options.transcripts, "rt") as lines:
        named = [line.partition(": ") for line in lines if not line.startswith(";")]
    recordings = []
    for name, _, transcript in named:
        path, text = options.folder / f"{name}.wav", spoken(transcript)
        if text and path.is_file():
            waveform = read_wave(path)
            if len(waveform) <= options.max_s * SAMPLE_RATE:
                recordings.append(Recording(text, waveform))
    return recordings


def read_wave(path: Path) -> Tensor:
    """[sample] in -1 to 1, of a file with one channel of 16 bits."""
    with wave.open(str(path)) as file:
        found = file.getframerate(), file.getnchannels(), 8 * file.getsampwidth()
        if found != (SAMPLE_RATE, 1, 16):
            raise allstep.UsageError(
                f"{path} has {found[0]} Hz, {found[1]} channels and {found[2]} bits; convert it to"
                f" {SAMPLE_RATE} Hz, one channel and 16 bits."
            )
        samples = np.frombuffer(file.readframes(file.getnframes()), dtype="<i2")
    return torch.from_numpy(samples / np.float32(2**15))


def split(recordings: list[Recording], held_out: float) -> tuple[list[Recording], list[Recording]]:
    """Those to train on and those held out, always the same; what has one text stays together."""
    texts = sorted({recording.text for recording in recordings})
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0)).tolist()
    chosen = {texts[i] for i in order[: round(held_out * len(texts))]}
    train_set = [recording for recording in recordings if recording.text not in chosen]
    return train_set, [recording for recording in recordings if recording.text in chosen]


def spectrogram(waveform: Tensor) -> Tensor:
    """Log power, [frame, frequency]: windows of 20 ms, one every 10, as in the paper.

    Of each frequency the mean over the recording is taken away.
    """
    window = torch.hann_window(WINDOW, dtype=waveform.dtype)
    spectrum = torch.stft(waveform, WINDOW, HOP, window=window, center=False, return_complex=True)
    power = (spectrum.abs().square() + SILENCE).log().T
    return (power - power.mean(0)) / 3  # about their standard deviation


Sample = tuple[Tensor, Tensor]
"""A spectrogram, [frame, frequency], and numbers of characters, int64 [character]."""


class Spectrograms(Dataset[Sample]):
    """Recordings as a net takes them; to train on, each is shown a little different every time."""

    def __init__(self, recordings: list[Recording], dtype: torch.dtype, *, augment: bool) -> None:
        self.samples = [
            (spectrogram(recording.waveform).to(dtype), encode(recording.text))
            for recording in recordings
        ]
        self.augment = augment

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        frames, characters = self.samples[index]
        return (augmented(frames) if self.augment else frames), characters


def augmented(frames: Tensor) -> Tensor:
    """Faster or slower by up to 15 %, with two bands of frequencies and some times set to 0.

    Draws from torch's random state, which the loader sets for each sample.

    Source: Park et al., 2019, arXiv:1904.08779 (without warping).
    """
    factor = 0.85 + 0.3 * torch.rand(()).item()
    frames = interpolate(frames.T[None], size=round(factor * len(frames)), mode="linear")[0].T
    frames = frames.clone()
    for _ in range(2):
        hide(frames.T, 12)
    for _ in range(1 + len(frames) // 100):
        hide(frames, 8)
    return frames


def hide(rows: Tensor, most: int) -> None:
    """Sets to 0 fewer than `most` rows in succession."""
    num = int(torch.randint(most, ()))
    start = int(torch.randint(max(1, len(rows) - num), ()))
    rows[start : start + num] = 0


def encode(text: str) -> Tensor:
    """int64 [character]."""
    return torch.tensor([1 + CHARACTERS.index(character) for character in text])


Batch = tuple[Tensor, Tensor, Tensor, Tensor]
"""Spectrograms, [sample, frame, frequency], characters, [sample, character], each with lengths."""


def collate(samples: list[Sample]) -> Batch:
    """Pads with zeros."""
    frames, characters = ([sample[i] for sample in samples] for i in range(2))
    return (
        pad_sequence(frames, batch_first=True), torch.tensor([len(x) for x in frames]),
        pad_sequence(characters, batch_first=True), torch.tensor([len(x) for x in characters]),
    )  # fmt: skip


class DeepSpeech(nn.Module):
    """Five layers, of which the first sees some frames at once and the fourth is recurrent.

    As in the paper, but for GRUs in the fourth layer, which are added up in both directions.
    """

    def __init__(self, options: Options) -> None:
        super().__init__()
        width, context = options.width, options.context
        self.stride = options.stride
        self.first = nn.Conv1d(NUM_FREQUENCIES, width, context, self.stride, context // 2)
        self.second, self.third, self.fifth = (nn.Linear(width, width) for _ in range(3))
        self.fourth = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.scores = nn.Linear(width, 1 + len(CHARACTERS))
        self.active = nn.Sequential(nn.Hardtanh(0, 20), nn.Dropout(options.dropout))
        self._initialise(torch.Generator().manual_seed(options.seed))

    def _initialise(self, random: torch.Generator) -> None:
        for name, weight in self.named_parameters():
            if weight.ndim == 1:
                nn.init.zeros_(weight)
            elif "fourth" not in name:
                nn.init.kaiming_normal_(weight, generator=random)
            else:
                for gate in weight.chunk(3):
                    nn.init.orthogonal_(gate, generator=random)

    def forward(self, frames: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Log probabilities of the blank and the characters, [step, sample, 29], and lengths."""
        lengths = (lengths - 1) // self.stride + 1
        x = self.active(self.first(frames.transpose(1, 2))).transpose(1, 2)
        x = self.active(self.third(self.active(self.second(x))))
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        x, _ = pad_packed_sequence(self.fourth(packed)[0])
        x = self.active(self.fifth(sum(x.chunk(2, dim=2))))
        return self.scores(x).log_softmax(2), lengths


def summed_loss(outputs: tuple[Tensor, Tensor], batch: Batch) -> Tensor:
    """The sum over recordings of -log(probability of the text), by all its alignments."""
    log_probabilities, lengths = outputs
    _, _, characters, num_characters = batch
    return ctc_loss(
        log_probabilities, characters, lengths, num_characters, blank=BLANK, reduction="sum"
    )


def decode(outputs: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Each recording's likeliest symbols, step by step; of repeats the first, and no blanks."""
    log_probabilities, lengths = outputs
    best = log_probabilities.argmax(2).T.cpu()
    runs = [row[:n].unique_consecutive() for row, n in zip(best, lengths.tolist(), strict=True)]
    return [run[run != BLANK] for run in runs]


def transcribe(model: DeepSpeech, recording: Recording) -> str:
    """What a trained net hears."""
    parameter = next(model.parameters())
    frames = spectrogram(recording.waveform).to(parameter)
    model.eval()
    with torch.no_grad():
        (found,) = decode(model(frames[None], torch.tensor([len(frames)])))
    return "".join(CHARACTERS[number - 1] for number in found.tolist())


def edit_distance(found: Tensor, wanted: Tensor) -> int:
    """The fewest characters to insert, delete or replace, of one dimension each."""
    places = np.arange(len(wanted) + 1)
    row = places
    for character in found.numpy():
        replaced = row[:-1] + (wanted.numpy() != character)
        row = np.append(row[0] + 1, np.minimum(replaced, row[1:] + 1))
        row = np.minimum.accumulate(row - places) + places  # insertions, from left to right
    return int(row[-1])


def metrics(model: nn.Module, batch: Batch) -> dict[str, tuple[float, int]]:
    """Loss and errors by the characters of the texts."""
    frames, num_frames, characters, num_characters = batch
    outputs = model(frames, num_frames)
    texts = [row[:n].cpu() for row, n in zip(characters, num_characters.tolist(), strict=True)]
    edits = sum(map(edit_distance, decode(outputs), texts))
    total = int(num_characters.sum())
    return {"loss": (summed_loss(outputs, batch).item(), total), "errors": (edits, total)}


def train(comm: allstep.Communicator, recordings: list[Recording], options: Options) -> DeepSpeech:
    """The net after `epochs` passes over the recordings."""
    model = DeepSpeech(options).to(comm.device, options.dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    exchange = allstep.attach(model, comm)
    loader = allstep.data.loader(
        Spectrograms(recordings, options.dtype, augment=True), comm, collate_fn=collate,
        global_batch=options.global_batch, micro_batch=options.micro_batch, seed=options.seed,
    )  # fmt: skip
    num_steps = options.epochs * len(loader)
    rate = allstep.optim.cosine(num_steps, warmup_steps=num_steps // 10)
    state = {"optimizer": optimizer}
    with allstep.AutoCheckpoint(options.run_dir, loader, exchange, state=state) as checkpoint:
        for _ in checkpoint.epochs(options.epochs):
            for batch in allstep.steps(loader, exchange, checkpoint=checkpoint):
                for prompts in batch:
                    frames, num_frames, _, num_characters = prompts
                    loss = summed_loss(model(frames, num_frames), prompts)
                    batch.backward(loss, weight=int(num_characters.sum()))
                norm = options.clip_norm
                nn.utils.clip_grad_norm_(model.parameters(), norm, error_if_nonfinite=True)
                optimizer.param_groups[0]["lr"] = options.lr * rate(batch.step)
                optimizer.step()
                optimizer.zero_grad()
    if checkpoint.interrupted:
        sys.exit(128 + checkpoint.interrupted)
    exchange.detach()
    return model


def evaluate(
    comm: allstep.Communicator, model: nn.Module, recordings: list[Recording], options: Options
) -> dict[str, float]:
    """Nats and errors a character."""
    shown = Spectrograms(recordings, options.dtype, augment=False)
    micro_batch = options.micro_batch
    return allstep.Evaluator(metrics, shown, comm, micro_batch=micro_batch, collate_fn=collate)(
        model
    )


def constant_errors(train_set: list[Recording], test_set: list[Recording]) -> float:
    """Errors a character of one answer to all: the text nearest to an eighth of the others."""

    def distance(text: str, others: list[Recording]) -> int:
        return sum(edit_distance(encode(text), encode(other.text)) for other in others)

    texts = sorted({recording.text for recording in train_set})
    answer = min(texts, key=lambda text: distance(text, train_set[::8]))
    return distance(answer, test_set) / sum(len(recording.text) for recording in test_set)


def read_flags() -> Options:
    parser = argparse.ArgumentParser()
    for name in ("epochs", "global-batch", "micro-batch", "width", "seed"):
        default = getattr(Options, name.replace("-", "_"))
        parser.add_argument(f"--{name}", type=int, default=default, help=f"by default {default}")
    parser.add_argument("--run-dir", type=Path, help="keeps checkpoints and goes on from them")
    parser.add_argument("--folder", type=Path, default=Options.folder, help="of the recordings")
    parser.add_argument("--transcripts", type=Path, default=Options.transcripts, help="a .txt.gz")
    return Options(**vars(parser.parse_args()))


def main() -> None:
    options = read_flags()
    train_set, test_set = split(read_recordings(options), options.held_out)
    with allstep.init() as comm:
        untrained = DeepSpeech(options).to(comm.device, options.dtype)
        before = evaluate(comm, untrained, test_set, options)
        model = train(comm, train_set, options)
        after, seen = (evaluate(comm, model, part, options) for part in (test_set, train_set))
        if comm.rank == 0:
            constant = constant_errors(train_set, test_set)
            print(f"{len(train_set)} recordings to train on, {len(test_set)} held out")
            print(
                f"character error rate held out {after['errors']:.1%}, of the training set"
                f" {seen['errors']:.1%}; held out untrained {before['errors']:.1%}, one answer to"
                f" all {constant:.1%}"
            )
            print(f"held-out loss {after['loss']:.3f} nats a character")
            for recording in test_set[:5]:
                print(f"  {recording.text}\n    {transcribe(model, recording)}")


if __name__ == "__main__":
    main()
