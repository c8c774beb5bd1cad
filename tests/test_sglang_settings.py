"""The SGLang plugin's settings, what it refuses, and SGLang's released wheels."""

import ast
import json
import os
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed, and without it there are no kernels")

import sglang_double
from graft.errors import GraftError
from graft.integrations.sglang import plugin, release
from graft.integrations.sglang.settings import (
    SGLangSettings,
    captured_sizes,
    check_head,
    check_server,
    from_environment,
    sizes_for,
    tree_sizes,
)


def test_settings_come_from_the_environment():
    assert from_environment({}) is None and from_environment({"GRAFT_SGLANG": "0"}) is None
    variables = {"GRAFT_SGLANG": "1", "GRAFT_SGLANG_BUDGET": "31", "GRAFT_SGLANG_ISOLATED": "true", "HOME": "/"}
    assert from_environment(variables) == SGLangSettings(budget=31, isolated=True)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (
            {"GRAFT_SGLANG_BUGDET": "3"},
            "unknown environment variable 'GRAFT_SGLANG_BUGDET': did you mean 'GRAFT_SGLANG_BUDGET'?",
        ),
        ({"GRAFT_SGLANG_BUDGET": "few"}, "GRAFT_SGLANG_BUDGET must be a whole number, not 'few'"),
        ({"GRAFT_SGLANG_BUDGET": "0"}, "GRAFT_SGLANG_BUDGET must be at least 1, not 0"),
        ({"GRAFT_SGLANG_BUDGET": "128"}, "GRAFT_SGLANG_BUDGET must be at most 127, not 128"),
        ({"GRAFT_SGLANG_LOG": "0"}, "GRAFT_SGLANG_LOG must be at least 1, not 0"),
        ({"GRAFT_SGLANG": "perhaps"}, "GRAFT_SGLANG must be 1 or 0, not 'perhaps'"),
    ],
)
def test_bad_settings_are_one_clear_line(variables, message):
    with pytest.raises(GraftError) as error:
        from_environment(variables)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("flags", "settings", "message"),
    [
        ({"speculative_algorithm": "EAGLE"}, {}, "needs --speculative-algorithm EAGLE3, not EAGLE"),
        ({"speculative_eagle_topk": 1}, {}, "--speculative-eagle-topk must be 2 or more, not 1"),
        ({"speculative_num_draft_tokens": 129}, {}, "must be between 2 and 128, not 129"),
        ({"speculative_num_draft_tokens": 8}, {"budget": 9}, "GRAFT_SGLANG_BUDGET (9) must be less than"),
        ({"speculative_adaptive": True}, {}, "--speculative-adaptive does: leave it out"),
        ({}, {"places": "48"}, "must be pairs of requests and places like \"2:48,16:8\", not '48'"),
        ({}, {"places": "2:8,2:4"}, "must name growing numbers of requests, from 1, not 2, 2"),
        ({}, {"places": "2:4,4:8"}, "must name fewer places for more requests, not 4, 8"),
        ({}, {"places": "0:8"}, "must name growing numbers of requests, from 1, not 0"),
        ({}, {"places": "1:13"}, "must have places between 1 and --speculative-num-draft-tokens (12), not 13"),
        (
            {"enable_dp_attention": True},
            {"places": "1:12,4:5"},
            "must name one size of trees with --enable-dp-attention",
        ),
    ],
)
def test_flags_and_settings_that_do_not_fit_are_refused(flags, settings, message):
    check_server(sglang_double.server_args(), SGLangSettings(budget=9))
    with pytest.raises(GraftError) as error:
        check_server(sglang_double.server_args(**flags), SGLangSettings(**settings))
    assert message in str(error.value) and "\n" not in str(error.value)
    assert ("GRAFT_SGLANG_PLACES" in str(error.value)) == ("places" in settings)


def test_a_head_must_name_the_class_that_sglang_loads_it_with(tmp_path):
    check_head({"architectures": ["LlamaForCausalLMEagle3"], "norm_before_residual": False})
    with pytest.raises(GraftError, match="does not know the head's normed residual"):
        check_head({"architectures": ["LlamaForCausalLMEagle3"], "norm_before_residual": True})
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(GraftError, match=r'must say "architectures": .*it names LlamaForCausalLM$'):
        check_server(sglang_double.server_args(speculative_draft_model_path=str(tmp_path)), SGLangSettings())
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(GraftError, match="cannot read"):
        check_server(sglang_double.server_args(speculative_draft_model_path=str(tmp_path)), SGLangSettings())


def test_another_version_ends_the_process_with_one_line(monkeypatch):
    double = sglang_double.install(monkeypatch)
    double.__version__ = "0.6.0"
    plugin.register()  # not switched on
    monkeypatch.setenv("GRAFT_SGLANG", "1")
    with pytest.raises(SystemExit, match=r"^error: the plugin knows SGLang 0\.5\.15, .*0\.5\.23, not 0\.6\.0"):
        plugin.register()
    assert not double.HookRegistry.hooks


@pytest.mark.parametrize("change", ["another parameter", "a missing function", "a missing name", "any failure"])
def test_an_sglang_that_differs_is_left_untouched(monkeypatch, change):
    double = sglang_double.install(monkeypatch)
    monkeypatch.setenv("GRAFT_SGLANG", "1")
    if change == "another parameter":
        double.eagle_sample = lambda verify_input, batch: None
        message = r"eagle_sample takes \(verify_input, batch\), not \(verify_input, batch, logits_output, vocab_mask\)"
    elif change == "a missing function":
        del double.EagleDraftWorker.draft_forward
        message = "SGLang has no .*EagleDraftWorker.draft_forward: unset GRAFT_SGLANG"
    elif change == "a missing name":
        del double.SpecRuntimeState
        message = "has no SpecRuntimeState: unset GRAFT_SGLANG"
    else:
        monkeypatch.setattr(release, "check_signatures", lambda now: 1 / 0)
        message = r"cannot be loaded \(ZeroDivisionError: division by zero\)"
    before = dict(vars(double))
    with pytest.raises(SystemExit, match=f"^error: .*{message}"):
        plugin.register()
    assert not double.HookRegistry.hooks and vars(double) == before


def test_ranks_that_choose_apart_have_one_size_of_trees():
    flags = sglang_double.server_args(enable_dp_attention=True)
    assert [tuple(size) for size in sizes_for(flags, SGLangSettings())] == [(None, 12, 3)]
    assert [tuple(size) for size in sizes_for(flags, SGLangSettings(places="4:5"))] == [(None, 5, 3)]


def test_sizes_of_trees_follow_the_flags_or_the_variable():
    assert [tuple(size) for size in tree_sizes(None, 48, 6)] == [
        (2, 48, 6),
        (4, 32, 5),
        (8, 16, 4),
        (16, 8, 3),
        (64, 4, 2),
        (None, 1, 1),
    ]
    assert [tuple(size) for size in tree_sizes(None, 48, 6, max_requests=3)] == [(2, 48, 6), (None, 32, 5)]
    assert [tuple(size) for size in tree_sizes(None, 6, 2)] == [(21, 6, 2), (64, 4, 2), (None, 1, 1)]
    assert tree_sizes(None, 4, 2, largest_graph=48)[0].max_requests == 48, "larger batches run without a graph"
    assert tree_sizes(None, 4, 2, largest_graph=8)[0].max_requests == 32
    assert [tuple(size) for size in tree_sizes(None, 3, 2)] == [(None, 3, 2)]
    assert [tuple(size) for size in tree_sizes("4:16,64:1", 48, 6)] == [(4, 16, 4), (None, 1, 1)]
    assert captured_sizes([1, 2, 4, 8, 12], 2, 5) == [4, 8] and captured_sizes([1, 2, 4], 2, None) == [4]
    assert captured_sizes([1, 2, 4], 8, None) == [4], "larger batches run without a graph"


# SGLang's released wheels


def wheel_of(version):
    """The wheel in the folder that SGLANG_WHEELS names."""
    folder = Path(os.environ.get("SGLANG_WHEELS", ""))
    found = sorted(folder.glob(f"sglang-{version}-*.whl")) if folder.name else []
    if not found:
        pytest.skip(
            f"no wheel of SGLang {version}: `pip download --no-deps sglang=={version}`, and SGLANG_WHEELS=FOLDER"
        )
    return zipfile.ZipFile(found[0])


def definition_of(wheel, path):
    """The module's syntax tree and the definition at a dotted path in it."""
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        for name in ("/".join(parts[:count]) + ".py", "/".join(parts[:count]) + "/__init__.py"):
            if name in wheel.NameToInfo:
                module = found = ast.parse(wheel.read(name))
                for part in parts[count:]:
                    kinds = (ast.FunctionDef, ast.ClassDef)
                    found = next((e for e in found.body if isinstance(e, kinds) and e.name == part), None)
                    assert found is not None, f"no {path}"
                return module, found
    raise AssertionError(f"no module of {path}")


@pytest.mark.parametrize("version", ["0.5.15", "0.5.23"])
def test_released_wheels_have_the_functions_that_are_hooked(version):
    wheel = wheel_of(version)
    for path, expected in release.signatures(release.release_of(version)).items():
        given = definition_of(wheel, path)[1].args
        assert given.vararg is None and given.kwarg is None, path
        names = [argument.arg for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
        assert names == expected, path
    module, _ = definition_of(wheel, release.WORKERS)
    imported = {
        name.asname or name.name for each in module.body if isinstance(each, ast.ImportFrom) for name in each.names
    }
    assert set(release.USED_NAMES) <= imported
