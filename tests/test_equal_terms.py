"""Policies with parameters of their own in one run, and rows on equal terms."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from synergy_core.errors import InputError
from synergy_runs.inputs.command_line import prepared
from synergy_runs.inputs.requested import (
    ahead,
    label_of,
    missing,
    policies_of,
    quoted,
    read_request,
    requests_in,
    terms_of,
)
from synergy_sim.settings import SIMULATOR


def only(text, **how):
    (policy,) = policies_of([text], how.pop("parameters", {}), how.pop("information", None)).values()
    return policy


def test_what_stands_in_brackets_holds_for_that_row():
    policies = policies_of(["sia", "sia(information=all,growth=4)"], {"sia": {"p": -1.0}}, None)
    plain, told = policies.values()
    assert (plain.name, told.name) == ("sia", "sia-information-all-growth-4")
    assert (plain.information, told.information) == ("own", "all")
    assert (plain.parameters["growth"], told.parameters["growth"]) == (2.0, 4.0)
    assert plain.parameters["p"] == told.parameters["p"] == -1.0


def test_brackets_go_before_settings_for_all():
    assert only("sia(information=own)", information="all").information == "own"
    assert only("sia(p=-0.25)", parameters={"sia": {"p": -1.0}}).parameters["p"] == -0.25
    assert only("tiresias(queue_limits_gpu_s=[100,1e5])").parameters["queue_limits_gpu_s"] == (100.0, 1e5)
    assert only("backfill(backfill=easy)").backfill == "easy"
    assert only("fifo+tune(sticky=false)").parameters["sticky"] is False


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sia(grwth=4)", "Did you mean 'growth'"),
        ("sia(growth)", "expected NAME or NAME(key=value,…)"),
        ("sia(growth=4,growth=5)", "growth is given twice; keep one"),
        ("sia(growth=many)", "parameter growth of policy sia: got 'many', expected a value such as 2.0"),
        ("sia(information=everything)", "unknown information for policy sia"),
        ("sia(like=synergie)", "Did you mean 'synergy'"),
        ("fifo(information=all)", "information has no effect"),
    ],
)
def test_brackets_that_cannot_be_meant_are_refused(text, said):
    with pytest.raises(InputError) as caught:
        only(text)
    assert said in str(caught.value)


def test_two_texts_with_one_label_are_refused():
    with pytest.raises(InputError, match="would both be called las-quantum_s-60 in tables and folders"):
        policies_of(["las(quantum_s=60)", "las(quantum_s= 60)"], {}, None)


@settings(max_examples=40)
@given(st.text(max_size=40))
def test_any_text_is_a_policy_or_an_input_error(text):
    try:
        read_request(text)
    except InputError:
        return
    assert all(each.isalnum() or each in "_.+-" for each in label_of(text))


@pytest.mark.parametrize(
    ("value", "names", "typed"),
    [
        ("sia", ["sia"], "sia"),
        ("[sia,sia(growth=4)]", ["sia", "sia(growth=4)"], '[sia,"sia(growth=4)"]'),
        ("[sia,\"sia(growth=4,p=-1)\"]", ["sia", "sia(growth=4,p=-1)"], '[sia,"sia(growth=4,p=-1)"]'),
        ("[sia,'sia(like=synergy)']", ["sia", "sia(like=synergy)"], '[sia,"sia(like=synergy)"]'),
        ("sia(growth=4)", ["sia(growth=4)"], '"sia(growth=4)"'),
    ],
)  # fmt: skip
def test_brackets_need_no_quotes_on_the_command_line(value, names, typed):
    assert requests_in(value) == names
    assert quoted(value) == typed
    assert prepared(["+trace=philly", f"policy={value}"], SIMULATOR)[1] == f"policy={typed}"


def terms(*texts, **how):
    return {text: terms_of(policy) for text, policy in policies_of(texts, {}, how.get("information")).items()}


def test_like_gives_what_the_other_has_and_no_more():
    both = terms("sia(like=synergy)", "synergy", "ftf(like=synergy)", "pollux(like=sia)", "pollux")
    assert not ahead(both["synergy"], both["sia(like=synergy)"], plans=True)
    assert not ahead(both["synergy"], both["ftf(like=synergy)"], plans=True)
    assert both["pollux(like=sia)"] == both["pollux"], "sia is told no more than pollux"
    assert only("sia(like=synergy)").parameters["p"] == only("sia").parameters["p"]


@pytest.mark.parametrize(
    ("texts", "plans", "asked"),
    [
        (["sia", "synergy"], False, {"sia(like=synergy)": ["information", "growth", "first_gpus", "batch_limit"]}),
        (["tiresias", "sia", "gavel", "pollux", "synergy"], False, {"sia(like=synergy)", "pollux(like=synergy)"}),
        (["ftf", "synergy"], False, {"ftf(like=synergy)": ["information"]}),
        (["ftf", "synergy"], True, {"ftf(like=synergy)": ["information", "plans"]}),
        (["sia", "sia+plans", "crius", "synergy"], True, {"sia(like=synergy)"}),
        (["sia", "sia(like=synergy)", "synergy"], True, {}),
        (["sia", "synergy(growth=8)"], False, {"sia(information=all,growth=8,first_gpus=4,batch_limit=max)"}),
        (["fifo", "easy", "srtf", "las", "qssf", "themis"], False, {}),
        (["fifo+proportional", "fifo+tune", "synergy"], False, {}),
    ],
)
def test_rows_that_a_fair_comparison_lacks(texts, plans, asked):
    found = missing(terms(*texts), plans=plans)
    assert set(found) == set(asked)
    if isinstance(asked, dict):
        assert {text: more for text, (_, more) in found.items()} == asked
    complete = terms(*texts, *found)
    assert not missing(complete, plans=plans), "what it names is all that lacks"


def test_information_for_all_leaves_only_what_parameters_say():
    found = missing(terms("sia", "synergy", information="all"), plans=False)
    assert found["sia(like=synergy)"] == ("synergy", ["growth", "first_gpus", "batch_limit"])
