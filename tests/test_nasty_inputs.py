"""Inputs that are wrong, one by one: each is one line that says what, and never a traceback.

On the command line that is exit status 2; in Python a GraftError, which is a ValueError.
"""

import io
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import graft as library
from graft import GraftError, SamplingSettings
from graft.hub.registry import DEFAULT_MODEL
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
CONTEXT = "max_new_tokens=99999 exceed the model's context of 1024"
# Command lines, and words of the errors, of which there may be none. MODEL, PROMPTS, TWO of them, FOLDER, EMPTY
# and OUT are paths, and PORT is in use.
COMMANDS = {
    "--help": "",
    "serve --max-rows 0": "max_rows must be at least 1, not 0",
    "serve --log-format xml": "log_format: Input should be 'text' or 'json'",
    "serve --port PORT": "port PORT of 127.0.0.1 is in use",
    "serve --host 192.0.2.1": "cannot listen on 192.0.2.1",
    "bench serve --requests 0": "requests must be at least 1",
    "bench serve --prompts /nope": "cannot read /nope",
    "bench serve --url http://127.0.0.1:9 --requests 1": "cannot ask http://127.0.0.1:9",
    "bench": "name a folder for the results with --out",
    f"bench --out {NOWHERE}": "cannot write to",
    "generate x --draft early-exit:x": "takes a whole number, not 'x'",
    "generate x --model MODEL --draft early-exit:9": "must be between 1 and 2",
    "generate x --policy grafts": "did you mean 'graft'",
    "generate x --profile /nope": "/nope cannot be read as a profile",
    "generate x --profile PROMPTS": "cannot be read as a profile",
    "generate x --model owner/name": "the hub cannot be reached",
    "generate x --draft owner/name": "the hub cannot be reached",
    "chat --max-new-tokens 0": "max_new_tokens must be at least 1, not 0",
    "chat --temperature -1": "temperature must be 0",
    "check --prompts /nope": "cannot read /nope: No such file",
    "check --data /nope": "cannot read /nope",  # the older name
    "tune --prompts /nope": "cannot read /nope",
    "tune --prompts TWO": "needs at least 5 different prompts",
    "tune --prompts PROMPTS --limit 0": "limit must be at least 1",
    f"tune --prompts PROMPTS --out {NOWHERE}/profile": "cannot write to",
    "tune --prompts PROMPTS --out FOLDER": "it is a folder",
    "train --out OUT --prompts /nope": "cannot read /nope",
    f"train --prompts PROMPTS --out {__file__}": f"cannot write to {__file__}: File exists",
    f"train --prompts PROMPTS --out {NOWHERE}": "cannot write to",
    "train --out OUT --answers nope": "there is no folder nope",
    "drafters nope": "unknown model 'nope'",
    "drafters --dtype fp8": "unknown dtype 'fp8'",
    "drafters": "",  # of a model that is pulled, while nothing has been measured
    "load-check nope": "no drafter at 'nope': it is neither packaged, nor a local folder, nor a hub id",
    "load-check owner/name": "the hub cannot be reached",
    "load-check EMPTY": "config.json is missing",
    "load-check smollm2-135m --model nope": "unknown model 'nope'",
    "export-head nope OUT": "no drafter at 'nope'",
    "export-head smollm2-135m OUT --model nope": "unknown model 'nope'",
    "export-head smollm2-135m OUT --results /nope": "/nope cannot be read",
    "export-head smollm2-135m FOLDER": "is not empty: choose a new folder",
    "export-hub FOLDER": "is not empty: choose a new folder",
    "export-hub EMPTY/hub": "",
    "pull nope": "'nope' is not a packaged model",
    "doctor --prompts /nope": "cannot read /nope",
    "doctor --prompts 6": "--prompts names a file; --limit is how many",
    "doctor --limit 0": "limit must be at least 1",
    "doctor --model nope": "",  # it answers on stdout
    "doctor --draft nope": "",
}
OPTIONS = {  # by the beginning of a command line, options and words of the errors
    "generate hi --model MODEL": {
        "--temperature -1": "temperature must be 0",
        "--max-new-tokens 0": "max_new_tokens must be at least 1",
        "--logit-bias 5": "--logit-bias takes ID=VALUE such as 42=-1.5, not '5'",
        "--logprobs 2": "--logprobs needs --json",
        "--show-tree --json": "exclude --json and --n",
        "--color-by-origin --n 2": "exclude --json and --n",
        "--raw --system kind": "--system needs the chat template",
    },
    "bench --model MODEL --max-prompt-tokens 64 --out OUT": {
        "--methods grft": "unknown method 'grft': did you mean 'graft'?",
        "--methods hf --rows 2": "'hf' decodes one prompt at a time",
        "--methods hf-assisted": "name one with --assistant",
        "--assistant nope": "unknown model 'nope'",
        "--as-cost-of nope": "unknown shape 'nope'",
        "--state hot": "unknown state 'hot': known are cold, warm, persistent",
        "--state warm": "name the file",
        "--prompts missing.jsonl": "cannot read missing.jsonl: No such file",
        "--warmup missing.jsonl": "cannot read missing.jsonl: No such file",
        "--warmup-limit 3": "--warmup-limit needs --warmup FILE",
        "--rows 0": "rows must be at least 1, not 0",
        "--repeat 0": "repeat must be at least 1, not 0",
        "--limit 0": "limit must be at least 1, not 0",
        "--temperature -1": "temperature must be 0 (greedy) or more",
        "--max-prompt-tokens 1": "--max-prompt-tokens must be at least 2",
        "--budget 500": "budget must be between 1 and",
        "--pass-cost 0.1": "--pass-cost needs --budget",
        "--pass-cost -1 --budget 5": "pass_cost must be 0 or more",
    },
    "train --prompts PROMPTS --out OUT": {
        "--kind dspark": "unknown kind 'dspark'",
        "--rows 0": "num_rows must be at least 1, not 0",
        "--start-from nope": "no drafter at 'nope'",
        "--unroll 3 --kind dflash": "--unroll does not apply to --kind dflash",
        "--layers 3": "--layers does not apply to --kind eagle3",
        "--causal": "--causal does not apply to --kind eagle3",
        "--kind dflash --slots sideways": "slots must be in-place or shifted, not 'sideways'",
        "--kind dflash --drafts 0": "num_drafts must be at least 1",
        "--kind dflash --weighting none": "weighting 'none' is not one of decay, pace",
        "--kind dflash --gamma 0": "gamma must be above 0",
        "--weight-decay -1": "weight_decay must be at least 0, not -1",
        "--warmup-steps -1": "warmup_steps must be at least 0, not -1",
        "--kind dflash --ema-decay 1": "ema_decay must be from 0 to below 1",
        "--kind dflash --max-file-mib 0": "--max-file-mib must be at least 1",
        "--max-seconds 0": "--max-seconds must be above 0",
        "--answers there": "give either --prompts or --answers",
        "--kind depth-pruned --layers 0": "--layers must be at least 1, not 0",
        "--kind depth-pruned --unroll 3": "--unroll does not apply to --kind depth-pruned",
        "--kind depth-pruned --taps 3": "--taps does not apply to --kind depth-pruned",
        "--kind depth-pruned --max-file-mib 3": "--max-file-mib does not apply to --kind depth-pruned",
        "--kind depth-pruned --measured 1": "measured must be at least 2, not 1",
        "--kind depth-pruned --steps -1": "steps must be at least 0, not -1",
        "--steps 0": "steps must be at least 1, not 0",
        "--kind treeflash --measured 9": "--measured does not apply to --kind treeflash",
    },
}
COMMANDS |= {f"{line} {options}": words for line, known in OPTIONS.items() for options, words in known.items()}
LOADING = {  # by verb that loads a model, what else it needs
    **{"generate": "x", "chat": "", "serve": "", "demo": "", "check": "--prompts PROMPTS", "tune": "--prompts PROMPTS"},
    **{"train": "--out OUT --prompts PROMPTS", "bench": "--out OUT"},
}
for verb, needed in LOADING.items():
    line = f"{verb} {needed}"
    COMMANDS |= {
        f"{line} --model nope": "unknown model 'nope'",
        f"{line} --model EMPTY": "config.json is missing",
        f"{line} --device warp": "device 'warp' cannot be used here",
        f"{line} --dtype fp8": "unknown dtype 'fp8'",
    }
    if verb not in ("demo", "train"):
        COMMANDS[f"{line} --draft nope"] = "no drafter at 'nope'"
    if verb not in ("demo", "train", "bench", "tune"):
        COMMANDS[f"{line} --policy nope"] = "unknown policy 'nope'"
        COMMANDS[f"{line} --budget 900"] = "budget must be between 1 and 127"
    if verb not in ("demo", "serve"):
        COMMANDS[f"{line} --max-new-tokens 99999 --model MODEL"] = CONTEXT
# Runs commands one after the other in one process, and prints what each wrote, its status, and whether it needed torch.
RUN = """
import contextlib, io, json, sys
from graft.cli import main
for words in json.loads(sys.argv[1]):
    sys.argv = ["graft", *words]
    out, heard, status = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stderr(heard), contextlib.redirect_stdout(out):
        try:
            main()
        except SystemExit as end:
            status = end.code
    print(json.dumps([heard.getvalue(), out.getvalue(), status, "torch" in sys.modules]))
"""
LATER = [  # words, what is piped in, words of the error: what only the model or the input can tell
    ("generate", b"\xff\xfe", "stdin is not UTF-8"),
    ("generate hi --logit-bias 9999=1", b"", "the model has no token 9999"),
    ("chat --max-new-tokens 8 --logit-bias 9999=1", b"hi\n", "the model has no token 9999"),
    ("chat --max-new-tokens 8", b"hi\n\xff\n", "stdin is not UTF-8 text"),
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


def test_help_and_wrong_arguments_of_every_verb_are_answered_in_one_line_without_torch(tmp_path, model_folder):
    (tmp_path / "empty").mkdir()
    places = {"MODEL": model_folder, "FOLDER": str(tmp_path), "EMPTY": str(tmp_path / "empty"), "OUT": "out"}
    for name, count in (("PROMPTS", 5), ("TWO", 2)):
        places[name] = str(tmp_path / f"{name}.jsonl")
        Path(places[name]).write_text("".join(f'{{"prompt": "{n}"}}\n' for n in range(count)))
    (tmp_path / "models" / DEFAULT_MODEL).mkdir(parents=True)
    environment = {**os.environ, "GRAFT_HOME": str(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:9"}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        places["PORT"] = str(taken.getsockname()[1])

        def placed(line):
            return re.sub("|".join(places), lambda found: places[found[0]], line)

        lines = json.dumps([placed(line).split() for line in COMMANDS])
        given = [sys.executable, "-c", RUN, lines]
        finished = subprocess.run(given, capture_output=True, text=True, env=environment, cwd=tmp_path)
    answers = [json.loads(line) for line in finished.stdout.splitlines()]
    assert len(answers) == len(COMMANDS), finished.stderr
    for line, (error, out, status, needed_torch) in zip(COMMANDS, answers, strict=True):
        expected = placed(COMMANDS[line])
        assert expected in error and not needed_torch, (line, error)
        if expected:
            assert (error.startswith("error: "), error.count("\n"), out, status) == (True, 1, "", 2), (line, error, out)
    assert not (tmp_path / "out" / "results.json").exists()


@pytest.mark.parametrize(("line", "stdin", "words"), LATER)
def test_a_command_says_in_one_line_what_is_wrong_with_its_input(graft, model_folder, line, stdin, words):
    result = graft(*line.split(), "--model", model_folder, stdin=stdin)
    assert (
        (result.status, result.err.count("\n")) == (2, 1) and result.err.startswith("error: ") and words in result.err
    )


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
