"""Pretraining data: corpus, tokenizers, pairs, masks, batches, cache. Nothing is written outside tmp_path."""

import itertools
import json
import os
import pathlib
import pickle
import warnings

import numpy as np
import pytest
import torch

from fastbert import BertConfig, BertForPreTraining, cli
from fastbert import data as fastbert_data
from fastbert.data import PretrainingData, make_loader, prepare
from fastbert.data.corpus import corpus_digest, read_corpus, split_documentation, split_sentences
from fastbert.data.examples import make_examples, mask_tokens
from fastbert.data.tokenizers import WordPieceTokenizer, WordTokenizer, load_tokenizer
from fastbert.ops.packing import Packing
from fastbert.training.pretrain import PretrainConfig, pretrain

SHARED = pathlib.Path(__file__).resolve().parents[2] / "shared" / "data"
DATA = pathlib.Path(os.environ.get("FASTBERT_TEST_DATA", SHARED))
WIKI = DATA / "wikitext-2" / "wiki.valid.tokens"
needs_wiki = pytest.mark.skipif(not WIKI.is_file(), reason="no wikitext-2/wiki.valid.tokens in FASTBERT_TEST_DATA")
BERT_VOCABULARY = DATA / "vocab" / "bert-base-uncased-vocab.txt"
needs_vocabulary = pytest.mark.skipif(not BERT_VOCABULARY.is_file(), reason="no BERT vocab in FASTBERT_TEST_DATA")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    directory = tmp_path / "cache"
    monkeypatch.setenv("FASTBERT_CACHE", str(directory))
    return directory


@pytest.fixture
def corpus(tmp_path):
    """Twelve paragraphs of four sentences; every word but the numbers comes back often."""
    animals, moods = ("fox", "dog", "crane", "ox"), ("lazy", "quick", "old")
    sentences = [
        f"The {mood} {animal} number {n}{k} is {other} today ."
        for n in range(4)
        for mood, other in zip(moods, moods[::-1], strict=True)
        for k, animal in enumerate(animals)
    ]
    paragraphs = [" ".join(sentences[i : i + 4]) for i in range(0, 48, 4)]
    return write(tmp_path / "corpus.txt", "\n\n".join(paragraphs))


def write(path, text):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def numbered(paragraphs=40, sentences=6, seed=0):
    """Paragraphs of sentences of 4 to 12 tokens, ids 5 to 104."""
    random = np.random.default_rng(seed)
    return [
        [random.integers(5, 105, size=random.integers(4, 13)).tolist() for _ in range(sentences)]
        for _ in range(paragraphs)
    ]


def words(count=100):
    return WordTokenizer([*WordTokenizer.RESERVED, *(f"w{i}" for i in range(count))])


def numbered_data(static_masking=False, seed=0, **kwargs):
    tokenizer = words()
    examples = make_examples(numbered(**kwargs), tokenizer, max_len=64, seed=seed)
    return PretrainingData(tokenizer, examples, 64, seed, static_masking)


def batches(data, batch_size=32, **kwargs):
    return list(make_loader(data, batch_size, **{"epochs": 1, **kwargs}))


def assert_equal(left, right):
    assert len(left) == len(right) > 0
    for a, b in zip(left, right, strict=True):
        for name in ("input_ids", "attention_mask", "token_type_ids", "labels", "next_sentence_label"):
            one, other = getattr(a, name), getattr(b, name)
            assert one is other is None or torch.equal(one, other), name


def original(batch):
    """The ids before masking."""
    return torch.where(batch.labels == -100, batch.input_ids, batch.labels)


def sequences(batch):
    """The ids before masking, a tuple an example, of a padded or a packed batch."""
    ids = original(batch).flatten()
    tokens = ids if batch.attention_mask is None else ids[batch.packing.indices]
    return [tuple(part.tolist()) for part in tokens.split(batch.packing.cu_seqlens.diff().tolist())]


# Corpus


def test_wikitext_rule(tmp_path):
    text = " \n = A Heading = \n One fish . Two FISH . \n no stop here\nAlone . \n x . y"
    file = write(tmp_path / "a.tokens", text)
    # the closing " . " of a raw line makes two parts of it: "alone ." is kept, a paragraph of one sentence
    assert read_corpus(file) == [["one fish", "two fish ."], ["alone ."], ["x", "y"]]


def test_plain_text(tmp_path):
    file = write(tmp_path / "a.txt", "\ufeffOne two.\nThree four!\r\n\r\nFive. Six?\n \n\n")
    assert read_corpus(file) == [["One two.", "Three four!"], ["Five.", "Six?"]]


@pytest.mark.parametrize(
    "text, sentences",
    [
        ("Dr. Smith left. He ran.", ["Dr. Smith left.", "He ran."]),
        ("J. R. Tolkien wrote. We read.", ["J. R. Tolkien wrote.", "We read."]),
        ("It costs 3.50 now. 4 of them.", ["It costs 3.50 now.", "4 of them."]),
        ('"Why?" he asked. "Go!" She went.', ['"Why?" he asked.', '"Go!"', "She went."]),
        ("So did I. Then (e.g. here) we met. No.", ["So did I.", "Then (e.g. here) we met.", "No."]),
        ("no stop at all", ["no stop at all"]),
        ("  ", []),
    ],
)
def test_split_sentences(text, sentences):
    assert split_sentences(text) == sentences


def test_directory_is_read_in_sorted_order(tmp_path):
    write(tmp_path / "b.txt", "Three. Four.")
    write(tmp_path / "a.tokens", "one . two")
    write(tmp_path / "c.md", "Not. Read.")
    assert read_corpus(tmp_path) == [["one", "two"], ["Three.", "Four."]]


def test_builtin_is_prose():
    paragraphs = read_corpus("builtin")
    assert sum(len(p) - 1 for p in paragraphs) > 2000
    text = " ".join(s for p in paragraphs for s in p)
    for markup in ("::=", ">>>", "+---", "**PEP", '"'):
        assert markup not in text
    assert read_corpus("builtin") == paragraphs


def test_documentation_markup_is_stripped():
    text = (
        'The "with" statement\n*****\n\nIt *wraps* a block of code.  See **PEP 343** for more.\n\n'
        "   >>> with a:\n   ...     pass\n\n   with_stmt ::= x\n\n* Lists don't stay lists either.\n\n"
        "Another section\n===============\n\nIts text stands alone."
    )
    assert split_documentation(text) == [
        ["It wraps a block of code .", "See PEP 343 for more .", "Lists don't stay lists either ."],
        ["Its text stands alone ."],
    ]


def test_digest_follows_content(tmp_path):
    file = write(tmp_path / "a.txt", "One. Two.")
    before = corpus_digest(file)
    assert corpus_digest(write(tmp_path / "b.txt", "One. Two.")) == before
    assert corpus_digest(write(tmp_path / "a.tokens", "One. Two.")) != before  # split by another rule
    assert corpus_digest(write(file, "One. Too.")) != before


def test_corpus_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"corpus .*nowhere does not exist; a text file, a directory"):
        read_corpus(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"directory without \*\.txt or \*\.tokens files"):
        read_corpus(tmp_path)
    with pytest.raises(ValueError, match=r"e\.txt is empty: it holds no paragraph"):
        read_corpus(write(tmp_path / "e.txt", " \n\n"))
    with pytest.raises(ValueError, match=r"s\.txt is too short to pair: none of its 2 paragraphs has two sen"):
        read_corpus(write(tmp_path / "s.txt", "One.\n\nTwo."))
    with pytest.raises(ValueError, match=r"l\.txt is not UTF-8: byte 0xe9 at offset 3; UTF-8 text is accepted"):
        read_corpus(write(tmp_path / "l.txt", "caf\u00e9. Two.".encode("latin-1")))


# Tokenizers


def test_word_vocabulary_order():
    tokenizer = WordTokenizer.train(["b a a", "C b <unk> <mask>", "c d c <mask>"], min_freq=2)
    assert tokenizer.vocabulary == ["<unk>", "<pad>", "<mask>", "<cls>", "<sep>", "c", "b", "a"]
    assert tokenizer.encode("A  c\tzebra") == [7, 5, 0]
    assert tokenizer.encode_batch(["b", ""]) == [[6], []]
    ids = (tokenizer.unk_id, tokenizer.pad_id, tokenizer.mask_id, tokenizer.cls_id, tokenizer.sep_id)
    assert ids == (0, 1, 2, 3, 4)
    assert tokenizer.special_ids == (1, 2, 3, 4)


def test_no_text_yields_a_special_token():
    sentences = ["[MASK] [CLS] <mask> <cls> mask <pad> [SEP]"] * 5
    for tokenizer in (WordTokenizer.train(sentences), WordPieceTokenizer.train(sentences)):
        assert not set(tokenizer.encode(sentences[0])) & set(tokenizer.special_ids)


def test_word_piece_training_is_deterministic_and_bounded():
    sentences = [s for p in read_corpus("builtin")[:40] for s in p]
    first, second = (WordPieceTokenizer.train(sentences, vocab_size=600) for _ in range(2))
    assert first.vocabulary == second.vocabulary
    assert len(set(first.vocabulary)) == first.vocab_size == 600
    assert first.vocabulary[:5] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert first.pad_id == 0
    assert first.unk_id not in first.encode("An OBJECT's class")
    assert first.encode("the Object") == first.encode("THE object")


@needs_vocabulary
def test_bert_vocabulary_agrees_with_hugging_face():
    tokenizer = WordPieceTokenizer.from_file(BERT_VOCABULARY)
    assert tokenizer.vocab_size == 30_522
    assert (tokenizer.pad_id, tokenizer.unk_id, tokenizer.cls_id, tokenizer.sep_id, tokenizer.mask_id) == (
        0,
        100,
        101,
        102,
        103,
    )
    # "a crane is flying", "unaffable": as bert-base-uncased tokenizes them
    assert tokenizer.encode("A Crane is flying") == [1037, 11308, 2003, 3909]
    assert tokenizer.encode("naïve") == tokenizer.encode("naive")


@pytest.mark.parametrize("kind", [WordTokenizer, WordPieceTokenizer])
@pytest.mark.parametrize("lowercase", [True, False])
def test_tokenizer_round_trip(kind, lowercase, tmp_path):
    # a line separator inside a token must not end its line
    tokenizer = kind([*kind.RESERVED, "Word", "word", "##s", "a\u2028b"], lowercase=lowercase)
    tokenizer.save(tmp_path / "new" / "directory")
    loaded = load_tokenizer(tmp_path / "new" / "directory")
    assert type(loaded) is kind
    assert loaded.vocabulary == tokenizer.vocabulary
    assert loaded.encode("Word words") == tokenizer.encode("Word words")
    assert loaded.encode("Word") == [6 if lowercase else 5]


def test_tokenizer_errors(tmp_path):
    with pytest.raises(ValueError, match="min_freq is 0; 1 or more is accepted"):
        WordTokenizer.train(["a"], min_freq=0)
    with pytest.raises(ValueError, match="min_freq is 3; no word of the corpus is as frequent"):
        WordTokenizer.train(["a b a"], min_freq=3)
    with pytest.raises(ValueError, match="vocab_size is 6; the corpus's alphabet alone needs 9"):
        WordPieceTokenizer.train(["a b"], vocab_size=6)
    with pytest.raises(ValueError, match=r"2 tokens lacks \[PAD\], \[MASK\], \[SEP\]; a WordPieceTokenizer needs"):
        WordPieceTokenizer(["[UNK]", "[CLS]"])
    with pytest.raises(ValueError, match="holds 'a' more than once"):
        WordTokenizer([*WordTokenizer.RESERVED, "a", "a"])
    with pytest.raises(ValueError, match="the reserved tokens alone"):
        WordTokenizer(WordTokenizer.RESERVED)
    with pytest.raises(FileNotFoundError, match=r"vocab\.txt does not exist; a vocab\.txt with one token a line"):
        load_tokenizer(tmp_path)
    write(tmp_path / "tokenizer_config.json", '{"tokenizer_class": "T5Tokenizer"}')
    with pytest.raises(ValueError, match="'T5Tokenizer'; accepted are WordTokenizer, BertTokenizer"):
        load_tokenizer(tmp_path)


@needs_wiki
def test_wikitext_vocabulary():
    sentences = [s for p in read_corpus(WIKI) for s in p]
    tokenizer = WordTokenizer.train(sentences, min_freq=5)
    assert tokenizer.vocab_size == 4271
    assert tokenizer.vocabulary[5:9] == ["the", ",", "of", "and"]


# Pairs


def sentences_of(examples, i):
    tokens = examples.tokens[examples.offsets[i] : examples.offsets[i + 1]].tolist()
    first = examples.first[i]
    assert tokens[0] == 3 and tokens[first - 1] == 4 and tokens[-1] == 4
    return tuple(tokens[1 : first - 1]), tuple(tokens[first:-1])


def test_pairs_polarity_and_layout():
    paragraphs = numbered(paragraphs=200)
    following = {tuple(a): tuple(b) for p in paragraphs for a, b in itertools.pairwise(p)}
    assert len(following) == 1000  # every sentence reads differently
    examples = make_examples(paragraphs, words(), max_len=64, seed=3)
    assert len(examples) == 1000
    for i, label in enumerate(examples.next_sentence_label):
        a, b = sentences_of(examples, i)
        assert (following[a] == b) == (label == 0)  # 0: is next. 1: random, and never the next one
    assert abs(examples.next_sentence_label.mean() - 0.5) < 4 * 0.5 / 1000**0.5
    assert examples.tokens.dtype == np.int32


def test_random_sentence_never_reads_as_the_next_one():
    # nearly every sentence of the corpus reads [5, 5], so most draws have to be repeated
    paragraphs = [[[5, 5]] * 9, [[5, 5], [6, 6], [7, 7]]] * 20
    examples = make_examples(paragraphs, words(), max_len=64, seed=0)
    random = [sentences_of(examples, i) for i in np.flatnonzero(examples.next_sentence_label)]
    true_next = {(5, 5): {(5, 5), (6, 6)}, (6, 6): {(7, 7)}}
    assert len(random) > 100
    assert all(b != (5, 5) for a, b in random if true_next[a] == {(5, 5)})
    assert all(b != (7, 7) for a, b in random if a == (6, 6))
    in_a_row = make_examples([[[5, 5], [6, 6]]] * 50, words(), max_len=64, seed=0)
    for i in np.flatnonzero(in_a_row.next_sentence_label):
        assert sentences_of(in_a_row, i) == ((5, 5), (5, 5))


def test_long_pairs_are_skipped_not_truncated():
    paragraphs = [[[5] * 4, [6] * 4, [7] * 40, [8] * 4], *numbered(paragraphs=3)]
    examples = make_examples(paragraphs, words(), max_len=30, seed=0)
    assert np.diff(examples.offsets).max() <= 30
    whole = {tuple(s) for p in paragraphs for s in p}
    assert all(set(sentences_of(examples, i)) <= whole for i in range(len(examples)))
    assert (7,) * 40 not in {s for i in range(len(examples)) for s in sentences_of(examples, i)}


def test_empty_sentences_are_passed_over():
    examples = make_examples([[[], [5], [], [6]], [[]], [[7], [8]]], words(), max_len=9, seed=0)
    assert len(examples) == 2
    assert all(len(s) == 1 for i in range(2) for s in sentences_of(examples, i))


def test_pair_errors():
    with pytest.raises(ValueError, match="max_len is 8, but the shortest of 2 sentence pairs has 11 tokens"):
        make_examples([[[5] * 4, [6] * 4, [7] * 4]], words(), max_len=8, seed=0)
    with pytest.raises(ValueError, match="none of 2 paragraphs has two sentences to pair"):
        make_examples([[[5]], [[6], []]], words(), max_len=8, seed=0)
    with pytest.raises(ValueError, match="none of 0 paragraphs has two sentences"):
        make_examples([], words(), max_len=8, seed=0)
    with pytest.raises(ValueError, match="no random second sentence to offer"):
        make_examples([[[5], [5], [5], [5]]] * 9, words(), max_len=8, seed=0)


# Masks


def test_masking_proportions():
    data = numbered_data(paragraphs=800)
    changed = kept = masked = 0
    drawn = []
    for batch in batches(data, 512):
        lengths = batch.attention_mask.sum(1)
        predicted = batch.labels != -100
        expected = [max(1, round(0.15 * n)) for n in lengths.tolist()]
        assert predicted.sum(1).tolist() == expected
        inputs, labels = batch.input_ids[predicted], batch.labels[predicted]
        masked += (inputs == 2).sum().item()
        kept += (inputs == labels).sum().item()
        changed += ((inputs != 2) & (inputs != labels)).sum().item()
        drawn += inputs[(inputs != 2) & (inputs != labels)].tolist()
    total = masked + kept + changed
    assert total > 10_000
    # of a hundred words, one random replacement in a hundred is the word itself
    for count, share in ((masked, 0.8), (kept, 0.1 + 0.001), (changed, 0.1 - 0.001)):
        assert abs(count - share * total) < 4.5 * (total * share * (1 - share)) ** 0.5
    assert set(drawn) == set(range(5, 105))  # any word, and no reserved token


def test_masked_positions_are_uniform():
    ids = np.full((20_000, 20), 9)
    _, labels = mask_tokens(
        ids,
        np.ones_like(ids, dtype=bool),
        np.full(len(ids), 20),
        np.arange(len(ids)),
        mask_id=2,
        replacements=np.arange(5, 9),
        seed=1,
        epoch=0,
    )
    share = (labels != -100).mean(0)  # three of twenty positions
    assert np.abs(share - 0.15).max() < 4.5 * (0.15 * 0.85 / len(ids)) ** 0.5


@pytest.mark.parametrize("pad_to_max_len", [True, False])
def test_special_tokens_and_padding_are_never_predicted(pad_to_max_len):
    data = numbered_data()
    for epoch in range(5):
        for batch in batches(data, first_step=epoch * 7, pad_to_max_len=pad_to_max_len):
            assert torch.isin(original(batch)[batch.labels != -100], torch.arange(5, 105)).all()
            assert (batch.labels[batch.attention_mask == 0] == -100).all()
            assert (batch.input_ids[batch.attention_mask == 0] == 1).all()
            assert (batch.input_ids[:, 0] == 3).all()
            assert ((batch.input_ids == 4).sum(1) == 2).all()


def test_label_zero_counts():
    tokenizer = words()
    examples = make_examples([[[0] * 5, [0] * 6]] * 9 + [[[5], [6]]], tokenizer, max_len=20, seed=0)
    labels = torch.cat([b.labels[b.labels != -100] for b in batches(PretrainingData(tokenizer, examples, 20, 0))])
    assert (labels == 0).any()


def test_no_maskable_token_predicts_nothing():
    ids = np.full((2, 4), 9)
    maskable = np.zeros_like(ids, dtype=bool)
    maskable[1, 2] = True
    args = dict(mask_id=2, replacements=np.array([7]), seed=0, epoch=0)
    _, labels = mask_tokens(ids, maskable, np.array([4, 4]), np.arange(2), **args)
    assert (labels != -100).tolist() == maskable.tolist()


# Batches


def test_batch_shapes_and_types():
    data = numbered_data()
    batch = batches(data, 32)[0]
    lengths = batch.attention_mask.sum(1)
    seqlen = int(lengths.max())
    for name in ("input_ids", "attention_mask", "token_type_ids", "labels"):
        assert getattr(batch, name).shape == (32, seqlen), name
        assert getattr(batch, name).dtype == torch.int64, name
    assert batch.next_sentence_label.shape == (32,)
    assert batch.next_sentence_label.dtype == torch.int64
    assert batches(data, 32, pad_to_max_len=True)[0].input_ids.shape == (32, 64)
    for row, kinds, length in zip(batch.input_ids, batch.token_type_ids, lengths.tolist(), strict=True):
        first_end, second_end = (row == 4).nonzero().flatten().tolist()
        assert second_end == length - 1
        expected = [0] * (first_end + 1) + [1] * (length - first_end - 1) + [0] * (seqlen - length)
        assert kinds.tolist() == expected


def test_packing_belongs_to_the_batch():
    for batch in batches(numbered_data(), 50):
        expected = Packing.from_mask(batch.attention_mask)
        assert torch.equal(batch.packing.indices, expected.indices)
        assert torch.equal(batch.packing.cu_seqlens, expected.cu_seqlens)
        assert (batch.packing.batch, batch.packing.seqlen) == tuple(batch.input_ids.shape)
        assert batch.valid_tokens == batch.attention_mask.sum() == batch.packing.cu_seqlens[-1]
        assert batch.packing.max_seqlen == batch.attention_mask.sum(1).max()


def test_batch_moves_as_a_whole():
    batch = batches(numbered_data())[0].to("meta")
    assert batch.input_ids.is_meta and batch.labels.is_meta and batch.packing.indices.is_meta


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("packed", [True, False])
def test_pinned_batches(packed):
    batch = batches(numbered_data(), packed=packed, pin_memory=True)[0]
    assert batch.input_ids.is_pinned() and batch.packing.indices.is_pinned()


@pytest.mark.parametrize("drop_last", [False, True])
def test_every_example_once_an_epoch(drop_last):
    data = numbered_data()
    assert len(data) == 200
    loader = make_loader(data, 32, epochs=2, drop_last=drop_last, pad_to_max_len=True)
    found = list(loader)
    assert len(found) == len(loader) == (12 if drop_last else 14)
    epochs = found[: len(found) // 2], found[len(found) // 2 :]
    seen = [[tuple(row.tolist()) for batch in epoch for row in original(batch)] for epoch in epochs]
    if drop_last:
        assert all(len(e) == len(set(e)) == 192 for e in seen)
    else:
        assert sorted(seen[0]) == sorted(seen[1])
        assert len(set(seen[0])) == 200
    assert seen[0] != seen[1]  # shuffled anew


def test_reproducible_from_the_seed():
    assert_equal(batches(numbered_data(seed=5)), batches(numbered_data(seed=5)))
    one, other = batches(numbered_data(seed=5))[0], batches(numbered_data(seed=6))[0]
    assert one.input_ids.shape != other.input_ids.shape or not torch.equal(one.input_ids, other.input_ids)


def test_workers_see_the_same_batches():
    data = numbered_data()
    assert_equal(batches(data, 50, epochs=2), batches(data, 50, epochs=2, num_workers=2))


def test_data_can_be_sent_to_a_worker():
    tokenizer = WordPieceTokenizer.train(["a b c"])
    data = PretrainingData(tokenizer, make_examples([[[9, 9], [8]]] * 9, tokenizer, max_len=9, seed=0), 9, 0)
    assert_equal(batches(data), batches(pickle.loads(pickle.dumps(data))))


def test_resuming_at_a_step_goes_on_where_it_was():
    data = numbered_data()
    steps = [batch for _, batch in zip(range(20), make_loader(data, 32), strict=False)]  # 7 an epoch
    for first in (3, 7, 13):
        resumed = make_loader(data, 32, first_step=first)
        assert_equal(steps[first:], [b for _, b in zip(range(20 - first), resumed, strict=False)])
    assert len(make_loader(data, 32, first_step=10, epochs=2)) == 11


def test_masks_do_not_depend_on_the_batch():
    data = numbered_data()
    rows = []
    for batch_size, pad_to_max_len in ((7, True), (64, False)):
        found = {}
        for batch in batches(data, batch_size, pad_to_max_len=pad_to_max_len):
            for ids, labels, n in zip(batch.input_ids, batch.labels, batch.attention_mask.sum(1), strict=True):
                key = tuple(torch.where(labels == -100, ids, labels)[:n].tolist())
                found[key] = ids[:n].tolist(), labels[:n].tolist()
        rows.append(found)
    assert len(rows[0]) == 200
    assert rows[0] == rows[1]


@pytest.mark.parametrize("static_masking", [True, False])
def test_static_masks_are_drawn_once(static_masking):
    data = numbered_data(static_masking)
    masks = []
    for epoch in range(2):
        rows = {}
        for batch in batches(data, first_step=7 * epoch, pad_to_max_len=True):
            rows |= {
                tuple(o.tolist()): tuple(i.tolist()) for o, i in zip(original(batch), batch.input_ids, strict=True)
            }
        masks.append(rows)
    assert masks[0].keys() == masks[1].keys()
    same = sum(masks[0][k] == masks[1][k] for k in masks[0])
    assert same == len(data) if static_masking else same < 0.05 * len(data)


def test_loading_leaves_the_models_random_numbers_alone():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    batches(numbered_data())
    assert torch.equal(torch.rand(3), expected)


def test_loader_errors():
    data = numbered_data()
    with pytest.raises(ValueError, match="batch_size is 0; 1 or more is accepted"):
        make_loader(data, 0)
    with pytest.raises(ValueError, match="first_step is -1; 0 or more is accepted"):
        make_loader(data, 8, first_step=-1)
    with pytest.raises(ValueError, match="epochs is 0; 1 or more, or None"):
        make_loader(data, 8, epochs=0)
    with pytest.raises(ValueError, match="batch_size is 512; with drop_last, at most the 200 examples"):
        make_loader(data, 512, drop_last=True)
    with pytest.raises(TypeError, match="has no length"):
        len(make_loader(data, 8))
    with pytest.raises(ValueError, match="batch_size is None and batch_tokens is None; one of them is accepted"):
        make_loader(data)
    with pytest.raises(ValueError, match="batch_size is 8 and batch_tokens is 99; one of them is accepted"):
        make_loader(data, 8, batch_tokens=99)
    lengths = np.diff(data.examples.offsets)
    longest, total = lengths.max(), lengths.sum()
    with pytest.raises(ValueError, match=f"batch_tokens is {longest - 1}; {longest} or more, the longest example, is"):
        make_loader(data, batch_tokens=longest - 1)
    assert len(batches(data, None, batch_tokens=longest)) > len(data) / 2
    with pytest.raises(ValueError, match=f"batch_tokens is {total}; with drop_last, fewer than the {total} of all ex"):
        make_loader(data, batch_tokens=total, drop_last=True)
    assert len(batches(data, None, batch_tokens=total)) == 1


# Token budgets and packed batches


@pytest.mark.parametrize("packed", [True, False])
def test_a_token_budget_is_kept_and_filled(packed):
    data = numbered_data(paragraphs=600)  # 3,000 examples
    longest = int(np.diff(data.examples.offsets).max())
    for epoch in (
        batches(data, None, batch_tokens=1000, packed=packed),
        batches(numbered_data(), None, batch_tokens=1000),
    ):
        *full, last = [batch.valid_tokens for batch in epoch]
        assert all(1000 - longest < tokens <= 1000 for tokens in full)
        assert np.mean(full) > 0.97 * 1000
        assert 0 < last <= 1000


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("packed", [True, False])
def test_token_budgets_take_every_example_once_an_epoch(packed, drop_last):
    data = numbered_data()
    loader = make_loader(data, batch_tokens=400, packed=packed, epochs=3, drop_last=drop_last)
    found = list(loader)
    assert len(found) == len(loader)
    tokens = torch.tensor([batch.valid_tokens for batch in found])
    seen = [s for batch in found for s in sequences(batch)]
    assert all(len(set(sequences(batch))) == batch.packing.batch == len(batch.next_sentence_label) for batch in found)
    if drop_last:
        everything = batches(data, None, batch_tokens=400, packed=packed, epochs=3)
        assert len(found) == len(everything) - 3
        assert tokens.min() > 400 - np.diff(data.examples.offsets).max()
    else:
        assert len(seen) == 600
        first, second, third = seen[:200], seen[200:400], seen[400:]
        assert len(set(first)) == 200 and sorted(first) == sorted(second) == sorted(third)
        assert first != second != third  # shuffled anew


def test_padded_batches_of_a_budget_hold_examples_of_like_length():
    """Where padding is computed it is little; yet no length comes first, and every epoch groups examples anew."""
    data = numbered_data(paragraphs=6000)  # 30,000 examples, several windows of 32 batches
    lengths = np.diff(data.examples.offsets)

    def layout(packed):
        return list(make_loader(data, batch_tokens=2000, packed=packed, epochs=2).sampler)

    def fill(layout):
        return 2 * lengths.sum() / sum(len(indices) * lengths[indices].max() for _, indices in layout)

    found = layout(packed=False)
    assert fill(found) > 0.95 > 0.8 > fill(layout(packed=True))
    longest = np.array([lengths[indices].max() for _, indices in found])
    assert abs(np.corrcoef(longest[:-1], longest[1:])[0, 1]) < 4 / len(longest) ** 0.5
    batch_of = np.empty((2, len(data)), dtype=np.int64)
    for number, (epoch, indices) in enumerate(found):
        batch_of[epoch, indices] = number
    together = [np.flatnonzero(batch_of[0] == batch_of[0, i]) for i in range(50)]
    again = [np.mean(batch_of[1, others] == batch_of[1, i]) for i, others in enumerate(together)]
    assert np.mean(again) < 0.2


def test_packed_batches_of_a_budget_are_in_random_order():
    """Even in attention, too: the squares of the lengths add up to nearly the same in every batch."""
    data = numbered_data(paragraphs=600)
    *found, _ = batches(data, None, batch_tokens=1000, packed=True)
    squares = np.array([float(batch.packing.cu_seqlens.diff().double().square().sum()) for batch in found])
    assert squares.std() < 0.1 * squares.mean()


@pytest.mark.parametrize("packed", [True, False])
def test_token_budgets_are_reproducible_and_independent_of_workers(packed):
    kwargs = dict(batch_tokens=300, packed=packed, epochs=2)
    data = numbered_data()
    found = batches(data, None, **kwargs)
    assert_equal(found, batches(numbered_data(), None, **kwargs))
    assert_equal(found, batches(data, None, **kwargs, num_workers=2))
    reseeded = PretrainingData(data.tokenizer, data.examples, 64, seed=1)  # the same examples in another order
    assert sequences(found[0]) != sequences(batches(reseeded, None, **kwargs)[0])


@pytest.mark.parametrize("packed", [True, False])
def test_resuming_is_exact_where_epochs_differ_in_steps(packed):
    data = numbered_data(paragraphs=150)
    per_epoch = [len(batches(data, None, batch_tokens=150, packed=packed, epochs=n)) for n in range(1, 5)]
    per_epoch = np.diff([0, *per_epoch]).tolist()
    assert len(set(per_epoch)) > 1  # or this tests nothing
    steps = batches(data, None, batch_tokens=150, packed=packed, epochs=4)
    starts = np.cumsum(per_epoch).tolist()
    for first in [1, *(start + more for start in starts[:-1] for more in (-1, 0, 1))]:
        resumed = make_loader(data, batch_tokens=150, packed=packed, first_step=first)
        assert_equal(steps[first : first + 3], list(itertools.islice(resumed, 3)))
    resumed = make_loader(data, batch_tokens=150, packed=packed, first_step=starts[1] + 5, epochs=2)
    assert len(resumed) == len(list(resumed)) == sum(per_epoch[2:4]) - 5


@pytest.mark.parametrize("pad_to_max_len", [True, False])
def test_packed_batches_are_the_padded_ones_without_padding(pad_to_max_len):
    data = numbered_data()
    kwargs = dict(epochs=2, pad_to_max_len=pad_to_max_len)
    for padded, packed in zip(batches(data, 32, **kwargs), batches(data, 32, packed=True, **kwargs), strict=True):
        on = padded.attention_mask.bool()
        for name in ("input_ids", "token_type_ids", "labels"):
            assert getattr(packed, name).dtype == torch.int64
            assert torch.equal(getattr(packed, name), getattr(padded, name)[on]), name
        assert packed.attention_mask is None
        assert torch.equal(packed.next_sentence_label, padded.next_sentence_label)
        assert torch.equal(packed.packing.indices, padded.packing.indices)
        assert torch.equal(packed.packing.cu_seqlens, padded.packing.cu_seqlens)
        sizes = packed.packing.max_seqlen, packed.packing.batch, packed.packing.seqlen
        assert sizes == (on.sum(1).max(), *padded.input_ids.shape)
        assert packed.valid_tokens == len(packed.input_ids) == on.sum()
    moved = packed.to("meta")
    assert moved.labels.is_meta and moved.packing.cu_seqlens.is_meta and moved.attention_mask is None


def test_a_step_on_packed_batches_is_the_padded_step():
    """Dropout on, a whole training step from either loader, padding kept or dropped: loss and every gradient."""
    data = numbered_data()
    torch.manual_seed(0)
    config = BertConfig(data.tokenizer.vocab_size, 24, 2, 3, 40, max_position_embeddings=64, hidden_dropout_prob=0.3)
    model = BertForPreTraining(config).double().train()
    steps = []
    for packed, unpad in ((False, False), (False, True), (True, True)):
        batch = next(iter(make_loader(data, 16, packed=packed)))
        padding = {"packing": batch.packing} if unpad else {"attention_mask": batch.attention_mask}
        model.unpad = unpad
        model.zero_grad()
        torch.manual_seed(1)
        tensors = {k: getattr(batch, k) for k in ("input_ids", "token_type_ids", "labels", "next_sentence_label")}
        output = model(**tensors, **padding)
        output.loss.backward()
        steps.append([output.mlm_loss, output.nsp_loss, *(p.grad.clone() for p in model.parameters())])
    for other in steps[1:]:
        torch.testing.assert_close(other, steps[0], rtol=1e-9, atol=1e-11)


def test_a_run_with_a_token_budget_resumes(corpus, tmp_path):
    settings = dict(corpus=str(corpus), preset="notebook", max_len=32, batch_tokens=120)
    records = {}
    for name, parts in (("whole", (9,)), ("halves", (7, 9))):  # 36 pairs of 21 tokens: 8 steps an epoch
        for steps in parts:
            pretrain(PretrainConfig(**settings, steps=steps), tmp_path / name, resume=steps != parts[0])
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        records[name] = [json.loads(line) for line in lines]
    losses = {name: [(r["step"], r["mlm_loss"], r["nsp_loss"]) for r in found] for name, found in records.items()}
    assert losses["whole"] == losses["halves"] and len(losses["whole"]) == 9
    per_pair = {round(r["tokens_per_s"] / r["sentence_pairs_per_s"]) for r in records["whole"]}
    assert per_pair == {21} and {r["valid_fraction"] for r in records["whole"]} == {1.0}
    summary = json.loads((tmp_path / "whole" / "summary.json").read_text())
    assert (summary["batch_size"], summary["batch_tokens"]) == (None, 120)


def test_budget_and_batch_size_exclude_each_other_in_a_run(corpus, tmp_path, capsys):
    arguments = ["pretrain", "--corpus", str(corpus), "--out", str(tmp_path / "run"), "--batch-tokens", "9"]
    assert cli.main([*arguments, "--batch-size", "8"]) == 1
    assert "batch_size is 8 and batch_tokens is 9; only one of them is accepted" in capsys.readouterr().err
    assert cli.main(arguments) == 1
    assert "batch_tokens is 9; 21 or more, the longest example, is accepted" in capsys.readouterr().err


# Preparation and its cache


@pytest.fixture
def preparations(monkeypatch):
    """The corpora that were really read, not found in the cache."""
    read = []
    monkeypatch.setattr(fastbert_data, "read_corpus", lambda c: read.append(c) or read_corpus(c))
    return read


def assert_same_data(a, b):
    assert a.tokenizer.vocabulary == b.tokenizer.vocabulary
    assert type(a.tokenizer) is type(b.tokenizer)
    for name, array in vars(a.examples).items():
        other = getattr(b.examples, name)
        assert other.dtype == array.dtype and np.array_equal(array, other), name


@pytest.mark.parametrize("tokenizer", ["word", "wordpiece"])
def test_cache_hit(corpus, preparations, cache, tokenizer):
    first = prepare(corpus, tokenizer=tokenizer, max_len=64)
    second = prepare(corpus, tokenizer=tokenizer, max_len=64, static_masking=True)
    assert len(preparations) == 1
    assert len(list(cache.iterdir())) == 1  # and no temporary file left
    assert_same_data(first, second)
    assert second.static_masking and not first.static_masking
    assert_equal(batches(first), batches(prepare(corpus, tokenizer=tokenizer, max_len=64)))


def test_cache_key_holds_everything(corpus, preparations, tmp_path):
    vocabulary = write(tmp_path / "vocab.txt", "\n".join([*WordPieceTokenizer.RESERVED, "fox", "dog", "."]))
    calls = [
        {},
        {"max_len": 63},
        {"seed": 1},
        {"min_freq": 2},
        {"tokenizer": "wordpiece"},
        {"tokenizer": "wordpiece", "vocab_size": 90},
        {"tokenizer": vocabulary},
    ]
    for done, kwargs in enumerate(calls, 1):
        for _ in range(2):
            prepare(corpus, **kwargs)
        assert len(preparations) == done, kwargs
    write(vocabulary, vocabulary.read_text() + "\nlazy\n")
    assert prepare(corpus, tokenizer=vocabulary).tokenizer.vocab_size == 9
    write(corpus, corpus.read_text().replace("lazy", "busy"))
    assert "busy" in prepare(corpus).tokenizer.vocabulary
    assert len(preparations) == len(calls) + 2


@pytest.mark.parametrize("damage", ["truncated", "empty", "flipped", "garbage", "directory"])
def test_damaged_entry_is_made_anew(corpus, preparations, cache, damage):
    first = prepare(corpus, max_len=64)
    (entry,) = cache.iterdir()
    raw = bytearray(entry.read_bytes())
    if damage == "directory":
        entry.unlink()
        entry.mkdir()
    else:
        flipped = raw[:-5] + bytes([raw[-5] ^ 1]) + raw[-4:]
        kinds = {"truncated": raw[:-1], "empty": b"", "flipped": flipped, "garbage": b"\xff" * 999}
        entry.write_bytes(kinds[damage])
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        again = prepare(corpus, max_len=64)
    assert_same_data(first, again)
    assert len(preparations) == 2
    if damage == "directory":  # nothing can replace it: said, and no temporary file left
        assert "cannot be written" in str(warned[0].message)
        assert list(cache.iterdir()) == [entry]
    else:
        assert entry.read_bytes() == raw


def test_unwritable_cache_does_not_stop_the_run(corpus, monkeypatch, tmp_path):
    expected = prepare(corpus, max_len=64)
    blocker = write(tmp_path / "file", "a file where the directory should be")
    monkeypatch.setenv("FASTBERT_CACHE", str(blocker / "cache"))
    with pytest.warns(UserWarning, match=r"cache directory .*file.cache cannot be written .* set FASTBERT_CACHE"):
        data = prepare(corpus, max_len=64)
    assert_same_data(expected, data)


def test_failed_write_leaves_nothing_behind(corpus, cache, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fastbert_data.os, "replace", full)
    with pytest.warns(UserWarning, match="No space left on device"):
        prepare(corpus, max_len=64)
    assert list(cache.iterdir()) == []


def test_default_cache_directory(monkeypatch, tmp_path, corpus):
    monkeypatch.delenv("FASTBERT_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    prepare(corpus)
    assert len(list((tmp_path / "home" / ".cache" / "fastbert").iterdir())) == 1


def test_saved_tokenizer_prepares_the_same_examples(corpus, tmp_path):
    trained = prepare(corpus)
    trained.tokenizer.save(tmp_path / "run")
    assert_same_data(trained, prepare(corpus, tokenizer=tmp_path / "run"))


def test_prepare_errors(corpus, tmp_path):
    with pytest.raises(ValueError, match="max_len is 4; 5 or more is accepted"):
        prepare(corpus, max_len=4)
    with pytest.raises(ValueError, match=r"seed is -1; 0 to 2\*\*64 - 1 is accepted"):
        prepare(corpus, seed=-1)
    with pytest.raises(FileNotFoundError, match=r"tokenizer .*none\.txt does not exist; 'word', 'wordpiece', a vocab"):
        prepare(corpus, tokenizer=tmp_path / "none.txt")
    with pytest.raises(FileNotFoundError, match=r"corpus .* does not exist"):
        prepare(tmp_path / "none")


def test_builtin_gives_thousands_of_pairs():
    data = prepare("builtin", max_len=64)
    assert len(data) > 1900
    assert (data.examples.tokens == data.tokenizer.unk_id).mean() < 0.1


@needs_wiki
def test_wikitext_examples():
    data = prepare(WIKI, max_len=64, min_freq=5, static_masking=True)
    assert data.tokenizer.vocab_size == 4271
    # the notebook's own code: 4,646 examples, fill 0.716; both hang a little on its draws
    assert 4500 < len(data) < 4750
    assert 0.70 < data.fill < 0.73
