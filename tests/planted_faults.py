"""The faults that `mutants.py` plants, and the tests that should notice each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """A change of one file that gives a wrong text, a leak or a wrong answer."""

    name: str  # area: what goes wrong
    file: str
    old: str  # occurs exactly once in the file
    new: str
    tests: tuple[str, ...]  # the quickest that should fail: FILE::NAME, in tests/
    survives: str = ""  # why no test can notice


_ACCEPTANCE = "src/graft/spec_decode/acceptance.py"
_BUDGET = "src/graft/spec_decode/budget.py"
_CALIBRATION = "src/graft/spec_decode/calibration.py"
_DETOKENIZER = "src/graft/detokenizer.py"
_ENGINE = "src/graft/engine.py"
_GRAPHS = "src/graft/model/cuda_graphs.py"
_GUARD = "src/graft/server/guard.py"
_NATIVE = "src/graft/spec_decode/native.c"
_PAGES = "src/graft/model/kv_cache.py"
_SAMPLER = "src/graft/model/sampler.py"
_SCHEDULER = "src/graft/core/scheduler.py"
_SEQUENCE = "src/graft/sequence.py"
_SERVING = "src/graft/server/serving.py"
_SUFFIX = "src/graft/spec_decode/proposers/suffix.py"
_TOOLS = "src/graft/server/tools.py"

# Tests that several faults name
_MEANING = "test_captured.py::test_each_setting_has_the_meaning_that_transformers_gives_it_in_captured_steps_too"
_NUMPY = "test_sampling.py::test_greedy_choices_with_bias_and_penalties_are_those_of_a_page_of_numpy"

FAULTS = (
    # Acceptance and the commit of accepted paths
    Fault(
        "commit: a path that begins at its place is not moved",
        _GRAPHS,
        "if path and path[-1] != len(path)]",
        "if path and path[0] != 1]",
        ("test_captured.py::test_whatever_path_is_committed_the_next_logits_are_those_of_the_models_own_forward",),
    ),
    # The sampler
    Fault(
        "sampler: tokens of the answer count once however often they come",
        _SAMPLER,
        "self._counts[rows, tokens[rows]] += 1",
        "self._counts[rows, tokens[rows]] = 1",
        (_NUMPY,),
    ),
    Fault(
        "sampler: a bias does not keep the device from choosing",
        _SAMPLER,
        " or s.frequency_penalty or s.logit_bias\n",
        " or s.frequency_penalty\n",
        (_MEANING + "[logit_bias]",),
    ),
    Fault(
        "sampler: a presence penalty does not keep the device from choosing",
        _SAMPLER,
        "s.repetition_penalty != 1 or s.presence_penalty or",
        "s.repetition_penalty != 1 or",
        (_MEANING + "[presence_penalty]",),
    ),
    Fault(
        "sampler: a frequency penalty does not keep the device from choosing",
        _SAMPLER,
        "s.presence_penalty or s.frequency_penalty or s.logit_bias",
        "s.presence_penalty or s.logit_bias",
        (_MEANING + "[frequency_penalty]",),
    ),
    Fault(
        "sampler: top-k does not keep the device from choosing",
        _SAMPLER,
        "return not (penalties or s.top_k or s.top_p < 1 or s.min_p)",
        "return not (penalties or s.top_p < 1 or s.min_p)",
        (_MEANING + "[top_k]",),
    ),
    Fault(
        "sampler: top-p does not keep the device from choosing",
        _SAMPLER,
        "return not (penalties or s.top_k or s.top_p < 1 or s.min_p)",
        "return not (penalties or s.top_k or s.min_p)",
        (_MEANING + "[top_p]",),
    ),
    Fault(
        "sampler: min-p does not keep the device from choosing",
        _SAMPLER,
        "return not (penalties or s.top_k or s.top_p < 1 or s.min_p)",
        "return not (penalties or s.top_k or s.top_p < 1)",
        (_MEANING + "[min_p]",),
    ),
    # The KV cache
    Fault(
        "pages: the device's block table is stale when a row grows",
        _PAGES,
        "                self._here[row.line, start : len(row.pages)] = row.pages[start:]\n"
        "                self._is_changed = True\n",
        "                self._here[row.line, start : len(row.pages)] = row.pages[start:]\n",
        ("test_pages.py::test_the_block_tables_on_the_device_know_the_pages_that_a_row_has_come_to_have",),
    ),
    Fault(
        "pages: more is kept than the drafter has entries of",
        _PAGES,
        "min(row.length, len(text), row.length if num_entries is None else num_entries)",
        "min(row.length, len(text))",
        ("test_pages.py::test_of_a_text_no_more_is_kept_than_the_drafter_has_entries_of",),
    ),
    Fault(
        "pages: those read without the drafter serve requests that draft",
        _ENGINE,
        "{sequence.speculates and self.drafter is not None}/{salt}",
        "{self.drafter is not None}/{salt}",
        ("test_scheduler.py::test_what_was_read_without_the_drafter_is_read_again_for_a_request_that_drafts",),
    ),
    # The scheduler
    Fault(
        "scheduler: a request that was put back waits behind all others",
        _SCHEDULER,
        '        log.info("the cache is full: a request waits, and is read again")\n'
        "        with self._changed:\n"
        "            self._waiting.appendleft(job)\n",
        '        log.info("the cache is full: a request waits, and is read again")\n'
        "        with self._changed:\n"
        "            self._waiting.append(job)\n",
        ("test_scheduler.py::test_a_request_that_was_put_back_goes_on_before_those_that_wait",),
    ),
    # The text and its stop strings
    Fault(
        "text: a stream shows the beginning of a stop string",
        _DETOKENIZER,
        "end = len(self.text) if final else len(self.text) - self._num_held()",
        "end = len(self.text)",
        ("test_text_stream.py::test_a_stream_never_shows_the_beginning_of_a_stop_string",),
    ),
    Fault(
        "text: the first stop string of the list ends it, not the earliest",
        _DETOKENIZER,
        "self.text = self.text[: min(found)]",
        "self.text = self.text[: found[0]]",
        ("test_text_stream.py::test_of_two_stop_strings_in_a_text_the_earliest_ends_it",),
    ),
    Fault(
        "text: a word loses its space behind markers",
        _DETOKENIZER,
        "_TAIL = 6  #",
        "_TAIL = 1  #",
        ("test_text_stream.py::test_an_answer_is_what_the_tokenizer_decodes_behind_the_prompt",),
    ),
)
