"""CUDA-graph runners, tested without a GPU: fused layers against transformers, kernels against plain PyTorch, and
captured steps (here called instead of replayed) against the eager runner."""

import random
import threading
import time
import warnings

import pytest
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

pytest.importorskip("triton", reason="Triton is not installed, and without it there are no kernels")

import plain_kernels
from batches import graphs_of
from captured_parts import Small, small_target
from graft import Engine, GraftError, SamplingSettings
from graft.model import TargetRunner, captures
from graft.model import cuda_graphs as captured
from graft.model.captures import CaptureError, Captures
from graft.model.families import describe, why_not
from graft.model.kernels import attention as attention_kernels
from graft.model.kernels import layer as layer_kernels
from graft.model.kernels import rotary as rotary_kernels
from graft.model.kernels.matmul import Products
from graft.model.kv_cache import PAGE
from graft.model.llama import FastLayers
from graft.model.noise import gumbel_noise
from graft.model.step import Chunk
from graft.tree.tree import DraftTree
from proposers import Oracle, RandomTrees, random_tree, tree_of
from tiny import tiny_model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPT = [3, 17, 42, 9, 9, 30, 5, 21, 17, 42, 9, 11]
FAST = ["llama", "mistral", "qwen2", "qwen2_window", "qwen3"]


@pytest.fixture
def plain(monkeypatch):
    """Without a GPU, PyTorch in place of kernels; engines run captured steps."""
    if DEVICE == "cpu":
        plain_kernels.use_plain_kernels(monkeypatch)
    monkeypatch.setattr("graft.engine.engine.target_for", small_target)


def model_of(name, **changes):
    model = tiny_model(name, **changes)
    for parameter_name, parameter in model.named_parameters():
        if parameter.dim() == 1:  # biases are 0 and norms 1 in a new model
            torch.nn.init.normal_(parameter, mean=float("norm" in parameter_name), std=0.3)
    return model.to(DEVICE)


def sizes_of(target):
    """Tokens of the steps that are captured."""
    return {key[2] for key in graphs_of(target).steps if key[0] == "step"}


def logits_of(verified):
    """[B, W, V], to keep."""
    return verified.logits[verified.index].clone()


# Fused layers


@pytest.mark.parametrize("name", FAST)
def test_fused_layers_give_what_transformers_gives(name, plain):
    model = model_of(name)
    ordinary, fast = TargetRunner(model, (0, 2, 3)), Small(model, (0, 2, 3), chunk_size=7)
    results = []
    for target in (ordinary, fast):
        cache = target.open(2, 64)
        chunks = [logits_of(chunk) for row in (0, 1) for chunk in target.prefill(cache, row, PROMPT[: 12 - 7 * row])]
        verified = target.verify(cache, random_tree(random.Random(1), [3, 4], 5, 61))
        results.append((torch.cat(chunks, dim=1), logits_of(verified), verified.hidden[verified.index]))
    assert graphs_of(fast).layers is not None and graphs_of(fast).failure is None
    torch.testing.assert_close(results[1], results[0], atol=1e-4, rtol=1e-4)


def test_fused_layers_with_the_real_kernels():
    model = model_of("qwen3", num_hidden_layers=1)
    results = []
    for target in (TargetRunner(model, (1,)), Small(model, (1,))):
        cache = target.open(1, 64)
        list(target.prefill(cache, 0, [7, 8]))
        verified = target.verify(cache, tree_of([[9, 10, 11, 12, 13]], [[0, 0, 1, 1, 0]]))
        results.append((logits_of(verified), verified.hidden[verified.index]))
    torch.testing.assert_close(results[1], results[0], atol=1e-4, rtol=1e-4)


def test_fused_weights_are_the_models_own(tmp_path):
    model = model_of("qwen2")
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    layers, again = FastLayers(describe(model)), FastLayers(describe(model))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
    attention = model.model.layers[1].self_attn
    attention.k_proj.weight.data[0, 0] = 5.0
    ours, theirs = layers.stack.layers, again.stack.layers
    assert ours[1].qkv[attention.q_proj.weight.shape[0], 0] == 5.0
    assert all(a.mlp.up.data_ptr() == b.mlp.up.data_ptr() for a, b in zip(ours, theirs, strict=True))
    model.save_pretrained(tmp_path)
    saved = type(model).from_pretrained(tmp_path)
    assert torch.equal(saved.model.layers[1].self_attn.k_proj.weight, attention.k_proj.weight.cpu())


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("gpt_neox", {}, "not of a family"),
        ("llama", {"hidden_act": "tanh"}, "Tanh"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic"),
    ],
)
def test_other_models_are_left_to_transformers(name, changes, reason):
    assert reason in (why_not(tiny_model(name, **changes)) or "")


def test_a_model_with_hooks_is_left_to_transformers():
    model = tiny_model()
    model(torch.tensor([PROMPT]), output_hidden_states=True)  # makes transformers put hooks of its own
    assert why_not(model) is None
    hook = model.model.layers[0].mlp.register_forward_hook(lambda module, inputs, output: output * 2)
    assert "hook" in (why_not(model) or "")
    hook.remove()
    assert why_not(model) is None


# Captured steps


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "name",
    [
        *("llama", "qwen2_window", "gpt_neox", "gemma4_text"),  # the last has layers of two shapes
        *(pytest.param(name, marks=SLOW) for name in ("mistral", "qwen2", "qwen3")),
        *(pytest.param(name, marks=SLOW) for name in ("gemma2", "gpt_oss", "llama4_text")),
    ],
)
def test_captured_steps_give_the_text_of_the_ordinary_runner(name, plain, monkeypatch):
    """Greedy and sampled, over trees of many sizes; models not built like Llama in transformers' own layers."""
    model = model_of(name)
    for options in ({}, {"temperature": 1.0, "seed": 5}):
        options = {"max_new_tokens": 16, **options}
        with monkeypatch.context() as ordinary:
            ordinary.setattr("graft.engine.engine.target_for", lambda model, *_: TargetRunner(model))
            expected = Engine(model, policy="off").generate(PROMPT, **options).ids
        engines = [Engine(model, policy="off"), Engine(model, policy=Oracle(expected, len(PROMPT)))]
        engines += [Engine(model, policy=RandomTrees(n)) for n in (2, 7, 20)]
        for engine in engines:
            assert engine.generate(PROMPT, **options).ids == expected
            assert graphs_of(engine.target).failure is None
        assert engines[1].generate(PROMPT, **options).stats.rounds <= 4


@pytest.mark.parametrize("path", [[], [1], [2], [1, 3], [2, 4], [1, 3, 5], [1, 3, 5, 6]])
def test_whatever_path_is_committed_the_next_logits_are_those_of_the_models_own_forward(path, plain):
    """A path without gaps stays where it is, and one may begin at its place and leave it further down."""
    model, target = model_of("llama"), Small(model_of("llama"))
    tokens, parents = [7, 8, 9, 10, 11, 12, 13], [0, 0, 0, 1, 2, 3, 5]
    cache = target.open(1, 64)
    list(target.prefill(cache, 0, PROMPT))
    target.verify(cache, tree_of([tokens], [parents]))
    target.commit(cache, [path])
    found = logits_of(target.verify(cache, tree_of([[14]], [[0]])))[0, 0]
    text = [*PROMPT, 7, *(tokens[node] for node in path), 14]
    expected = model(torch.tensor([text], device=DEVICE)).logits[0, -1]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_rows_that_commit_in_turn_keep_the_texts_of_the_models_own_forward(plain):
    """Three rows move their paths, then two of them, then one: what was moved before stays."""
    model, target = model_of("llama"), Small(model_of("llama"))
    texts, tokens = [PROMPT, PROMPT[:5], PROMPT[3:]], [7, 8, 9, 10]
    cache = target.open(3, 64)
    for row, text in enumerate(texts):
        list(target.prefill(cache, row, text))
    for paths in ([[1, 3], [2], [1, 3]], [[2], [1, 3], []], [[], [2], [1]]):
        target.verify(cache, tree_of([tokens] * 3, [[0, 0, 0, 1]] * 3))
        target.commit(cache, paths)
        texts = [[*text, 7, *(tokens[node] for node in path)] for text, path in zip(texts, paths, strict=True)]
    found = logits_of(target.verify(cache, tree_of([[14]] * 3, [[0]] * 3)))[:, 0]
    expected = [model(torch.tensor([[*text, 14]], device=DEVICE)).logits[0, -1] for text in texts]
    torch.testing.assert_close(found, torch.stack(expected), atol=1e-4, rtol=1e-4)


def test_padding_of_a_step_is_written_to_no_text_of_an_earlier_step(plain):
    model, target = model_of("llama"), Small(model_of("llama"))
    cache = target.open(2, 64)
    for row in range(2):
        list(target.prefill(cache, row, PROMPT))
    target.verify(cache, tree_of([[7], [7]], [[0], [0]]))
    target.commit(cache, [[], []])
    first, second = (cache.with_rows([row]) for row in cache.rows)
    target.verify(first, tree_of([[8, 9, 10]], [[0, 0, 1]]))  # a fourth token is padding
    found = logits_of(target.verify(second, tree_of([[14]], [[0]])))[0, 0]
    expected = model(torch.tensor([[*PROMPT, 7, 14]], device=DEVICE)).logits[0, -1]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_rows_with_settings_of_their_own_are_decoded_as_alone_in_captured_steps(plain):
    """Rows that are walked choice by choice stand beside rows whose choices the device makes."""
    model, prompts = model_of("llama"), [PROMPT, PROMPT[:3], PROMPT[2:9], [5]]
    each = [{}, {"frequency_penalty": 0.7}, {"temperature": 1.0, "seed": 5}, {"temperature": 1, "top_k": 9, "seed": 2}]
    plainly, engine = Engine(model, policy="off"), Engine(model, policy=RandomTrees(7, merge=True))
    alone = [plainly.generate(prompt, max_new_tokens=16, **own).ids for prompt, own in zip(prompts, each, strict=True)]
    together = engine.generate_batch(prompts, each=each, max_new_tokens=16)
    assert [answer.ids for answer in together] == alone


class AnswerPenalty(LogitsProcessor):
    """Presence and frequency penalties, as OpenAI defines them."""

    def __init__(self, presence=0.0, frequency=0.0):
        self._presence, self._frequency = presence, frequency

    def __call__(self, input_ids, scores):
        counts = input_ids[0, len(PROMPT) :].bincount(minlength=scores.shape[1])
        return scores - self._presence * (counts > 0) - self._frequency * counts


WARM = TemperatureLogitsWarper(0.8)
PROCESSORS = {  # by setting: its value, and what transformers does in its place, in its order
    "logit_bias": ({9: 2.5, 30: -6.0}, [SequenceBiasLogitsProcessor({(9,): 2.5, (30,): -6.0}), WARM]),
    "repetition_penalty": (2.5, [RepetitionPenaltyLogitsProcessor(2.5), WARM]),
    "presence_penalty": (5.0, [AnswerPenalty(presence=5.0), WARM]),
    "frequency_penalty": (5.0, [AnswerPenalty(frequency=5.0), WARM]),
    "top_k": (2, [WARM, TopKLogitsWarper(2)]),
    "top_p": (0.5, [WARM, TopPLogitsWarper(0.5)]),
    "min_p": (0.4, [WARM, MinPLogitsWarper(0.4)]),
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_each_setting_has_the_meaning_that_transformers_gives_it_in_captured_steps_too(name, plain):
    """The text is that of the model's own forwards, with transformers' processor in front of the same noise."""
    model = model_of("llama")
    value, processors = PROCESSORS[name]

    def text_by(processors):
        ids = torch.tensor([PROMPT], device=DEVICE)
        for position in range(len(PROMPT), len(PROMPT) + 16):
            scores = LogitsProcessorList(processors)(ids, model(ids).logits[:, -1].float())
            noise = gumbel_noise(torch.tensor([3]), torch.tensor([position]), 61).to(DEVICE)
            ids = torch.cat([ids, (scores + noise).argmax(dim=1, keepdim=True)], dim=1)
        return ids[0, len(PROMPT) :].tolist()

    expected = text_by(processors)
    assert expected != text_by([WARM]), "without it the text is another"
    engine = Engine(model, policy=RandomTrees(7))
    assert engine.generate(PROMPT, temperature=0.8, seed=3, max_new_tokens=16, **{name: value}).ids == expected
    assert graphs_of(engine.target).failure is None


def test_trees_that_fit_no_step_together_lose_their_least_likely_nodes(plain, monkeypatch):
    model = model_of("llama")
    prompts = [PROMPT, PROMPT[:3], [5], PROMPT[2:9]]
    expected = Engine(model, policy="off").generate_batch(prompts, max_new_tokens=16)
    monkeypatch.setattr(Small, "sizes", (1, 4, 8, 16))
    engine = Engine(model, policy=RandomTrees(num_nodes=12, merge=True), chunk_size=8)
    found = engine.generate_batch(prompts, max_new_tokens=16)
    assert [answer.ids for answer in found] == [answer.ids for answer in expected]
    assert any(answer.stats.nodes for answer in found)


def test_rows_of_a_batch_come_to_their_end_one_by_one(plain):
    model = model_of("llama")
    prompts = [PROMPT, PROMPT[:3], [5], PROMPT * 3, PROMPT[2:9]]
    alone = [Engine(model, policy="off").generate(prompt, max_new_tokens=24).ids for prompt in prompts]
    endings = [{ids[8 + 3 * row]} for row, ids in enumerate(alone)]  # tokens that end some rows early
    engine = Engine(model, policy=RandomTrees(6, merge=True))
    for stop in endings:
        stops = list(stop)
        cut = [ids[: ids.index(stops[0]) + 1] if stops[0] in ids else ids for ids in alone]
        together = engine.generate_batch(prompts, max_new_tokens=24, stop_token_ids=stops)
        assert [generation.ids for generation in together] == cut
    assert sizes_of(engine.target) >= {8, 16, 64}


def test_a_step_of_more_tokens_than_any_size_is_refused(plain):
    target = Small(model_of("llama"))
    cache, tree = target.open(6, 128), DraftTree.chain(torch.zeros(6, 100, dtype=torch.int64))
    with pytest.raises(GraftError, match="600 tokens is more than the maximum of 256: verify fewer nodes"):
        target.verify(cache, tree)
    assert target.verify(cache, tree.first(40)).counts == [40] * 6, "it goes on"


def test_graphs_over_a_pool_that_has_grown_are_captured_anew(plain, monkeypatch):
    """And texts that were begun before go on."""
    monkeypatch.setattr(captured, "_FIRST_TOKENS", 8 * PAGE)
    model = model_of("llama")
    plainly = Engine(model_of("llama"), policy="off")
    expected = plainly.generate(PROMPT, max_new_tokens=20).ids
    long = plainly.generate(PROMPT * 6, max_new_tokens=60).ids
    engine = Engine(model, policy=RandomTrees(6))
    target, (sequence,) = engine.target, engine.new_sequences(PROMPT, SamplingSettings(max_new_tokens=20))
    rounds = engine.rounds([sequence])
    next(rounds)
    pages, tables = target.pool.num_pages, target.pool.tables
    num_captured, before = target.num_setups, sizes_of(target)
    together = engine.generate_batch([PROMPT * 6, PROMPT], max_new_tokens=60)
    assert together[0].ids == long and together[1].ids[:20] == expected
    assert target.pool.num_pages > pages and target.pool.tables is not tables
    for _ in rounds:
        pass
    assert sequence.new_ids == expected
    assert before & sizes_of(target) and target.num_setups > num_captured


def test_larger_steps_get_larger_buffers(plain, monkeypatch):
    monkeypatch.setattr(captured, "_FIRST_ROOM", 8)
    model = model_of("llama")
    expected = Engine(model_of("llama"), policy="off").generate(PROMPT, max_new_tokens=20).ids
    engine = Engine(model, policy=RandomTrees(3))
    assert engine.generate(PROMPT, max_new_tokens=20).ids == expected
    room = engine.target.memory_report()["logits"] // (4 * 61)
    assert [g.ids for g in engine.generate_batch([PROMPT] * 9, max_new_tokens=20)] == [expected] * 9
    assert (room, engine.target.memory_report()["logits"] // (4 * 61)) == (16, 64)
    assert engine.generate(PROMPT, max_new_tokens=20).ids == expected


def test_a_step_of_trees_and_prompts_has_the_numbers_of_two_steps(plain):
    """In any order of rows, with rows that are in no step, and padding."""
    model = model_of("llama", num_hidden_layers=4)
    results = []
    for target, is_one in ((TargetRunner(model, (1,)), False), (Small(model, (1,)), True)):
        cache, other = target.open(3, 64), target.open(1, 64)
        for row in range(3):
            list(target.prefill(cache, row, PROMPT[row:]))
        batch = cache.with_rows([cache.rows[2], cache.rows[0]])
        tree, chunk = random_tree(random.Random(2), [3, 4], 5, 61), Chunk(other.rows[0], PROMPT[:7])
        if is_one:
            trees, (read,) = target.step(batch, tree, [chunk])
            parts = [logits_of(trees), logits_of(read), trees.hidden[trees.index]]
        else:
            trees = target.verify(batch, tree)
            parts = [logits_of(trees), logits_of(target.step(None, None, [chunk])[1][0]), trees.hidden[trees.index]]
        target.commit(batch, [[], []])
        assert other.rows[0].length == 7 and cache.rows[2].length == len(PROMPT) - 1
        results.append(parts)
    torch.testing.assert_close(results[1], results[0], atol=1e-4, rtol=1e-4)


def test_warming_up_captures_a_graph_of_every_size_and_says_so(plain):
    target, told = Small(model_of("llama")), []
    target.progress = told.append
    target.warm_up(16)
    assert sizes_of(target) == {1, 4, 8, 16} and target.num_setups == 4 and not target.pool.is_in_use
    assert {report.words for report in told} >= {f"{size} tokens" for size in (1, 4, 8, 16)}
    cache = target.open(2, 64)
    target.verify(cache, random_tree(random.Random(1), [3, 4], 5, 61))
    assert target.num_setups == 4, "at short contexts nothing is left to capture"


def test_engines_in_several_threads_do_not_write_over_each_others_output(plain, monkeypatch):
    model, wait = model_of("llama"), Small.synchronize
    # Others go on meanwhile.
    monkeypatch.setattr(
        Small, "synchronize", lambda *given: (time.sleep(0.002), wait(*given))
    )  # others go on meanwhile
    engines = [Engine(model, policy=RandomTrees(6, seed=seed)) for seed in range(2)]
    assert (
        graphs_of(engines[0].target) is graphs_of(engines[1].target)
        and engines[0].target.pool is engines[1].target.pool
    )
    prompts = [PROMPT, PROMPT[::-1]]
    expected = [Engine(model, policy="off").generate(prompt, max_new_tokens=24).ids for prompt in prompts]
    decoded = [[], []]

    def decode(number):
        for _ in range(2):
            decoded[number].append(engines[number].generate(prompts[number], max_new_tokens=24).ids)

    threads = [threading.Thread(target=decode, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert decoded == [[ids] * 2 for ids in expected]


@pytest.mark.parametrize("exact", [False, True])
def test_exact_steps_have_no_other_products_than_our_own(exact, plain, monkeypatch):
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    model = model_of("llama", hidden_size=64, intermediate_size=128, vocab_size=128, **heads)
    made, multiply = [], Products.multiply
    monkeypatch.setattr(
        Products, "multiply", lambda *given, **more: (made.append(len(given[1])), multiply(*given, **more))[1]
    )
    target = Small(model, exact=exact)
    cache = target.open(2, 64)
    made.clear()  # of the check on load
    target.verify(cache, tree_of([[4, 5, 6, 7]] * 2, [[0, 0, 1, 2]] * 2))
    num_products = 4 * model.config.num_hidden_layers + 1
    assert set(made) == ({2 * 4} if exact else set()) and len(made) % num_products == 0


def test_inputs_of_overlapping_kernels_are_written_before_a_full_barrier(plain, monkeypatch):
    made = []

    def note(module, name):
        function = getattr(module, name)

        def noting(*given, **more):
            is_usual = name == "add_norm" and given[1] is None  # without a delta: launched in the usual way
            made.append((name, is_usual))
            return function(*given, **more)

        monkeypatch.setattr(module, name, noting)

    for module, name in (
        (layer_kernels, "lay_out"),
        (attention_kernels, "plan"),
        (layer_kernels, "add_norm"),
        (rotary_kernels, "rotate_and_store"),
    ):
        note(module, name)
    target = Small(model_of("llama"))
    cache = target.open(1, 64)
    made.clear()  # of the check on load
    target.verify(cache, tree_of([[4, 5]], [[0, 0]]))
    assert made[:4] == [("lay_out", False), ("plan", False), ("add_norm", True), ("rotate_and_store", False)]
    assert made.count(("plan", False)) == made.count(("lay_out", False))


EXACT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "vocab_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("llama", {"hidden_size": 48, "head_dim": 16}, "its weights' inputs are not multiples of 64"),
        ("gpt_neox", {}, "not of a family"),
    ],
)
def test_a_model_that_cannot_be_exact_is_refused_where_exact_is_asked_for(name, changes, reason, plain):
    with pytest.raises(GraftError, match=f"exact steps were asked for.*{reason}.*drop exact"):
        Small(model_of(name, **changes), exact=True)


def test_a_model_that_is_exact_no_longer_is_refused_until_it_is_again(plain):
    model = model_of("llama", **EXACT)
    engine = Engine(model, policy="off", exact=True)
    expected = engine.generate(PROMPT, max_new_tokens=8).ids
    hook = model.model.layers[0].mlp.register_forward_hook(lambda module, inputs, output: output)
    with pytest.raises(GraftError, match="hook"):
        engine.generate(PROMPT, max_new_tokens=8)
    hook.remove()
    assert engine.generate(PROMPT, max_new_tokens=8).ids == expected


def test_exact_steps_that_cannot_be_captured_are_an_error(plain, monkeypatch):
    engine = Engine(model_of("llama", **EXACT), policy="off", exact=True)
    with monkeypatch.context() as failing:
        failing.setattr(Captures, "capture", raising(RuntimeError("operation not permitted")))
        for _ in range(2):
            with pytest.raises(GraftError, match=r"exact.*operation not permitted"):
                engine.generate(PROMPT, max_new_tokens=8)
    engine.generate(PROMPT, max_new_tokens=8)
    assert engine.target.mode == "captured, exact in any batch"


def raising(error):
    def fail(*given, **options):
        raise error

    return fail


SHORTAGES = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
]


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("shortage", SHORTAGES)
def test_steps_are_captured_when_there_is_memory_again_and_are_the_same_meanwhile(shortage, exact, plain, monkeypatch):
    """A capture that there is no memory for is no reason to run otherwise, nor to try at every step."""
    monkeypatch.setattr(captures, "_RETRY_SECONDS", 1000.0)
    model = model_of("llama", **EXACT)
    expected = Engine(model, policy="off").generate(PROMPT, max_new_tokens=20).ids
    model = model_of("llama", **EXACT)
    engine = Engine(model, policy=RandomTrees(6), exact=exact)
    run = FastLayers.__call__
    num_forwards = []
    monkeypatch.setattr(FastLayers, "__call__", lambda *a, **o: (num_forwards.append(1), run(*a, **o))[1])
    with monkeypatch.context() as short, warnings.catch_warnings():
        warnings.simplefilter("error")
        short.setattr(Captures, "capture", raising(shortage))
        first = engine.generate(PROMPT, max_new_tokens=20)
        assert first.ids == expected and len(num_forwards) == 1 + first.stats.rounds, "by the same layers"
        num_tries = graphs_of(engine.target).num_out_of_memory
        assert 1 <= num_tries <= 2 and "captured" in engine.target.mode, "twice if there was something to give back"
    assert engine.generate(PROMPT, max_new_tokens=20).ids == expected, "in patience"
    assert engine.target.num_setups == num_tries
    graphs_of(engine.target)._no_memory_until = 0.0
    assert engine.generate(PROMPT, max_new_tokens=20).ids == expected and graphs_of(engine.target).num_captured > 2
    assert engine.target.mode.startswith("captured") and engine.target.is_exact == exact


@pytest.mark.parametrize("num_interruptions", [1, 5])
def test_a_capture_that_another_thread_breaks_into_is_made_again(plain, monkeypatch, num_interruptions):
    model = model_of("llama")
    expected = Engine(model, policy="off").generate(PROMPT, max_new_tokens=20).ids
    engine = Engine(model_of("llama"), policy=RandomTrees(6))
    capture, left = Captures.capture, [1] * num_interruptions

    def interrupted(graphs, run):
        if left:
            left.pop()
            raise CaptureError("CUDA error: operation not permitted when stream is capturing")
        return capture(graphs, run)

    monkeypatch.setattr(Captures, "capture", interrupted)
    assert engine.generate(PROMPT, max_new_tokens=20).ids == expected
    assert engine.target.mode.startswith("captured") and graphs_of(engine.target).num_captured > 0


def test_a_forward_that_there_is_no_memory_for_fails_and_changes_nothing(plain, monkeypatch):
    monkeypatch.setattr(captured, "_FIRST_ROOM", 8)
    engine = Engine(model_of("llama"), policy="off")
    expected = engine.generate(PROMPT, max_new_tokens=8).ids
    for place in ("graft.model.cuda_graphs.StepBuffers.__init__", "graft.model.llama.FastLayers.__call__"):
        with monkeypatch.context() as short:
            short.setattr(place, raising(torch.OutOfMemoryError("CUDA out of memory")))
            with pytest.raises(torch.OutOfMemoryError):
                engine.generate_batch([PROMPT, PROMPT[1:], PROMPT[2:]], max_new_tokens=8)
    assert engine.generate(PROMPT, max_new_tokens=8).ids == expected
    assert engine.target.mode == "captured" and not engine.target.pool.is_in_use


@pytest.mark.parametrize("where", ["kernels", "capture", "capture, by another thread"])
def test_steps_fall_back_to_eager_with_one_warning(where, plain, monkeypatch):
    expected = Engine(model_of("llama"), policy="off").generate(PROMPT, max_new_tokens=12).ids
    kind = CaptureError if "thread" in where else RuntimeError
    fail = raising(kind("operation not permitted when stream is capturing\nand more"))
    if "capture" in where:
        monkeypatch.setattr(Captures, "capture", fail)
    else:
        monkeypatch.setattr(layer_kernels, "lay_out", fail)
    engine = Engine(model_of("llama"), policy=RandomTrees(6))  # a model with graphs of its own
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert engine.generate(PROMPT, max_new_tokens=12).ids == expected
        assert engine.generate_batch([PROMPT, PROMPT], max_new_tokens=12)[1].ids == expected
    told = [str(warning.message) for warning in caught if "captured" in str(warning.message)]
    assert len(told) == 1 and "operation not permitted" in told[0] and "\n" not in told[0]
    assert engine.target.mode == f"eager: {kind.__name__}: operation not permitted when stream is capturing"


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_weights_that_move_are_found_again(plain, prefix_cache):
    model = model_of("llama")
    engine = Engine(model, policy="off", prefix_cache=prefix_cache)
    expected = engine.generate(PROMPT, max_new_tokens=8).ids
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    model.lm_head.weight.data.neg_()
    changed = engine.generate(PROMPT, max_new_tokens=8).ids
    assert changed != expected
    model.lm_head.weight.data.neg_()
    assert engine.generate(PROMPT, max_new_tokens=8).ids == expected
    assert why_not(model) is None


@pytest.mark.skipif(DEVICE == "cuda", reason="needs a model off the GPU")
def test_the_command_hands_exact_on(graft_tiny):
    finished = graft_tiny("generate", "hello", "--exact")
    assert finished.status == 2 and "exact steps need a single GPU" in finished.err
