"""`make test-newest`: what is installed, and what is said of it."""

import newest


def test_no_upper_bound_holds_a_release_back():
    asked = newest.requirements()
    assert "transformers>=5.12" in asked and not [each for each in asked if "<" in each]


def test_torch_alone_is_not_asked_for_as_its_newest_brings_cuda():
    assert not [each for each in newest.requirements() if each.startswith(("torch", "graft"))]


def test_the_versions_that_were_not_tested_before_are_named():
    known = newest.tested()
    installed = {**known, "torch": "2.0.0+cpu", "numpy": "9.0", "brand-new": "1.0", "pip": "1.0"}
    assert [line.split() for line in newest.differences(installed)] == [
        ["brand-new", "1.0", "tested:", "none"],
        ["numpy", "9.0", "tested:", known["numpy"]],
        ["torch", "2.0.0+cpu", "tested:", known["torch"]],
    ]
