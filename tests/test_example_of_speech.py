"""Speech: one worker, two and three train the same net on recordings of uneven length."""

import gzip
import wave
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import allstep
from allstep import Communicator, UsageError
from examples import speech
from examples.speech import Recording
from tests.helpers.compare import state_difference
from tests.helpers.generators import thread_generators  # noqa: F401
from tests.helpers.ranks import run_ranks

TEXTS = ["a", "is set to", "press one", "oh", "thank you", "x", "goodbye", "to exit", "it's", "six"]


def small(**changes: Any) -> speech.Options:
    arguments: dict[str, Any] = {"epochs": 1, "global_batch": 6, "micro_batch": 2, "width": 6}
    arguments |= {"context": 3, "dropout": 0.3, "dtype": torch.float64}
    return speech.Options(**arguments | changes)


def made_recordings() -> list[Recording]:
    """Noise, the longer the longer its text."""
    random = torch.Generator().manual_seed(0)
    return [
        Recording(text, torch.rand(1000 + 400 * len(text), generator=random) - 0.5)
        for text in TEXTS
    ]


def assert_same_on_workers(recordings: list[Recording], options: speech.Options) -> None:
    def work(comm: Communicator) -> tuple[dict[str, float], dict[str, Tensor]]:
        model = speech.train(comm, recordings, options)
        return speech.evaluate(comm, model, recordings, options), model.state_dict()

    [(lone_found, lone)] = run_ranks(1, work)
    for num_workers in (2, 3):
        for found, state in run_ranks(num_workers, work):
            assert state_difference(state, lone) < 1e-10
            assert found["errors"] == lone_found["errors"]
            assert found["loss"] == pytest.approx(lone_found["loss"], rel=1e-10)


def test_it_is_the_same_on_any_number_of_workers(
    thread_generators: None,  # noqa: F811
) -> None:
    assert_same_on_workers(made_recordings(), small())


def gradient(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def test_each_character_counts_the_same() -> None:
    """The gradient is that of the mean over all characters; means of means are others."""
    options = small(dropout=0.0)
    shown = speech.Spectrograms(made_recordings()[:6], torch.float64, augment=False)
    samples = [shown[i] for i in range(6)]

    def loss_of(model: speech.DeepSpeech, batch: speech.Batch) -> Tensor:
        return speech.summed_loss(model(*batch[:2]), batch)

    def of_one_process(parts: list[list[speech.Sample]]) -> Tensor:
        """Of the mean over the parts of the mean over each part's characters."""
        model = speech.DeepSpeech(options).double()
        for part in parts:
            batch = speech.collate(part)
            (loss_of(model, batch) / batch[3].sum() / len(parts)).backward()
        return gradient(model)

    def work(comm: Communicator) -> Tensor:
        model = speech.DeepSpeech(options).double()
        exchange = allstep.attach(model, comm)
        loader = allstep.data.loader(
            shown, comm, global_batch=6, micro_batch=2, shuffle=False, collate_fn=speech.collate
        )
        for batch in allstep.steps(loader, exchange):
            for prompts in batch:
                batch.backward(loss_of(model, prompts), weight=int(prompts[3].sum()))
        exchange.detach()
        return gradient(model)

    whole = of_one_process([samples])
    for num_workers in (1, 2, 3):
        for found in run_ranks(num_workers, work):
            torch.testing.assert_close(found, whole, rtol=0, atol=1e-12)
    for size in (1, 2):  # of recordings, and of micro-batches
        naive = of_one_process([samples[i : i + size] for i in range(0, 6, size)])
        assert (naive - whole).abs().max() > 1e-3


def test_padding_changes_no_score() -> None:
    options = small()
    model = speech.DeepSpeech(options).double().eval()
    shown = speech.Spectrograms(made_recordings(), torch.float64, augment=False)
    batch = speech.collate([shown[i] for i in range(len(shown))])
    together, lengths = model(*batch[:2])
    for i, length in enumerate(lengths.tolist()):
        alone, [num_steps] = model(*speech.collate([shown[i]])[:2])
        assert num_steps == length
        torch.testing.assert_close(together[:length, i], alone[:, 0], rtol=0, atol=1e-12)


def test_a_recording_is_shown_differently_each_time_but_is_measured_as_it_is() -> None:
    recordings = made_recordings()
    shown = speech.Spectrograms(recordings, torch.float32, augment=True)
    (first, text), (second, same_text) = shown[2], shown[2]
    assert torch.equal(text, same_text) and text.tolist() == speech.encode(TEXTS[2]).tolist()
    assert first.shape != second.shape or not torch.equal(first, second)
    measured = speech.Spectrograms(recordings, torch.float32, augment=False)
    assert torch.equal(measured[2][0], measured[2][0])
    assert torch.equal(shown.samples[2][0], measured[2][0])


def test_a_spectrogram_shows_a_tone_at_its_frequency() -> None:
    """1,000 Hz is frequency 20 of 81 that are 50 Hz apart; it comes after half a second."""
    times = torch.arange(speech.SAMPLE_RATE) / speech.SAMPLE_RATE
    tone = torch.where(times > 0.5, (2 * torch.pi * 1000 * times).sin(), 0.0)
    frames = speech.spectrogram(tone)
    assert frames.shape == (99, speech.NUM_FREQUENCIES)
    assert int(frames[-1].argmax()) == 20
    assert (frames[:48, 20] < 0).all() and (frames[52:, 20] > 0).all()


@pytest.mark.parametrize(
    ("transcript", "expected"),
    [
        ("Press 1, or the # key. (beep)", "press one or the pound key"),
        ("exclaimation-point [!]", "exclaimation point"),
        ("o'clock", "o'clock"),
        ("[sound of monkeys screaming]", ""),
        ("<beep ascending>", ""),
        ("Dial 500 now", ""),  # is read as a number
        ("3D audio enabled", ""),
    ],
)
def test_a_transcript_is_what_was_spoken(transcript: str, expected: str) -> None:
    assert speech.spoken(transcript) == expected


@pytest.mark.parametrize(
    ("found", "wanted", "edits"),
    [
        ("kitten", "sitting", 3),
        ("", "abc", 3),
        ("abc", "", 3),
        ("ab", "ba", 2),
        ("same", "same", 0),
    ],
)
def test_edit_distance(found: str, wanted: str, edits: int) -> None:
    assert speech.edit_distance(speech.encode(found), speech.encode(wanted)) == edits


def test_decoding_joins_repeats_and_leaves_out_blanks() -> None:
    symbols = torch.tensor([[3, 3, 0, 3, 4, 4, 0, 5], [7, 0, 7, 7, 9, 9, 9, 9]])
    log_probabilities = nn.functional.one_hot(symbols.T, 29).double()
    found = speech.decode((log_probabilities, torch.tensor([8, 4])))
    assert [numbers.tolist() for numbers in found] == [[3, 3, 4, 5], [7, 7]]


def test_what_has_one_text_stays_on_one_side() -> None:
    recordings = [Recording(text, torch.zeros(3)) for text in 2 * TEXTS]
    train_set, test_set = speech.split(recordings, 0.3)
    assert len(train_set) == 14 and len(test_set) == 6
    assert {r.text for r in train_set}.isdisjoint(r.text for r in test_set)
    assert [r.text for r in speech.split(recordings, 0.3)[1]] == [r.text for r in test_set]


def write_wave(path: Path, samples: list[int], sample_rate: int = speech.SAMPLE_RATE) -> None:
    path.parent.mkdir(exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(sample_rate)
        file.writeframes(b"".join(x.to_bytes(2, "little", signed=True) for x in samples))


@pytest.fixture
def files(tmp_path: Path) -> speech.Options:
    """Four transcripts; one has no recording, one is no text, and one is too long."""
    options = speech.Options(folder=tmp_path / "en", transcripts=tmp_path / "en.txt.gz", max_s=0.1)
    with gzip.open(options.transcripts, "wt") as file:
        file.write(
            "; A remark: no transcript\n\nin/one: One.\ngone: Gone.\nbeep: [tone]\nlong: Two\n"
        )
    for name, length in (("in/one", 800), ("beep", 400), ("long", 801)):
        options.folder.mkdir(exist_ok=True)
        write_wave(options.folder / f"{name}.wav", [2**14, -(2**15)] + (length - 2) * [0])
    return options


def test_recordings_are_read_with_their_texts(files: speech.Options) -> None:
    [recording] = speech.read_recordings(files)
    assert recording.text == "one"
    assert recording.waveform.tolist() == [0.5, -1.0] + 798 * [0.0]


def test_a_recording_of_another_rate_is_refused(files: speech.Options) -> None:
    write_wave(files.folder / "in" / "one.wav", [0], sample_rate=16000)
    with pytest.raises(UsageError, match=r"one\.wav has 16000 Hz, 1 channels and 16 bits; convert"):
        speech.read_recordings(files)


@pytest.mark.parametrize("name", ["folder", "transcripts"])
def test_missing_recordings_are_an_error_that_names_the_packages(
    files: speech.Options, tmp_path: Path, name: str
) -> None:
    with pytest.raises(UsageError, match=rf"`{name}` \(=.*nowhere\).*apt-get install asterisk"):
        speech.read_recordings(replace(files, **{name: tmp_path / "nowhere"}))


def test_one_answer_to_all_is_the_nearest_training_text() -> None:
    train_set = [Recording(text, torch.zeros(3)) for text in ["one", "ones", "two"]]
    test_set = [Recording(text, torch.zeros(3)) for text in ["one", "tone", "six"]]
    # The first of every eight is "one", from which they differ by 0, 1 and 3 of 10 characters.
    assert speech.constant_errors(train_set, test_set) == pytest.approx(0.4)


needs_recordings = pytest.mark.skipif(
    not (speech.Options.folder.exists() and speech.Options.transcripts.exists()),
    reason=f"needs Debian's {speech.PACKAGES}",
)


@needs_recordings
def test_real_recordings_are_those_of_the_guide() -> None:
    recordings = speech.read_recordings(speech.Options())
    train_set, test_set = speech.split(recordings, speech.Options.held_out)
    assert (len(train_set), len(test_set)) == (447, 79)
    assert round(sum(len(r.waveform) for r in recordings) / speech.SAMPLE_RATE / 60, 1) == 16.8
    for recording in recordings:  # has a step for each character, and one between equal ones
        num_frames = 0.85 * len(speech.spectrogram(recording.waveform))
        needed = len(recording.text) + sum(
            a == b for a, b in zip(recording.text, recording.text[1:], strict=False)
        )
        assert needed < num_frames / speech.Options.stride


@needs_recordings
def test_real_recordings_train_the_same_net_on_any_number_of_workers(
    thread_generators: None,  # noqa: F811
) -> None:
    recordings = speech.read_recordings(speech.Options(max_s=0.9))[:8]
    assert len({len(recording.waveform) for recording in recordings}) > 5
    assert_same_on_workers(recordings, small())
