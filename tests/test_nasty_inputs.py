"""Inputs that are wrong, one by one: each is one line that says what, and never a traceback.

On the command line that is exit status 2; in Python a GraftError, which is a ValueError.
"""

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import graft as library
from graft import GraftError, SamplingSettings
from tiny import BYTE_VOCAB, byte_tokenizer, tiny_model

NOWHERE = "/dev/null/nowhere"  # where not even root can write


@pytest.fixture(scope="module")
def model():
    return tiny_model(vocab_size=BYTE_VOCAB, max_position_embeddings=64)


@pytest.fixture(scope="module")
def engine(model):
    return library.load(model, tokenizer=byte_tokenizer())


def quantized():
    """By the first of torch's engines that can: the default one cannot on every processor."""
    before = torch.backends.quantized.engine
    try:
        for engine in [before, *torch.backends.quantized.supported_engines]:
            torch.backends.quantized.engine = engine
            try:
                return torch.ao.quantization.quantize_dynamic(tiny_model(), {torch.nn.Linear})
            except RuntimeError:
                continue
    finally:
        torch.backends.quantized.engine = before
    pytest.skip("none of torch's quantized engines works on this processor")


LOAD = [  # keywords of graft.load, beside a model in memory; words of the error
    ({"model": None}, "model must be a packaged name"),
    ({"model": 5}, "model must be"),
    ({"model": ""}, "unknown model ''"),
    ({"model": "smolm2-135m"}, r"did you mean smollm2-135m\? \(packaged models: "),
    ({"model": "gpt2"}, "unknown model 'gpt2', neither packaged, nor a local folder"),
    ({"model": Path("/nowhere")}, "unknown model '/nowhere'"),
    ({"model": torch.nn.Linear(2, 2)}, "expected a transformers model"),
    ({"model": quantized}, "scales all tokens of a forward together"),
    ({"policy": None}, "unknown policy None"),
    ({"policy": "grafts"}, "did you mean 'graft'"),
    ({"policy": "dense"}, "needs a drafter"),
    ({"budget": "x"}, "budget must be between"),
    ({"budget": 0}, "between 1 and"),
    ({"budget": 2.5}, "budget must be between"),
    ({"draft": 5}, "draft must be"),
    ({"draft": "no such head"}, "nor a local folder, nor a hub id"),
    ({"draft": "early-exit:x"}, "takes a whole number"),
    ({"draft": Path(__file__)}, "is a file"),
    ({"tokenizer": "x"}, "expected a tokenizer"),
    ({"chunk_size": 0}, "chunk_size must be a positive"),
    ({"chunk_size": "all"}, "chunk_size must be a positive"),
    ({"profile": "/nowhere.safetensors"}, "cannot be read as a profile"),
    ({"profile": 7}, "profile must be a path"),
    ({"exact": True}, "exact steps need"),
]
GENERATE = [  # a prompt, options, words of the error
    ("", {}, "the prompt is empty"),
    ([], {}, "the prompt is empty"),
    (None, {}, "not NoneType"),
    (b"bytes", {}, "not bytes"),
    ([1, "x"], {}, "'x' in place of a token id"),
    ([BYTE_VOCAB], {}, "token ids of this model are"),
    ([True], {}, "token ids of this model are"),
    ("ab\ud800c", {}, "half a character at place 2"),
    ([{"role": "user", "content": "ab\ud800c"}], {}, "message 1 .* at place 2"),
    ([{"role": "user", "content": None}], {}, "content of message 1 is text, not None"),
    ([{"role": "user", "content": [{"type": "image_url"}]}], {}, "part 'image_url'"),
    ([{"role": 5, "content": "hi"}], {}, "role of a chat message is text"),
    ([{"role": "user"}], {}, "needs 'role' and 'content'"),
    ({"role": "user", "content": "hi"}, {}, "put a single message into a list"),
    ("hi", {"stop": 5}, "stop must be text"),
    ("hi", {"stop": [None]}, "stop must be text"),
    ("hi", {"max_new_tokens": "9"}, "must be a whole number"),
    ("hi", {"max_new_tokens": 0}, "at least 1"),
    ("hi", {"max_new_tokens": 999}, "at most 62 new tokens"),
    ("hi" * 40, {}, "shorten the prompt"),
    ("hi", {"temperature": float("nan")}, "finite number"),
    ("hi", {"top_p": 0}, "top_p must be above 0"),
    ("hi", {"temprature": 1}, "did you mean 'temperature'"),
    ("hi", {"logit_bias": {999: 1.0}}, "no token 999"),
    ({"input_ids": [[3]]}, {}, "input_ids"),
    ([3, 4.0], {}, "4.0"),
    (torch.tensor([True, False]), {}, "True"),
    (torch.tensor(3), {}, "not one row"),
    (torch.tensor([[3, 4], [5, 6]]), {}, "generate_batch"),
    (["hi", "ho"], {}, "generate_batch"),
    ("hi", {"top_k": -1}, "top_k"),
    ("hi", {"n": 0}, "n must be"),
    ("hi", {"seed": 2**63}, "seed"),
    ("hi", {"seed": 1.5}, "seed"),
    ("hi", {"stop": ""}, "stop strings"),
    ("hi", {"stop_token_ids": 5}, "list"),
    ("hi", {"logit_bias": {5: float("inf")}}, "below infinity"),
    ("hi", {"stop_token_ids": [-1]}, "no token -1"),
    ("hi", {"min_tokens": 300}, "min_tokens"),
    ("hi", {"settings": {"n": 2}}, "settings must be SamplingSettings, not dict"),
]
COMMANDS = [  # words, what is piped in, words of the error
    ("generate --policy grafts", b"hi", "did you mean 'graft'"),
    ("generate --draft nothing/of/it", b"hi", "no drafter at"),
    ("generate --profile /nowhere", b"hi", "cannot be read as a profile"),
    ("generate", b"\xff\xfe", "stdin is not UTF-8"),
    ("generate --dtype fp8 --model MODEL", b"hi", "unknown dtype 'fp8'"),
    ("generate --device warp --model MODEL", b"hi", "cannot be used here"),
    (f"train --prompts PROMPTS --out {__file__}", b"", "cannot write to .*File exists"),
    (f"train --prompts PROMPTS --out {NOWHERE}", b"", "cannot write to"),
    (f"tune --prompts PROMPTS --out {NOWHERE}/profile", b"", "cannot write to"),
    ("tune --prompts PROMPTS --out FOLDER", b"", "it is a folder"),
    ("tune --prompts PROMPTS --limit 0", b"", "limit must be at least 1"),
    (f"bench --out {NOWHERE}", b"", "cannot write to"),
]
GENERATE_OPTIONS = [  # of graft generate, with a model; words of the error
    ("--temperature -1", "temperature must be 0"),
    ("--max-new-tokens 0", "max_new_tokens must be at least 1"),
    ("--logit-bias 5", "--logit-bias takes ID=VALUE such as 42=-1.5, not '5'"),
    ("--logit-bias 9999=1", "the model has no token 9999"),
    ("--logprobs 2", "--logprobs needs --json"),
    ("--show-tree --json", "exclude --json and --n"),
    ("--color-by-origin --n 2", "exclude --json and --n"),
    ("--raw --system kind", "--system needs the chat template"),
    ("--max-new-tokens 2000", "exceed the model's context of 1024"),
]
CHAT_OPTIONS = [  # of graft chat, what is piped in, words of the error
    ("--temperature -1", b"", "temperature must be 0"),
    ("--logit-bias 9999=1", b"hi\n", "the model has no token 9999"),
    ("", b"hi\n\xff\n", "stdin is not UTF-8 text"),
]
BENCH_OPTIONS = [
    ("--methods grft", r"unknown method 'grft': did you mean 'graft'\?"),
    ("--state hot", "unknown state 'hot': known are cold, warm, persistent"),
    ("--state warm", "name the file"),
    ("--prompts missing.jsonl", "cannot read missing.jsonl: No such file"),
    ("--warmup missing.jsonl", "cannot read missing.jsonl: No such file"),
    ("--warmup-limit 3", "--warmup-limit needs --warmup FILE"),
    ("--rows 0", "rows must be at least 1, not 0"),
    ("--repeat 0", "repeat must be at least 1, not 0"),
    ("--limit 0", "limit must be at least 1, not 0"),
    ("--temperature -1", "temperature"),
    ("--max-prompt-tokens 1", "--max-prompt-tokens must be at least 2"),
    ("--budget 500", "budget must be between 1 and"),
    ("--pass-cost 0.1", "--pass-cost needs --budget"),
    ("--pass-cost -1 --budget 5", "pass_cost must be 0 or more"),
]
TRAIN_OPTIONS = [
    ("--kind dspark", "unknown kind 'dspark'"),
    ("--unroll 3 --kind dflash", "--unroll does not apply to --kind dflash"),
    ("--layers 3", "--layers does not apply to --kind eagle3"),
    ("--causal", "--causal does not apply to --kind eagle3"),
    ("--kind dflash --slots sideways", "slots must be in-place or shifted, not 'sideways'"),
    ("--kind dflash --drafts 0", "num_drafts must be at least 1"),
    ("--kind dflash --weighting none", "weighting 'none' is not one of decay, pace"),
    ("--kind dflash --gamma 0", "gamma must be above 0"),
    ("--weight-decay -1", "weight_decay must be at least 0, not -1"),
    ("--warmup-steps -1", "warmup_steps must be at least 0, not -1"),
    ("--kind dflash --ema-decay 1", "ema_decay must be from 0 to below 1"),
    ("--kind dflash --max-file-mib 0", "--max-file-mib must be at least 1"),
    ("--max-seconds 0", "--max-seconds must be above 0"),
    ("--answers there", "give either --prompts or --answers"),
    ("--kind depth-pruned --layers 0", "--layers must be at least 1, not 0"),
    ("--kind depth-pruned --unroll 3", "--unroll does not apply to --kind depth-pruned"),
    ("--kind depth-pruned --taps 3", "--taps does not apply to --kind depth-pruned"),
    ("--kind depth-pruned --max-file-mib 3", "--max-file-mib does not apply to --kind depth-pruned"),
    ("--kind depth-pruned --measured 1", "measured must be at least 2, not 1"),
    ("--kind depth-pruned --steps -1", "steps must be at least 0, not -1"),
    ("--steps 0", "steps must be at least 1, not 0"),
    ("--kind treeflash --measured 9", "--measured does not apply to --kind treeflash"),
]
COMMANDS += [
    *((f"generate hi --model MODEL {options}", b"", words) for options, words in GENERATE_OPTIONS),
    *((f"chat --model MODEL --max-new-tokens 8 {options}", stdin, words) for options, stdin, words in CHAT_OPTIONS),
    *((f"bench --model MODEL --max-prompt-tokens 64 --out FOLDER/out {o}", b"", words) for o, words in BENCH_OPTIONS),
    *((f"train --prompts PROMPTS --out FOLDER/out {options}", b"", words) for options, words in TRAIN_OPTIONS),
]


@pytest.mark.filterwarnings("ignore")  # torch's own way to quantize is an old one
@pytest.mark.parametrize(("given", "words"), LOAD, ids=[words for _, words in LOAD])
def test_load_says_in_one_line_what_is_wrong(model, given, words):
    given = {"model": model, **given}
    if given["model"] is quantized:
        given["model"] = quantized()
    with pytest.raises(GraftError, match=words) as caught:
        library.load(**given)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("prompt", "options", "words"), GENERATE, ids=[words for *_, words in GENERATE])
def test_generate_says_in_one_line_what_is_wrong(engine, prompt, options, words):
    with pytest.raises(GraftError, match=words) as caught:
        engine.generate(prompt, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("line", "stdin", "words"), COMMANDS, ids=[line for line, *_ in COMMANDS])
def test_a_command_says_in_one_line_what_is_wrong_before_it_loads_the_default_model(
    graft, model_folder, tmp_path, monkeypatch, line, stdin, words
):
    def fetched(*args):
        raise AssertionError("the model is loaded first")

    monkeypatch.setattr("graft.hub.load.pull", fetched)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "hi"}\n')
    places = {"MODEL": model_folder, "PROMPTS": str(tmp_path / "prompts.jsonl"), "FOLDER": str(tmp_path)}
    for name, place in places.items():
        line = line.replace(name, place)
    result = graft(*line.split(), stdin=stdin)
    assert result.status == 2 and result.out == ""
    assert result.err.startswith("error: ") and result.err.count("\n") == 1
    assert re.search(words, result.err)
    assert not (tmp_path / "out" / "results.json").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full to stand for a full disk")
def test_a_full_disk_behind_stdout_is_one_line():
    command = [sys.executable, "-c", "from graft.cli import main; main()", "pull", "--list"]
    with open("/dev/full", "w") as full:
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=os.environ)
    assert (result.returncode, result.stderr) == (2, "error: cannot write: No space left on device\n")


def test_a_stdout_without_utf8_shows_letters_that_it_lacks_by_number(model_folder, monkeypatch):
    from graft.cli import main

    screen = io.BytesIO()
    words = ["graft", "generate", "hi", "--model", model_folder, "--max-new-tokens", "24", "--ignore-eos"]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(screen, encoding="ascii"))
    with pytest.raises(SystemExit) as caught:
        main()
    assert not caught.value.code
    assert b"\\u" in screen.getvalue() or b"\\x" in screen.getvalue()


def test_unusual_but_meaningful_inputs_are_accepted(engine, model, tmp_path, model_folder):
    parts = [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}]
    whole = engine.generate(engine.user_message("hi"), max_new_tokens=6)
    assert engine.generate(parts, max_new_tokens=6).ids == whole.ids
    assert engine.generate("hi", settings=SamplingSettings(max_new_tokens=9), max_new_tokens=4).stats.tokens == 4
    assert len(engine.generate("hi", ignore_eos=True).ids) == 62  # the room there is
    assert repr(engine) == "Engine(LlamaForCausalLM on cpu in float32, policy='graft', drafter=None)"
    loaded = library.load(Path(model_folder), dtype=torch.bfloat16, draft=None, device=torch.device("cpu"))
    assert (
        loaded.target.model.dtype == library.load(model_folder, dtype="bfloat16").target.model.dtype == torch.bfloat16
    )
