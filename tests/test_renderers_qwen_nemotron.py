"""What Qwen3-VL, Qwen3.5 and Nemotron 3 do beyond their cases: which template is theirs, options, refusals."""

import pytest

from renderers import make_renderer
from tests.renderer_data import assistant, needs_data, real_tokenizer, sample, user

pytestmark = needs_data


def decoded(renderer, messages, **more):
    return renderer.tokenizer.decode(renderer.render_ids(messages, **more))


@pytest.mark.parametrize(("template", "opens"), [("qwen3.5", True), ("qwen3.5-nothink", False)])
def test_qwen35_thinks_by_default_where_its_template_does(template, opens):
    tokenizer = real_tokenizer("tokenizers/qwen3.5", f"{template}.jinja")
    for thinking in (None, True, False):
        renderer = make_renderer("qwen3.5", tokenizer, thinking=thinking)
        text = decoded(renderer, [user("Hi")], add_generation_prompt=True)
        assert text.endswith("</think>\n\n") != (opens if thinking is None else thinking)


def test_qwen35_refuses_a_later_system_message_and_a_conversation_without_query():
    renderer = make_renderer("qwen3.5", real_tokenizer("tokenizers/qwen3.5"))
    prompt = renderer.render_ids([user("Hi")], add_generation_prompt=True)
    completion = sample(renderer.tokenizer, "\n</think>\n\nYes<|im_end|>")
    assert renderer.bridge(prompt, completion, [user("And?")]) is not None
    assert renderer.bridge(prompt, completion, [{"role": "system", "content": "x"}, user("And?")]) is None
    for messages in ([], [{"role": "system", "content": "x"}], [user(" <tool_response>\nx\n</tool_response>\n")]):
        with pytest.raises(ValueError, match="user message"):
            renderer.render(messages)
    with pytest.raises(ValueError, match="first place"):
        renderer.render([user("Hi"), {"role": "system", "content": "x"}])


def test_an_image_is_a_placeholder_only_where_one_may_stand():
    image = [{"type": "text", "text": " a "}, {"type": "image"}, {"type": "text", "text": " <|image_pad|> "}]
    for name in ("qwen3-vl", "qwen3.5"):
        renderer = make_renderer(name, real_tokenizer(f"tokenizers/{name}"))
        pad = renderer.token_id("<|image_pad|>")
        assert renderer.render_ids([user(image)]).count(pad) == 1
        for message in ({"role": "system", "content": image}, assistant(image)):
            with pytest.raises(ValueError, match="'image'"):
                renderer.render([message, user("Hi")])
        with pytest.raises(ValueError, match="'audio'"):
            renderer.render([user([{"type": "audio"}])])


def test_nemotron_keeps_past_reasoning_when_told_so():
    tokenizer = real_tokenizer("tokenizers/nemotron-3")
    messages = [user("q"), assistant("A", reasoning_content="R"), user("r")]
    prompt = make_renderer("nemotron-3", tokenizer).render_ids(messages[:1], add_generation_prompt=True)
    completion = sample(tokenizer, "R\n</think>\nA<|im_end|>")
    for clear, kept in ((True, "<think></think>\nA"), (False, "<think>\nR\n</think>\nA")):
        renderer = make_renderer("nemotron-3", tokenizer, clear_thinking=clear, thinking_retention="template")
        assert f"assistant\n{kept}<|im_end|>" in decoded(renderer, messages)
        following = renderer.bridge_to_next_turn(prompt, completion, messages[2:])
        assert following == (None if clear else renderer.render_ids(messages, add_generation_prompt=True))
