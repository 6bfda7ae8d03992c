"""What a chat template reads of the options that it is given."""

from __future__ import annotations

import pytest

from chat_tokenizers import CHATML, DROPS_REASONING, TAGGED, byte_tokenizer, with_template
from hf_dflash.prompt_encoding import check_option_kinds, check_template_options

REFUSES = "{% if effort not in ['low', 'high'] %}{{ raise_exception('low or high') }}{% endif %}"
#: As in Qwen3's template.
OFF_IF_SAID = (
    "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
)
IN_A_LOOP = (
    "{% set effort = 'low' %}{% set state = namespace(thinking=false) %}"
    "{% for m in messages %}{% if loop.last and tone == 'wet' %}{% break %}{% endif %}"
    "{% if m.thinking or state.thinking %}{{ effort }}{% endif %}"
    "{% generation %}{{ m['content'] }}{% endgeneration %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "options"),
    [
        (DROPS_REASONING, {"enable_thinking": True}),
        (TAGGED + "{{ tone }}", {"tone": "dry"}),  # with a tag that is no part of the language
        ({"default": DROPS_REASONING, "other": CHATML}, {"enable_thinking": True}),
        (REFUSES + CHATML, {"effort": "low"}),
        (CHATML + OFF_IF_SAID, {"enable_thinking": False}),
        ("{% set tone = tone | default('dry') %}{{ tone }}" + CHATML, {"tone": "wet"}),
        ("{% if tone is not defined %}{% set tone = 1 %}{% endif %}" + CHATML, {"tone": "wet"}),
        ("{% macro f(m) %}{{ m + tone }}{% endmacro %}{{ f('a') }}" + CHATML, {"tone": "wet"}),
        (IN_A_LOOP, {"tone": "dry"}),
        (None, {}),
    ],
)
def test_options_that_are_read_pass(template, options):
    check_template_options(with_template(byte_tokenizer(), template), options, "here:")


@pytest.mark.parametrize(
    ("template", "option"),
    [
        (CHATML, "enable_thinking"),
        (
            CHATML + " enable_thinking {# enable_thinking #}{{ 'enable_thinking' }}",
            "enable_thinking",
        ),
        (None, "enable_thinking"),
        # The tokenizer passes these itself.
        (CHATML, "messages"),
        (CHATML, "add_generation_prompt"),
        (CHATML + "{{ tokenize }}", "tokenize"),
        (CHATML + "{{ eos_token }}", "eos_token"),
        # Names in the template's code that are no options.
        (IN_A_LOOP, "thinking"),
        (IN_A_LOOP, "m"),
        (IN_A_LOOP, "effort"),
        (IN_A_LOOP, "loop"),
        (IN_A_LOOP, "namespace"),
        (REFUSES + CHATML, "raise_exception"),
    ],
)
def test_options_that_nothing_reads_are_refused(template, option):
    message = rf"here: must be options that the target's chat template reads, got \['{option}'\]"
    with pytest.raises(ValueError, match=message):
        check_template_options(with_template(byte_tokenizer(), template), {option: True}, "here:")


def test_a_value_that_the_template_refuses_is_told_in_its_words():
    tokenizer = with_template(byte_tokenizer(), REFUSES + CHATML)
    with pytest.raises(
        ValueError, match=r"here: .* takes, got \{'effort': 'some'\}: low or high\."
    ):
        check_template_options(tokenizer, {"effort": "some"}, "here:")
    check_template_options(tokenizer, {}, "here:", defaults={"effort": "high"})


def test_a_template_that_cannot_be_read_is_told_in_its_words():
    tokenizer = with_template(byte_tokenizer(), "{% odd tone %}" + CHATML)
    with pytest.raises(ValueError, match=r"here: .* takes, got .*: Encountered unknown tag 'odd'"):
        check_template_options(tokenizer, {"tone": "dry"}, "here:")
    tokenizer = with_template(byte_tokenizer(), "{{ 'tone")
    with pytest.raises(ValueError, match=r"here: .* takes, got \{'tone': 'dry'\}: "):
        check_template_options(tokenizer, {"tone": "dry"}, "here:")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_no_result_can_hold_is_refused(value):
    check_option_kinds({"budget": 0.5, "tone": "NaN"}, "here:")
    with pytest.raises(ValueError, match=rf"here: budget must be a finite number, got {value}\."):
        check_option_kinds({"budget": value}, "here:")
