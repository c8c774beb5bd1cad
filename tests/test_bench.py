"""`graft bench`: methods take turns, states do not leak, all methods are counted alike, and results are written."""

import csv
import inspect
import json
import re
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import get_args
from xml.etree import ElementTree

import pytest
import torch

from conftest import Finished
from graft import Engine, GraftError, SamplingSettings
from graft.bench.baselines import ABLATIONS, BASELINES
from graft.bench.methods import Answer, Method, PolicyMethod
from graft.bench.peers import make_peer
from graft.bench.report import notes_on, ticks
from graft.bench.results import Summary
from graft.bench.runner import run, variants
from graft.bench.runs import make_methods
from graft.bench.settings import PEERS, BenchSettings, check_states
from graft.bench.tasks import BUILT_IN, Question, built_in_tasks, cut, questions, without_repeats
from graft.checking.reference import transformers_answer
from graft.cli.bench import DECODING
from graft.cli.bench import bench as bench_command
from graft.drafters.drafter import TreeSettings
from graft.drafters.eagle3.drafter import Eagle3Drafter
from graft.engine.flight import Flight
from graft.request.stats import Stats
from graft.spec_decode.policies import PolicySettings
from heads import SMALL_TREE, make_head
from tiny import ARCHITECTURES, BYTE_VOCAB, byte_tokenizer, tiny_model

Run = Callable[..., Finished]
PROMPT = [3, 17, 42, 9, 9, 30, 5, 21, 3, 17, 42]
SIXTEEN = SamplingSettings(max_new_tokens=16, seed=0)
PLOTS = {
    "speed-against-accepted-length": "svg/circle",
    "speed-by-task": "table",
    "acceptance-by-depth": "svg/polyline",
    "acceptance-by-source": "table",
    "time-by-phase": "table",
}


# test_policies.py asks the same of the policies by themselves.
OWN = sorted(("graft", *ABLATIONS)) + [
    pytest.param(name, marks=pytest.mark.slow) for name in sorted(("off", *BASELINES))
]


def test_help_names_every_method() -> None:
    (option,) = inspect.signature(bench_command, eval_str=True).parameters["methods"].annotation.__metadata__
    named = option.help.removeprefix("Comma-separated: ").removesuffix(".").split(", ")
    assert named == ["off", *BASELINES, "graft", "graft-without-...", *PEERS]


class Learner(Method):
    """Learns the prompts it is asked; an answer tells how many it knew before."""

    def __init__(self, name: str = "learner", log: list[tuple[str, int]] | None = None, learns: bool = True) -> None:
        self.name, self.log, self.learns, self.known = name, log if log is not None else [], learns, 0

    def answer(self, prompts, settings):
        ids = [self.known] * settings.max_new_tokens
        self.log += [(self.name, prompt[0]) for prompt in prompts]
        self.known += len(prompts) if self.learns else 0
        return [
            Answer(
                ids, Stats(rounds=8, tokens=len(ids), accepted=len(ids) - 8, decode_seconds=0.5, prefill_seconds=0.1)
            )
            for _ in prompts
        ]

    def state(self):
        return {"known": torch.tensor(self.known)} if self.learns and self.known else {}

    def restore(self, state):
        self.known = int(state.get("known", 0))


def asked(count: int, first: int = 0) -> list[Question]:
    return [Question(f"q{i}", [i]) for i in range(first, first + count)]


def known_before(method: Method, states: list[str], tasks: dict[str, int], warm_up: int = 0, **options) -> list[int]:
    """What a method knew before each of its answers, in order."""
    settings = BenchSettings(max_new_tokens=16, **options)
    trial = Question("trial", [0])
    compared = variants([method], states, asked(warm_up), trial, settings)
    given = {task: asked(count) for task, count in tasks.items()}
    return [s.answer.ids[0] for task in run(compared, given, settings) for result in task for s in result.samples]


# Turns


def test_methods_take_turns_prompt_by_prompt_and_each_begins_in_its_turn():
    log: list[tuple[str, int]] = []
    methods = [Learner(name, log) for name in "abc"]
    compared = variants(methods, ["cold"], [], Question("trial", [99]), BenchSettings())
    log.clear()
    list(run(compared, {"task": asked(4)}, BenchSettings()))
    assert [name for name, _ in log] == list("abcbcacababc")
    assert [prompt for _, prompt in log] == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3


@pytest.mark.parametrize("captures", [False, True])
def test_captures_for_longer_texts_happen_before_the_clock_runs(captures: bool):
    class Capturing(Learner):
        num_setups = int(captures)

    method = Capturing()
    compared = variants([method], ["persistent"], [], Question("trial", [0]), BenchSettings())
    method.log.clear()
    tasks = {
        "long": [Question("a", [1]), Question("b", [2, 2, 2])],
        "short": [Question("c", [3, 3])],
        "longer": [Question("d", [4] * 4)],
    }
    known = [
        s.answer.ids[0] for task in run(compared, tasks, BenchSettings()) for result in task for s in result.samples
    ]
    assert [prompt for _, prompt in method.log] == ([2, 1, 2, 3, 4, 4] if captures else [1, 2, 3, 4])
    assert known == [0, 1, 2, 3], "nothing was learned from what did not count"


def test_captures_while_answers_are_timed_are_noted():
    class Capturing(Learner):
        num_setups = 1

        def answer(self, prompts, settings):
            self.num_setups += prompts[0][0] == 2
            return super().answer(prompts, settings)

    results = summary_of(Capturing("slow"), Learner("off"), tasks={"task": 3})
    assert [run.setups for run in results.averages] == [1, 0]
    assert notes_on(results)[0] == "CUDA graphs were captured while answers were timed: slow (cold) 1."


def test_rows_are_answered_together_and_share_the_time_of_their_batch():
    compared = variants([Learner()], ["cold"], [], Question("trial", [0]), BenchSettings())
    (task,) = run(compared, {"task": asked(5)}, BenchSettings(rows=2))
    seconds = [sample.decode_seconds for sample in task[0].samples]
    assert seconds == [0.25, 0.25, 0.25, 0.25, 0.5]


# States


def test_persistent_starts_warm_and_keeps_learning_across_tasks():
    assert known_before(Learner(), ["persistent"], {"one": 2, "two": 2}, warm_up=4) == [4, 5, 6, 7]


def test_repeating_a_task_does_not_let_a_method_learn_its_own_answers():
    assert known_before(Learner(), ["persistent"], {"one": 2, "two": 1}, repeat=2) == [0, 1, 0, 1, 2, 2]


def test_states_of_one_method_do_not_touch_each_other():
    settings = BenchSettings()
    compared = variants([Learner()], ["cold", "warm", "persistent"], asked(4), Question("trial", [0]), settings)
    (task,) = run(compared, {"task": asked(3)}, settings)
    known = {result.variant.state: [s.answer.ids[0] for s in result.samples] for result in task}
    assert known == {"cold": [0, 0, 0], "warm": [4, 4, 4], "persistent": [4, 5, 6]}


def test_method_that_learns_nothing_runs_once_whatever_states_are_asked_for():
    compared = variants([Learner(learns=False)], ["cold", "persistent"], [], Question("t", [0]), BenchSettings())
    assert [variant.state for variant in compared] == ["none"]


@pytest.mark.parametrize("name", OWN)
def test_policy_answers_as_plain_decoding_does_and_is_cold_again_once_it_is_restored(name: str):
    """What a policy says it has learned must be all it has learned."""
    model = tiny_model()
    drafter = Eagle3Drafter(make_head(model), SMALL_TREE)
    (method,) = make_methods([name], model, drafter, PolicySettings(12))
    cold = method.state()
    answer = method.answer([PROMPT], SIXTEEN)[0]
    assert answer.ids == Engine(model, policy="off").generate(PROMPT, **vars(SIXTEEN)).ids
    first = answer.stats
    method.answer([[5, 4, 3, 2, 1]], SIXTEEN)
    method.restore(cold)
    again = method.answer([PROMPT], SIXTEEN)[0].stats
    assert (again.rounds, again.nodes) == (first.rounds, first.nodes)
    assert again.accepted_by_depth == first.accepted_by_depth


# Methods and peers


QUICK_PEERS = [(name, each) for name in PEERS for each in ("gpt_neox", "llama", "qwen2_window")]
OTHER_PEERS = sorted({(name, each) for name in PEERS for each in ARCHITECTURES} - set(QUICK_PEERS))


@pytest.mark.parametrize(
    ("name", "architecture"), [*QUICK_PEERS, *(pytest.param(*peer, marks=pytest.mark.slow) for peer in OTHER_PEERS)]
)
def test_peer_gives_the_text_of_transformers_and_is_counted_like_ours(name: str, architecture: str):
    model = tiny_model(architecture)
    found = make_peer(name, model, assistant=tiny_model(architecture, seed=1)).answer([PROMPT], SIXTEEN)[0]
    ours = PolicyMethod("off", model).answer([PROMPT], SIXTEEN)[0]
    assert found.ids == ours.ids == transformers_answer(Engine(model, policy="off"), PROMPT, SIXTEEN)
    assert found.stats.tokens == ours.stats.tokens == 16
    assert found.stats.accepted + found.stats.rounds in (16, 17)  # the last round may be cut short
    if name == "hf":
        assert (found.stats.rounds, found.stats.nodes) == (ours.stats.rounds, ours.stats.nodes) == (16, 0)


@pytest.mark.parametrize("name", ["hf", "hf-lookup", "hf-assisted"])
def test_peer_prefills_all_but_the_last_token_of_the_prompt_apart(name: str):
    """As ours does: then decode time is of the same forwards."""
    model = tiny_model()
    widths: list[int] = []
    hook = model.model.register_forward_pre_hook(
        lambda m, a, k: widths.append(k["input_ids"].shape[1]), with_kwargs=True
    )
    stats = make_peer(name, model, assistant=tiny_model(seed=1)).answer([PROMPT], SIXTEEN)[0].stats
    hook.remove()
    assert widths[0] == len(PROMPT) - 1
    assert len(widths) == 1 + stats.rounds
    assert sum(widths[1:]) == stats.nodes + stats.rounds
    assert stats.prefill_seconds > 0
    assert stats.decode_seconds == pytest.approx(sum(stats.seconds_by_phase.values()))


def test_peer_stops_where_ours_stops():
    model = tiny_model()
    plain = PolicyMethod("off", model).answer([PROMPT], SIXTEEN)[0].ids
    ending = SamplingSettings(max_new_tokens=16, seed=0, stop_token_ids=(plain[5],))
    expected = PolicyMethod("off", model).answer([PROMPT], ending)[0]
    for name in ("hf", "hf-lookup"):
        found = make_peer(name, model).answer([PROMPT], ending)[0]
        assert (found.ids, found.stats.tokens) == (expected.ids, expected.stats.tokens)


@pytest.mark.parametrize("truncation", [{"min_p": 1.0}, {"top_p": 1e-6}])
def test_truncation_that_leaves_one_token_makes_all_methods_greedy(truncation: dict[str, float]):
    methods = make_peer("hf", tiny_model()), PolicyMethod("off", tiny_model())
    sampled = BenchSettings(max_new_tokens=16, temperature=2.0, seed=1, **truncation).sampling(())
    greedy, *texts = [method.answer([PROMPT], settings)[0].ids for settings in (SIXTEEN, sampled) for method in methods]
    assert all(text == greedy for text in texts)


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        (["of"], {}, "unknown method 'of': did you mean 'off'?"),
        (["off", "off"], {}, "named twice"),
        ([], {}, "no method is named"),
        (["hf-assisted"], {}, "--assistant"),
        (["off", "hf"], {"rows": 2}, "one prompt at a time"),
        (["dense"], {}, "needs a drafter"),
    ],
)
def test_line_up_that_cannot_be_says_why(names, options, message):
    with pytest.raises(GraftError, match=re.escape(message)):
        make_methods(names, tiny_model(), **options)


def test_assistant_of_another_vocabulary_is_refused():
    with pytest.raises(GraftError, match="the assistant has 50 tokens and the model 61"):
        make_peer("hf-assisted", tiny_model(), tiny_model(vocab_size=50))


@pytest.mark.parametrize(
    ("states", "message"),
    [(["cold", "cold"], "named twice"), (["warm"], "--warmup FILE")],
)
def test_state_that_cannot_be_says_why(states, message):
    with pytest.raises(GraftError, match=message):
        check_states(states, has_warm_up=False)


# Ablations


@pytest.mark.parametrize("budget", [None, 12])
def test_a_head_without_8_bits_drafts_the_same_tree(budget):
    model = tiny_model()
    drafter = Eagle3Drafter(make_head(model), SMALL_TREE)
    usual, without = (
        method._engine.drafter.settings
        for method in make_methods(["graft", "graft-without-8-bits"], model, drafter, PolicySettings(budget))
    )
    assert usual.eight_bits and without == replace(usual, eight_bits=False)
    assert (usual == SMALL_TREE) == (budget is not None)


def ablated(what: str, pass_cost: float = 0.03, depth: int = SMALL_TREE.depth) -> PolicyMethod:
    model = tiny_model(num_hidden_layers=6)
    drafter = Eagle3Drafter(make_head(model), TreeSettings(depth=depth, topk=3, total_token=9))
    (method,) = make_methods([f"graft{what}"], model, drafter, PolicySettings(12, pass_cost))
    assert isinstance(method, PolicyMethod)
    return method


@pytest.mark.parametrize(
    ("what", "missing"),
    [
        ("", set()),
        ("-without-suffix", {"suffix", "past"}),
        ("-without-ngrams", {"bigram", "trigram"}),
        ("-without-adjacency", {"adjacency"}),
        ("-without-recall", {"bigram", "trigram", "adjacency"}),
    ],
)
def test_ablation_leaves_out_what_it_says_and_nothing_else(what: str, missing: set[str]):
    method = ablated(what)
    answers = [method.answer([PROMPT], SIXTEEN)[0] for _ in range(2)]
    proposed = {source for answer in answers for source in answer.stats.proposed_by_source}
    learned = {
        key.split("/")[0] for key, part in method.state().items() if key.endswith(("rows", "tokens")) and len(part)
    }
    assert not missing & (proposed | learned)
    assert {"drafted", "suffix"} - missing <= proposed
    assert {"past", "trigram", "bigram", "adjacency"} - missing <= learned


def test_without_past_calibration_or_merging_nothing_of_it_happens(monkeypatch):
    kept, changed, nodes, trees, tree_of = {}, {}, {}, [], Flight.tree
    monkeypatch.setattr(Flight, "tree", lambda flight: trees.append(tree_of(flight)) or trees[-1])
    for what in ("", "-without-past", "-without-calibration", "-without-merging"):
        method = ablated(what)
        before = method.state()
        trees.clear()
        method.answer([PROMPT], SIXTEEN)
        after = method.state()
        kept[what] = len(after.get("past/tokens", ()))
        changed[what] = any(not torch.equal(after[k], before[k]) for k in after if k.startswith("calibration/"))
        nodes[what] = sum(int(tree.num_nodes[0]) for tree in trees)
    assert (kept[""], kept["-without-past"]) == (len(PROMPT) + 16, 0)
    assert (changed[""], changed["-without-calibration"]) == (True, False)
    assert nodes["-without-merging"] < nodes[""], "equal proposals take several places"


def test_without_pruning_every_pass_is_made_however_dear():
    dear = SamplingSettings(max_new_tokens=2, seed=0)  # one round drafts, and its depth is not cut by the answer's end
    for what, passes in (("", 0), ("-without-pruning", 1)):
        assert ablated(what, pass_cost=50.0).answer([PROMPT], dear)[0].stats.draft_passes == passes


# Prompts


def test_built_in_set_is_six_tasks_of_ten_different_prompts():
    tasks = built_in_tasks()
    assert [task.name for task in tasks] == list(BUILT_IN)
    assert [len(task.prompts) for task in tasks] == [10] * 6
    assert len({prompt.text for task in tasks for prompt in task.prompts}) == 60
    assert len({prompt.id for task in tasks for prompt in task.prompts}) == 60


def test_long_prompt_is_cut_in_the_middle():
    assert cut(list(range(10)), 5) == [0, 1, 2, 8, 9]
    assert cut(list(range(5)), 5) == cut(list(range(5)), None) == list(range(5))


def test_prompt_that_does_not_fit_is_named_with_what_to_do():
    engine = Engine(tiny_model(vocab_size=BYTE_VOCAB), byte_tokenizer(), policy="off")
    task = built_in_tasks(limit=1)[2]
    with pytest.raises(GraftError, match=r"summary, prompt summary-1: .* --max-prompt-tokens"):
        questions(task, engine, max_new_tokens=16)
    assert [len(q.ids) for q in questions(task, engine, 16, max_prompt_tokens=240)] == [240]


# Numbers


def summary_of(*methods: Method, tasks: dict[str, int], **options):
    settings = BenchSettings(max_new_tokens=16, **options)
    summary = Summary(settings.sampling(()), settings.rows)
    compared = variants(methods, ["cold"], [], Question("trial", [0]), settings)
    for task in run(compared, {name: asked(count) for name, count in tasks.items()}, settings):
        summary.add(task)
    return summary.results({}, {})


class Timed(Learner):
    """Takes the given seconds for an answer, by its first token; never the same text twice."""

    def __init__(self, name: str, seconds: list[float], differs: bool = False) -> None:
        super().__init__(name, learns=False)
        self.seconds, self.differs = seconds, differs

    def answer(self, prompts, settings):
        ids = [1 if self.differs and prompts[0][0] == 1 else 0] * 16
        stats = Stats(rounds=4, tokens=16, accepted=12, draft_passes=8, decode_seconds=self.seconds[prompts[0][0]])
        return [Answer(ids, stats)]


def test_speed_is_all_tokens_over_all_seconds_and_an_average_gives_every_task_the_same_weight():
    methods = (Timed("off", [1.0, 3.0]), Timed("fast", [1.0, 1.0]), Timed("wrong", [1.0, 1.0], differs=True))
    results = summary_of(*methods, tasks={"one": 2, "two": 1})
    off, fast, wrong = results.runs[:3]
    assert off.tokens_per_second == pytest.approx(32 / 4)
    assert fast.mean_accepted == pytest.approx(1 + 24 / 8)
    assert fast.draft_passes_per_round == pytest.approx(2.0)
    assert fast.modelled_speed == pytest.approx(4 / 1.06)
    assert [run.speedup for run in results.runs if run.method == "fast"] == pytest.approx([2.0, 1.0]), "over off"
    assert results.averages[1].speedup == pytest.approx(1.5)
    assert results.averages[1].tokens == 48
    assert [run.differ for run in (off, fast, wrong)] == [0, 0, 1], "texts that are not those of off"


def test_interval_holds_the_rate_and_is_the_same_again():
    def results():
        return summary_of(Timed("off", [1.0] * 6), Timed("fast", [0.3, 0.9, 0.5, 0.4, 0.6, 0.8]), tasks={"one": 6})

    fast, again = results().runs[1], results().runs[1]
    low, high = fast.confidence["speedup"]
    assert low < fast.speedup < high
    assert fast.confidence == again.confidence
    assert summary_of(Timed("off", [1.0]), tasks={"one": 1}).runs[0].confidence == {}


class Uneven(Timed):
    """Takes other seconds in every turn."""

    def __init__(self, name: str, seconds: list[float]) -> None:
        super().__init__(name, seconds)
        self.calls = 0

    def answer(self, prompts, settings):
        (answer,) = super().answer([[0]], settings)
        answer.stats.decode_seconds = self.seconds[self.calls % len(self.seconds)]
        self.calls += 1
        return [answer]


def test_turns_that_differ_widen_the_interval_and_are_the_noise_of_plain_decoding():
    def results(*plain: float):  # the first is for the trial
        methods = (Uneven("off", [1.0, *plain]), Timed("fast", [0.5]))
        return summary_of(*methods, tasks={"one": 1}, repeat=3)

    quiet, noisy = results(1.0, 1.0, 1.0), results(0.5, 1.0, 1.5)
    assert quiet.runs[1].confidence["speedup"] == pytest.approx((2.0, 2.0))
    low, high = noisy.runs[1].confidence["speedup"]
    assert noisy.runs[1].speedup == pytest.approx(2.0) and low < 1.5 and high > 2.5
    assert quiet.environment["plain_noise"] == 0
    assert noisy.environment["plain_noise"] == pytest.approx(0.5)
    assert notes_on(noisy) == [
        "No verdict on speeds: plain decoding varied by ±50% from turn to turn, so the machine was too busy."
    ]
    once = summary_of(Timed("off", [1.0] * 2), tasks={"one": 2})
    assert once.environment["plain_noise"] is None
    assert notes_on(once) == [
        "Each answer was timed once, so the machine's noise is not known: --repeat 3 measures it."
    ]


def test_prompts_are_asked_once_because_a_repeated_one_would_be_recalled():
    first, second, third = (Question(name, [number]) for number, name in enumerate("abc"))
    again = Question("again", [0])
    tasks, lessons, count = without_repeats({"one": [first, again], "two": [again, second]}, [second, third])
    assert tasks == {"one": [first], "two": [second]} and lessons == [third] and count == 3
    with pytest.raises(GraftError, match="two: all its prompts are in earlier tasks too"):
        without_repeats({"one": [first], "two": [again]}, [])
    with pytest.raises(GraftError, match="warm up with other prompts"):
        without_repeats({"one": [first]}, [again])


def test_ticks_are_round_numbers_within_the_range():
    assert ticks(0, 4) == [0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4]
    assert ticks(0.4, 3.2, whole=True) == [1, 2, 3]


# The command


@pytest.fixture
def data(tmp_path: Path) -> list[str]:
    for name in ("first", "second"):
        (tmp_path / f"{name}.jsonl").write_text(f'{{"prompt": "{name} one"}}\n{{"turns": ["{name} two"]}}\n')
    return ["--prompts", str(tmp_path / "first.jsonl"), "--prompts", str(tmp_path / "second.jsonl")]


RUN_KEYS = {
    "task", "method", "state", "prompts", "tokens", "decode_seconds", "prefill_seconds", "tokens_per_second", "speedup",
    "mean_accepted", "rounds", "draft_passes_per_round", "nodes_per_round", "modelled_speed", "modelled_over_dense",
    "differ", "accepted_by_source", "accepted_by_depth", "proposed_by_source", "seconds_by_phase", "confidence",
}  # fmt: skip


def test_every_setting_has_an_option_that_tells_its_default() -> None:
    assert set(DECODING) == {field.name for field in fields(BenchSettings)}
    for field in fields(BenchSettings):
        _, option = get_args(DECODING[field.name])
        assert option.help.endswith(rf"[dim]\[default: {field.default:g}][/]")


def test_bench_writes_results_a_table_and_a_report_that_needs_nothing_from_elsewhere(graft_tiny, data, tmp_path):
    out, methods = tmp_path / "out", ("off", "graft", "hf-lookup")
    result = graft_tiny("bench", *data, "--methods", ",".join(methods), "--out", str(out))
    assert result.status == 0
    assert all(word in result.out for word in ("first", "second", "average", *methods))

    results = json.loads((out / "results.json").read_text())
    assert set(results) == {"runs", "averages", "settings", "environment"}
    assert all(set(run) >= RUN_KEYS for run in results["runs"])
    ran = [(run["task"], run["method"]) for run in results["runs"]]
    assert ran == [(task, method) for task in ("first", "second") for method in methods]
    assert {run["differ"] for run in results["runs"]} == {0}
    for task in ("first", "second"):
        assert len({run["tokens"] for run in results["runs"] if run["task"] == task}) == 1
    assert [run["task"] for run in results["averages"]] == ["average"] * 3

    rows = list(csv.DictReader((out / "results.csv").read_text().splitlines()))
    assert [row["task"] for row in rows] == ["first"] * 3 + ["second"] * 3 + ["average"] * 3
    assert float(rows[0]["speedup"]) == 1.0

    page = (out / "report.html").read_text()
    assert not re.search(r"https?:|//|src=|href=|@import|url\(|<script", page)
    tree = ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>"))
    sections = {section.get("id"): section for section in tree.iter("section")}
    for plot, mark in PLOTS.items():
        assert sections[plot].find(f"figure/{mark}") is not None
    assert len(sections["speed-against-accepted-length"].findall(".//circle")) == 2 * 3 + 3
    assert len(sections["speed-by-task"].findall(".//td/b")) == 2 * 3 + 3, "a bar for each task, and for the average"
    assert str(tmp_path) not in json.dumps(results) + page


def test_results_are_written_after_every_task(
    graft_tiny: Run, data: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = PolicyMethod.answer, []

    def interrupted(self, prompts, settings):
        calls.append(prompts)
        if len(calls) > 3:  # the trial, two prompts, and no more
            raise KeyboardInterrupt
        return original(self, prompts, settings)

    monkeypatch.setattr(PolicyMethod, "answer", interrupted)
    out = tmp_path / "out"
    assert graft_tiny("bench", *data, "--methods", "off", "--out", str(out)).status == 130
    assert [run["task"] for run in json.loads((out / "results.json").read_text())["runs"]] == ["first"]
    assert (
        "This run was stopped or is still running: 1 of 2 tasks are done, without second."
        in (out / "report.html").read_text()
    )


def test_rows_and_states_reach_the_run(graft_tiny: Run, data: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    warmup = tmp_path / "lessons.jsonl"
    warmup.write_text('{"prompt": "another"}\n' + Path(data[1]).read_text())
    words = ["--methods", "off,graft", "--rows", "2", "--warmup", str(warmup), "--state", "cold", "--state", "warm"]
    result = graft_tiny("bench", *data, *words, "--out", str(out))
    assert result.status == 0
    assert "2 prompts decode together: times are those of the whole batch." in result.out
    results = json.loads((out / "results.json").read_text())
    assert (results["settings"]["rows"], results["settings"]["warmup"]) == (2, "lessons")
    assert results["settings"]["warmup_prompts"] == 1, "those of the run are left out"
    assert "prompts are left out: they are in the run already" in result.err
    assert "times are those of the whole batch" in (out / "report.html").read_text()
