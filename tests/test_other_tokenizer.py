"""A draft model with another tokenizer: the text is the target's whatever the pair, what is proposed is drafted text in
the target's tokens, and no text, however odd, brings it out of step."""

import gc
import json
import random
import string

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE, Unigram
from tokenizers.normalizers import Lowercase
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer, UnigramTrainer
from transformers import PreTrainedTokenizerFast

from batches import graphs_of, prefilled
from drafted import drafts
from graft import Engine, GraftError
from graft.drafters.drafter import TreeSettings
from graft.drafters.other_tokenizer import OtherTokenizerDrafter
from graft.drafters.small_model import SmallModelDrafter
from graft.drafters.text_alignment import (
    DraftedTree,
    TextRow,
    Vocabulary,
    VocabularyPair,
    as_target_tokens,
)
from graft.engine.scheduler import Scheduler
from graft.engine.settings import SchedulerSettings
from graft.loading import load
from graft.model import TargetRunner
from graft.request.stats import Clock
from graft.spec_decode.policies import PolicySettings, policy_with
from scheduling import Asked, undisturbed
from tiny import tiny_model

TREE = TreeSettings(depth=3, topk=3, total_token=12)
SHORT = TreeSettings(depth=2, topk=3, total_token=12)
CHAIN = TreeSettings(depth=3, topk=1, total_token=4)
SAMPLED = {"temperature": 1.2, "top_p": 0.9, "seed": 3, "frequency_penalty": 0.2}
SENTENCE = "the quick brown fox jumps over a lazy dog while seven green apples roll down hill and water falls on stone"
WORDS = SENTENCE.split()
SPECIALS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
ODD = [
    "naïve café, 中文 and 😀😀 emoji",
    "  two  spaces\n\n\tand a tab \n",
    "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n",
    "def f(x):\n    return x ** 2\n",
    "\ufffd\x00\x7f",
]


def corpus():
    rng = random.Random(0)
    for _ in range(300):
        yield " ".join(rng.choices(WORDS, k=8)).capitalize() + ". def f(x):\n    return 12 + 30\n"


def wrapped(tokenizer, bos=None):
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    if bos is not None:
        fast.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    return fast


def make_byte_level(size=400):
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=size, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(corpus(), trainer)
    return wrapped(tokenizer)


def make_metaspace():
    """As sentencepiece's: words begin with ▁, which a text begins with too; what is not in it is bytes."""
    trained = Tokenizer(Unigram())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    letters = list(string.printable)
    trainer = UnigramTrainer(vocab_size=260, special_tokens=["<unk>"], initial_alphabet=letters, show_progress=False)
    trained.train_from_iterator(corpus(), trainer)
    pieces = [(piece, score) for piece, score in json.loads(trained.to_str())["model"]["vocab"] if piece != "<unk>"]
    pieces += [(letter, -12.0) for letter in letters if letter not in dict(pieces)]
    pieces = [("<unk>", 0.0), *((name, 0.0) for name in SPECIALS[:2]), *pieces]
    pieces += [(f"<0x{byte:02X}>", -20.0) for byte in range(256)]
    tokenizer = Tokenizer(Unigram(pieces, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(SPECIALS[:2])
    return wrapped(tokenizer, bos=1)


@pytest.fixture(scope="module")
def byte_level():
    return make_byte_level()


@pytest.fixture(scope="module")
def metaspace():
    return make_metaspace()


def model_for(tokenizer, seed=0, name="llama", **changes):
    return tiny_model(
        name, seed, **{"vocab_size": len(tokenizer), "num_hidden_layers": 2, "max_position_embeddings": 1024, **changes}
    )


def runner_of(drafter, engine):
    """What runs the draft model beside an engine's target."""
    return drafter.open(engine.target.cache_of([])).runner


def pair_of(draft, target):
    return VocabularyPair(Vocabulary(draft, "the draft"), Vocabulary(target, "the target"))


@pytest.fixture(scope="module", params=["spaces", "bytes"])
def strangers(request, byte_level, metaspace):
    """A target, its tokenizer, and a drafter that knows the text by another and says something else; and what the
    target says to some prompts, greedily and sampled."""
    own, its = (byte_level, metaspace) if request.param == "spaces" else (metaspace, byte_level)
    model, prompts = model_for(own), [*ODD, "A dog " * 30]
    plain = [
        Engine(model, own, policy="off").generate_batch(prompts, max_new_tokens=9, **options)
        for options in ({}, SAMPLED)
    ]
    draft = model_for(its, 1, "gemma3_text", layer_types=["sliding_attention", "full_attention"])
    return model, own, OtherTokenizerDrafter(draft, pair_of(its, own), SHORT), prompts, plain


def speaks_words(model, tokenizer):
    """Makes a model say only whole words, each with its space: the text's tokens are the tokenizer's."""
    words = [number for text, number in tokenizer.get_vocab().items() if text[1:] in WORDS and text[0] in "Ġ▁"]
    assert len(words) > 10
    keep = torch.zeros(len(tokenizer), 1)
    keep[words] = 1
    with torch.no_grad():
        model.lm_head.weight *= 4 * keep
    return model


@pytest.fixture(scope="module")
def twins(byte_level):
    """A target, its tokenizer, and a drafter that is the same model with tokens of other numbers."""
    target = speaks_words(model_for(byte_level), byte_level)
    order = torch.randperm(len(byte_level), generator=torch.Generator().manual_seed(5))  # by old number the new one
    content = json.loads(byte_level.backend_tokenizer.to_str())
    content["model"]["vocab"] = {text: int(order[number]) for text, number in content["model"]["vocab"].items()}
    for token in content["added_tokens"]:
        token["id"] = int(order[token["id"]])
    draft = model_for(byte_level)
    draft.load_state_dict(target.state_dict())
    with torch.no_grad():
        for layer in (draft.get_input_embeddings(), draft.get_output_embeddings()):
            layer.weight[order] = layer.weight.clone()
    tokenizer = wrapped(Tokenizer.from_str(json.dumps(content)))
    return target, byte_level, OtherTokenizerDrafter(draft, pair_of(tokenizer, byte_level), CHAIN), tokenizer


# The text


@pytest.mark.parametrize(
    ("strangers", "policy"),
    [("spaces", "dense"), ("spaces", "graft"), ("bytes", "dense"), ("bytes", "block")],
    indirect=["strangers"],
)
def test_the_text_is_that_of_plain_decoding_with_trees_chains_and_retrieval(strangers, policy):
    """Of a target that says anything: half characters, control characters, tokens that nobody would write so."""
    model, tokenizer, drafter, prompts, all_plain = strangers
    target = TargetRunner(model)
    for options, plain in zip(({}, SAMPLED), all_plain, strict=True):
        own = policy_with(PolicySettings(12, pass_cost=0.0), policy, target, drafter)
        engine = Engine(model, tokenizer, policy=own, drafter=drafter)
        together = engine.generate_batch(prompts, max_new_tokens=9, **options)
        assert [answer.ids for answer in together] == [answer.ids for answer in plain]
        assert sum(answer.stats.draft_passes for answer in together) > 0
        assert sum(answer.stats.nodes for answer in together) > 10
    alone = engine.generate(prompts[0], max_new_tokens=9, **options)
    assert alone.ids == plain[0].ids


# Alignment: a draft model that says the same in other tokens


@pytest.mark.parametrize("options", [{}, {"n": 2, "temperature": 0.01, "seed": 4}])
def test_a_copy_of_the_target_with_other_token_numbers_has_its_drafts_accepted(twins, options):
    model, tokenizer, drafter, _ = twins
    prompts = ["the quick brown", "a lazy dog while seven green apples roll down hill " * 12]
    plain = Engine(model, tokenizer, policy="off").generate_batch(prompts, max_new_tokens=20, **options)
    for policy in ("dense", "block"):
        engine = Engine(model, tokenizer, policy=policy, drafter=drafter)
        for answer, expected in zip(engine.generate_batch(prompts, max_new_tokens=20, **options), plain, strict=True):
            for choice, its in zip(answer.choices, expected.choices, strict=True):
                assert choice.ids == its.ids
                assert choice.stats.mean_accepted == CHAIN.depth + 1, "all that was drafted, and the target's own"


def cyclic(pieces):
    """A tokenizer with these pieces, and a model that says one after the other for ever."""
    letters = [letter for letter in string.printable if letter not in pieces]
    vocab = [(name, 0.0) for name in ("<unk>", *SPECIALS[:2])]
    vocab += [(piece, -1.0) for piece in pieces] + [(letter, -40.0) for letter in letters]
    tokenizer = Tokenizer(Unigram(vocab, unk_id=0))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<unk>", *SPECIALS[:2]])
    fast = wrapped(tokenizer)
    model = model_for(fast, hidden_size=64)
    with torch.no_grad():
        for layer in model.model.layers:  # the next token depends on the last alone
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embedding = torch.nn.functional.normalize(model.get_input_embeddings().weight, dim=1)
        numbers = [fast.get_vocab()[piece] for piece in pieces]
        model.lm_head.weight.zero_()
        model.lm_head.weight[numbers[1:] + numbers[:1]] = 4 * embedding[numbers]
    return model, fast


COARSE = [" sun mo", "on star c", "loud riv", "er stone b", "ird fro", "g house w", "ind gre", "y cat"]
FINE = [" su", "n mo", "on s", "tar c", "lo", "ud riv", "er st", "one b", "i", "rd fro", "g ho", "use w", "in", "d gre"]
FINE += ["y", " cat"]


@pytest.mark.parametrize(("own", "its", "least"), [(COARSE, FINE, 2.9), (FINE, COARSE, 3.5), (FINE, FINE, 4.0)])
def test_text_that_is_cut_elsewhere_is_accepted(own, its, least):
    """A word may end within a token of either, and a token of the target within one of the draft model."""
    (model, tokenizer), (draft, draft_tokenizer) = cyclic(own), cyclic(its)
    drafter = OtherTokenizerDrafter(draft, pair_of(draft_tokenizer, tokenizer), TreeSettings(depth=5, topk=2))
    prompts = ["".join(own[:3]), "".join(own) * 9]
    plain = Engine(model, tokenizer, policy="off").generate_batch(prompts, max_new_tokens=24)
    assert plain[1].text == ("".join(own) * 9)[: len(plain[1].text)]
    engine = Engine(model, tokenizer, policy="dense", drafter=drafter, budget=12)
    for answer, expected in zip(engine.generate_batch(prompts, max_new_tokens=24), plain, strict=True):
        assert answer.ids == expected.ids
        assert answer.stats.mean_accepted >= least


def test_its_probabilities_are_the_draft_models(twins):
    model, tokenizer, drafter, _ = twins
    drafter = drafter.with_settings(TREE)
    engine = Engine(model, tokenizer, policy="dense", drafter=drafter)
    batch = prefilled(engine, engine.encode("the quick brown fox"), max_new_tokens=60)
    engine.run_round(batch, Clock())
    text, nodes = batch.sequences[0].ids, [((), 1.0)]
    levels = drafts(drafter, batch.draft, batch.roots())
    for level in levels:
        for token, parent, q in zip(
            *(c[0].tolist() for c in (level.tokens, level.parents, level.probabilities)), strict=True
        ):
            above = nodes[parent][0]
            with torch.no_grad():
                plain = model(torch.tensor([text + list(above)])).logits[0, -1].softmax(-1)
            assert q == pytest.approx(float(plain[token]), rel=1e-3)
            nodes.append(((*above, token), q))
    assert len(nodes) > 9


@pytest.mark.parametrize("settings", [{"max_rows": 3, "prefix_cache_tokens": 4096}, {"max_cache_tokens": 768}])
def test_requests_that_come_and_go_are_drafted_as_if_alone(twins, settings):
    """Beginnings that the target knows already are read by the draft model all the same."""
    model, tokenizer, drafter, _ = twins
    own = model_for(tokenizer)
    own.load_state_dict(model.state_dict())
    engine = Engine(own, tokenizer, policy="dense", drafter=drafter, budget=4)
    scheduler = Scheduler(engine, SchedulerSettings(**{"max_cache_tokens": 8192, **settings}))
    beginning = "the quick brown fox jumps over a lazy dog while seven green apples roll down hill " * 5
    options = [{"max_new_tokens": 13 + 4 * number, "n": 1 + number % 2} for number in range(3)]
    prompts = [beginning + word for word in WORDS[:3]]
    plain = [
        Engine(model, tokenizer, policy="off").generate(prompt, **own)
        for prompt, own in zip(prompts, options, strict=True)
    ]
    try:
        for _ in range(2):
            with undisturbed(scheduler):
                asked = [Asked(scheduler, prompt, **own) for prompt, own in zip(prompts, options, strict=True)]
            for number, (request, expected) in enumerate(zip(asked, plain, strict=True)):
                assert request.wait() == [choice.text for choice in expected.choices]
                if "max_cache_tokens" not in settings:
                    rounds = [sequence.stats.rounds for sequence in request.job.sequences]
                    assert rounds == [4 + number] * len(rounds), "four tokens a round"
        if "prefix_cache_tokens" in settings:
            assert asked[0].job.num_cached_tokens >= 63
        runner = runner_of(drafter, engine)
        assert runner.pool.num_pages == engine.target.pool.num_pages
    finally:
        scheduler.close()
    del asked, request
    gc.collect()
    assert not runner.pool.is_in_use


# Text in both vocabularies


@pytest.mark.parametrize("direction", ["spaces", "bytes"])
def test_the_draft_model_reads_the_targets_text(byte_level, metaspace, direction):
    """Token by token and in pieces of any length the same tokens come out, and of the settled ones none changes."""
    its, own = (metaspace, byte_level) if direction == "spaces" else (byte_level, metaspace)
    pair, rng = pair_of(its, own), random.Random(1)
    for text in (" ".join(rng.choices(WORDS, k=300)), "中文😀é" * 40, "aaaa" * 100, "x " + "\n" * 200, *ODD):
        ids = pair.target.encode(text)
        for step in (1, 9, 1000):
            row = TextRow(pair)
            for start in range(0, len(ids), step):
                before, settled = list(row.drafts), row.num_settled
                unchanged = row.extend(ids[start : start + step])
                assert unchanged >= settled and row.drafts[:unchanged] == before[:unchanged]
                assert row.num_settled >= settled
            assert row.drafts == pair.draft.start + pair.draft.encode(pair.target.decode(ids))


def drafted_behind(pair, text_ids, *texts):
    """What becomes of texts that are drafted behind a row's, each with the path probabilities 1/2, 1/4 ..."""
    row, tree = TextRow(pair), DraftedTree()
    row.extend(text_ids)
    for text in texts:
        known = pair.draft.encode(pair.target.decode(text_ids))
        tokens = pair.draft.encode(pair.target.decode(text_ids) + text)
        assert tokens[: len(known)] == known, "choose another text"
        node = 0
        for token in tokens[len(known) :]:
            tree.tokens.append(token)
            tree.parents.append(node)
            tree.paths.append(tree.paths[node] / 2)
            node = len(tree.tokens) - 1
        tree.looked_ahead.append(node)
    return as_target_tokens(pair, row, tree)


def paths_of(pair, trie):
    found = {}
    for node in range(1, len(trie.tokens)):
        tokens, at = [], node
        while at:
            tokens.insert(0, trie.tokens[at])
            at = trie.parents[at]
        found[tuple(tokens)] = trie.paths[node]
    return found


def paths_behind(pair, row, tokens):
    """Paths of the target's tokens, where the draft model has drafted these one after the other."""
    tree = DraftedTree()
    for token in tokens:
        tree.tokens.append(token)
        tree.parents.append(len(tree.tokens) - 2)
        tree.paths.append(0.5 * tree.paths[-1])
    tree.looked_ahead.append(len(tree.tokens) - 1)
    return paths_of(pair, as_target_tokens(pair, row, tree))


def test_drafted_text_becomes_the_targets_tokens(byte_level, metaspace):
    for its, own in ((metaspace, byte_level), (byte_level, metaspace)):
        pair = pair_of(its, own)
        ids = pair.target.encode("the quick brown")
        trie = drafted_behind(pair, ids, " fox jumps over", " fox jumps down", " dog")
        found = paths_of(pair, trie)
        whole = pair.target.encode("the quick brown fox jumps over")[len(ids) :]
        assert tuple(whole[:-1]) in found, "the last token may go on"
        assert tuple(whole) not in found
        for node in range(len(trie.tokens)):
            children = [child for child in range(1, len(trie.tokens)) if trie.parents[child] == node]
            assert sum(trie.paths[child] for child in children) <= trie.paths[node] + 1e-9


def test_a_character_of_which_half_is_there_is_finished(byte_level, metaspace):
    pair = pair_of(metaspace, byte_level)
    whole = pair.target.encode("the 😀 dog")
    face = pair.target.encode(" 😀")
    first = whole.index(face[-4])
    trie = TextRow(pair)
    trie.extend(whole[: first + 2])
    text, _, pending = trie.end()
    assert text.endswith("the ") or text.endswith("the")
    assert pending[-2:] == whole[first : first + 2]
    found = paths_behind(pair, trie, pair.draft.encode("the 😀 dog")[len(trie.drafts) - len(pair.draft.start) :])
    assert tuple(whole[first + 2 : first + 4]) in found


@pytest.mark.parametrize("ending", ["of both", "of one"])
def test_the_end_of_a_draft_is_the_targets_end_of_text(byte_level, metaspace, ending):
    pair = pair_of(metaspace, byte_level)
    if ending == "of one":  # the target has no such token
        own = PreTrainedTokenizerFast(tokenizer_object=byte_level.backend_tokenizer, eos_token="<|im_end|>")
        pair = pair_of(own, metaspace)
        assert pair.textless >= {pair.draft.eos}
    row = TextRow(pair)
    row.extend(pair.target.encode("the lazy"))
    new = pair.draft.encode("the lazy dog")[len(row.drafts) - len(pair.draft.start) :]
    found = paths_behind(pair, row, [*new, pair.draft.eos])
    assert (*pair.target.encode("the lazy dog")[len(row.ids) :], pair.target.eos) in found


def test_special_tokens_are_read_as_the_same_or_as_plain_text(byte_level, metaspace):
    pair = pair_of(metaspace, byte_level)
    row = TextRow(pair)
    row.extend(byte_level.encode("<s><|im_start|>dog<|im_end|></s>"))
    assert row.drafts[:1] == pair.draft.start == [1], "the beginning of one is that of the other"
    assert row.drafts[-1] == pair.draft.eos
    assert pair.draft.decode(row.drafts[1:-1]) == "<|im_start|>dog<|im_end|>"


# What does not fit


def test_text_beyond_the_draft_models_context_is_decoded_without_drafts(byte_level, metaspace):
    model, draft = model_for(byte_level), model_for(metaspace, 1, num_hidden_layers=1, max_position_embeddings=96)
    drafter = OtherTokenizerDrafter(draft, pair_of(metaspace, byte_level), TREE)
    prompt = "the quick brown fox " * 8
    plain = Engine(model, byte_level, policy="off").generate(prompt, max_new_tokens=24)
    engine = Engine(model, byte_level, policy="dense", drafter=drafter)
    answer = engine.generate(prompt, max_new_tokens=24)
    assert answer.ids == plain.ids
    assert 0 < answer.stats.nodes < TREE.total_token * answer.stats.rounds // 2
    assert not runner_of(drafter, engine).pool.is_in_use


# Loading


def folder_of(root, name, tokenizer, model):
    model.save_pretrained(root / name)
    tokenizer.save_pretrained(root / name)
    return str(root / name)


def refusal(target, draft, **options):
    with pytest.raises(GraftError) as caught:
        load(target, draft=draft, policy="dense", dtype="fp32", profile=None, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_model_in_memory_with_its_tokenizer_is_a_drafter(byte_level, metaspace):
    model, draft = model_for(byte_level), model_for(metaspace, 1, num_hidden_layers=1)
    engine = load(model, tokenizer=byte_level, draft=draft, draft_tokenizer=metaspace, profile=None)
    assert isinstance(engine.drafter, OtherTokenizerDrafter)
    same = load(model, tokenizer=byte_level, draft=model, draft_tokenizer=byte_level, profile=None)
    assert type(same.drafter) is SmallModelDrafter
    assert "without tokenizers they cannot be compared" in refusal(model, draft, tokenizer=byte_level)


@pytest.mark.filterwarnings("ignore:.*has more parameters than the target")
def test_a_tokenizer_that_changes_text_is_refused(byte_level, metaspace):
    lower = wrapped(Tokenizer.from_str(metaspace.backend_tokenizer.to_str()))
    lower.backend_tokenizer.normalizer = Lowercase()
    model, draft = model_for(byte_level), model_for(metaspace, 1, num_hidden_layers=1)
    message = refusal(model, draft, tokenizer=byte_level, draft_tokenizer=lower)
    assert "the tokenizer of the draft model does not restore text" in message and "hello, world" in message
    message = refusal(draft, model, tokenizer=lower, draft_tokenizer=byte_level)
    assert "the tokenizer of the target does not restore text" in message


def test_a_context_in_which_nothing_can_be_drafted_is_refused(byte_level, metaspace):
    model, draft = model_for(byte_level), model_for(metaspace, 1, num_hidden_layers=1, max_position_embeddings=90)
    message = refusal(model, draft, tokenizer=byte_level, draft_tokenizer=metaspace)
    assert "the draft model's context leaves room for 9 tokens of text besides 81 drafted ones" in message


def test_the_commands_say_in_one_line_what_is_wrong_with_a_draft_model(graft, byte_level, metaspace, tmp_path):
    lower = wrapped(Tokenizer.from_str(metaspace.backend_tokenizer.to_str()))
    lower.backend_tokenizer.normalizer = Lowercase()
    named = {
        "changes": folder_of(tmp_path, "changes", lower, model_for(metaspace, 1)),
        "short": folder_of(tmp_path, "short", metaspace, model_for(metaspace, 1, max_position_embeddings=512)),
        "large": folder_of(tmp_path, "large", metaspace, model_for(metaspace, 1, num_hidden_layers=9)),
        "nothing": str(tmp_path),
    }
    target = folder_of(tmp_path, "target", byte_level, model_for(byte_level, num_hidden_layers=6))
    words = ("generate", "the dog", "--max-new-tokens", "6", "--model", target, "--device", "cpu")
    expected = graft(*words, "--policy", "off").out
    found = {name: graft(*words, "--budget", "7", "--draft", draft) for name, draft in named.items()}
    for name, start, words_of_it in (
        ("changes", "error: ", "does not restore text"),
        ("nothing", "error: ", "config.json is missing: give the folder of a draft head or a model"),
        ("short", "warning: ", "is 512 tokens and the target's is 1,024: beyond it, it does not draft"),
        ("large", "warning: ", "has more parameters than the target"),
    ):
        (line,) = found[name].err.splitlines()
        assert line.startswith(start) and words_of_it in line
        assert found[name].status == (2 if start == "error: " else 0)
        assert found[name].out == ("" if start == "error: " else expected)


# CUDA graphs


def test_captured_steps_draft_the_same(plain, monkeypatch, twins):
    """With PyTorch in place of kernels."""
    from captured_parts import OneContext

    model, tokenizer, drafter, _ = twins
    prompts = ["the quick brown", SENTENCE]
    expected = Engine(model, tokenizer, policy="off").generate_batch(prompts, max_new_tokens=16)
    monkeypatch.setattr("graft.engine.engine.target_for", OneContext)
    monkeypatch.setattr("graft.drafters.other_tokenizer.target_for", OneContext)
    drafter = drafter.with_settings(CHAIN)
    engine = Engine(model, tokenizer, policy="dense", drafter=drafter)
    engine.warm_up(16, 2)
    answers = engine.generate_batch(prompts, max_new_tokens=16)
    for answer, its in zip(answers, expected, strict=True):
        assert answer.ids == its.ids and answer.stats.mean_accepted == CHAIN.depth + 1
    runner = runner_of(drafter, engine)
    assert isinstance(runner, OneContext) and runner.pool is not engine.target.pool
    assert graphs_of(runner).failure is None and drafter.num_setups > 0
