"""What a chat template reads of the options that it is given."""

from __future__ import annotations

import pytest

from chat_tokenizers import CHATML, DROPS_REASONING, TAGGED, byte_tokenizer, with_template
from hf_dflash.prompt_encoding import check_template_options

REFUSES = "{% if effort not in ['low', 'high'] %}{{ raise_exception('low or high') }}{% endif %}"


@pytest.mark.parametrize(
    ("template", "options"),
    [
        (DROPS_REASONING, {"enable_thinking": True}),
        (TAGGED + "{{ tone }}", {"tone": "dry"}),  # with a tag that is no part of the language
        ({"default": DROPS_REASONING, "other": CHATML}, {"enable_thinking": True}),
        (REFUSES + CHATML, {"effort": "low"}),
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
