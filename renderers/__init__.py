"""Renderers: messages to tokens, tokens to messages, and one turn to the next without encoding it again.

Why they exist
--------------
An RL trainer must train on the very tokens that were sampled, after the very tokens that the model saw. Over several turns
a chat template cannot promise that. It takes messages, so the model's turn would be decoded, put into a message, rendered
and encoded once more, and each of these steps may change tokens. A renderer is the template as a Python object that does
three things by itself:

    render(messages, tools, add_generation_prompt)             ids, and for each its message, its role, body or scaffold
    parse_response(completion_ids, prompt_ids, tools)          content, reasoning, tool calls, read from the ids
    bridge_to_next_turn(prompt_ids, completion_ids, messages)  the next prompt: both verbatim, then what the template writes

    renderer = make_renderer("auto", tokenizer, model_type)
    prompt = renderer.render_ids([{"role": "user", "content": "Weather in Oslo?"}], tools, add_generation_prompt=True)
    completion = sample(prompt, stop=renderer.stop_token_ids)
    reply = renderer.parse_response(completion, prompt, tools).message()
    answers = [{"role": "tool", "tool_call_id": call["id"], "content": run(call)} for call in reply["tool_calls"]]
    prompt = renderer.bridge_to_next_turn(prompt, completion, answers, tools)      # None: render everything anew

As long as the bridge holds, a conversation is one token stream: one training sequence, O(T) work. Where a bridge cannot be
sure it returns None; the caller renders the conversation anew and a new sequence begins there. That costs compute; a wrong
bridge would be silent drift between sampler and trainer. Where a turn comes as text (from a served model that speaks messages
alone), `render_reply` gives the ids that would have been sampled for it.

What is ruled out
-----------------
- *Decode and encode again.* The tokenizer's encoder never sees model text: a completion stays the ids that were sampled,
  also where the tokenizer would have merged them otherwise, or where an id is half a character.
- *Stripped history.* Many templates drop past reasoning when the next user message arrives, so the new prompt no longer
  begins with the old one. With thinking_retention="all" (the default) the bridge keeps what was sampled; with "template" it
  returns None where the template would strip.
- *Injection.* `<|im_end|>` in a user's text, a tool's result or an argument is ten ordinary characters. Only the format itself
  writes control tokens, and only a sampled control token counts as one when a turn is read.
- *Two end tokens, or none.* The bridge writes the closing token only if no stop token was sampled, and takes a newline sampled
  after the stop for the one that the template writes. It never closes a thinking block that is not open, and never goes
  on from a turn that was stopped inside one.
- *Run boundaries.* A tokenizer merges across a header and the text behind it ("assistant\\n" + "\\n\\nHi" holds one token
  "\\n\\n\\n"). Text between two control tokens is encoded in one pass, so the ids are the template's.
- *Broken calls.* A tool call that is cut off, no JSON, without a name, or of an unknown tool is returned as such (`error`,
  `raw`) beside the good ones. Nothing raises on any ids.

Which one
---------
`auto` takes a hand-coded family if the model type, the control tokens and, where the tokenizer has one, the chat template are
that family's; everything else goes to `default`, which wraps the chat template and bridges only where it can prove from the
template that the prefix is kept. Where other models share a family's model type and control tokens, a template is needed
(`told_by_template`): without one the answer is `default` too. `resolve_name` says which and why. A name can be given outright
(fine-tunes under a changed model type), and an import path loads a renderer from elsewhere: `module:Class` or
`path/to/file.py:Class`.

Options have one name in all families: `thinking` (None: the template's default; True; False), `thinking_retention` ("all",
"template") and `clear_thinking` (False: `render` writes past reasoning that the template would clear). A family refuses
what it does not have. `default` can only go by its template: it keeps history where the template does, under both settings.

How to write one
----------------
One file with one class, and one line in RENDERERS. A family whose turns end with a token of their own, as in this one
where `<s>` and `</s>` are control tokens, is done in some thirty lines:

    class Example(Renderer):
        name = "example"
        model_types = ("example",)                       # transformers' names, for auto
        control_tokens = ("<s>", "</s>")                 # what the tokenizer must have
        stop_tokens = ("</s>",)
        turn_start, generation_header, turn_end, after_turn = "<s>", "assistant\\n", "</s>", "\\n"

        def render(self, messages, tools=None, add_generation_prompt=False):
            writer = self.writer()
            self.write_turns(writer, messages)
            if add_generation_prompt:
                self.write_generation_prompt(writer)     # <s>assistant\\n
            return writer.finish()

        def write_turns(self, writer, messages, first=0):
            for index, message in enumerate(messages[first:], first):
                role = message["role"]
                writer.write(index, role, f"<s>{role}\\n", Body(text_of(message)), "</s>\\n")

        def parse_response(self, completion_ids, prompt_ids=None, tools=None):
            turn, _ = self.cut_at_stop(as_list(completion_ids))
            return ParsedResponse(self.decode(turn))

1. A plain string is the format's: control tokens in it become control tokens. Wrap a message's text in `Body`, and anything
   else that came from outside (schemas, names) in `Plain`: those are always ordinary characters. What belongs to no message
   has the index -1.
2. `text_of` gives a message's text, whatever form it has. A call (`function_of`) has a dict or a JSON string for arguments:
   `turns.text_or_json` writes either, `turns.arguments_of` reads either. One that was parsed as broken (`turns.is_broken`)
   is written as its `raw`. What the format cannot hold (a role, a second call) is a ValueError that says so.
3. `write_turns` serves `render` and `bridge` alike; in a bridge it gets the new messages alone, with no assistant among them.
   What stands once at the front (tools, a default system prompt) is hence `render`'s.
4. `options` lists what can be set, with defaults; `choices` what it may be set to. A stop token that only some tokenizers of
   the family have goes into a `stop_token_ids` of your own.
5. Thinking: set `thinking_tags`, and say in `strips_history` when the template would drop what stands in the prompt.
6. Formats that close turns otherwise write their own `close_turn`. Where the stop token opens the next turn, it tells the
   writer to `skip` what was sampled, and `reply_end` says which one a model samples after a reply.
7. `segments` cuts sampled ids at the format's markers; `read_reasoning` and `read_calls` in `turns` read the usual forms,
   `xml_calls` those without JSON. Calls without markers are read from the text (`llama_3`).
8. `fits_template` tells `auto` the family's own chat template, by strings that no other holds. Where fine-tunes share model
   type, tokens and most of the template, let both render a few probes (`fits` in `llama_3`). In doubt it is no:
   `default` goes by the template itself.
9. Hold it against the chat template token by token: a plain conversation, tools, reasoning in history, edge newlines, empty
   texts, control-token strings in text. Then bridge after every kind of ending: stop, no stop, stop and newline, open
   reasoning. `python -m renderers.check MODEL --renderer path/to/file.py:Class` does most of it, and every line of RENDERERS
   is put through tests/test_renderer_families.py. Where the family leaves the template on purpose, say so in `deviations`.
"""

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from renderers.base import Renderer

RENDERERS = {
    "default": "renderers.default:Default",
    "qwen3": "renderers.qwen3:Qwen3",
    "qwen3-vl": "renderers.qwen3_vl:Qwen3VL",
    "qwen3.5": "renderers.qwen3_5:Qwen35",
    "glm-4.5": "renderers.glm_4_5:GLM45",
    "glm-5": "renderers.glm_5:GLM5",
    "minimax-m2": "renderers.minimax_m2:MiniMaxM2",
    "deepseek-v3": "renderers.deepseek_v3:DeepSeekV3",
    "kimi-k2": "renderers.kimi_k2:KimiK2",
    "kimi-k2.5": "renderers.kimi_k2_5:KimiK25",
    "nemotron-3": "renderers.nemotron_3:Nemotron3",
    "gpt-oss": "renderers.gpt_oss:GptOss",
    "llama-3": "renderers.llama_3:Llama3",
}


def resolve_name(name: str, tokenizer: Any, model_type: str | None = None) -> tuple[str, str]:
    """(key of RENDERERS or import path, the reason in words for the console) of what `name` chooses for a tokenizer.

    `model_type` is the one in the model's config (`qwen3`). Raises ValueError for a name that is none.
    """
    if name == "auto":
        families = {family: _load(path) for family, path in RENDERERS.items()}
        typed = [family for family, renderer in families.items() if model_type in renderer.model_types]
        fitting = [family for family in typed if families[family].fits(tokenizer, model_type)]
        if len(fitting) == 1:
            return fitting[0], f"model type {model_type} with the control tokens of {fitting[0]}"
        if fitting:  # only a chat template could tell them apart, and there is none
            return "default", f"model type {model_type} may be {' or '.join(fitting)}: name one with --renderer"
        if typed:
            return (
                "default",
                f"model type {model_type}, but control tokens or chat template are not those of {' or '.join(typed)}",
            )
        return "default", f"no hand-coded renderer for model type {model_type}"
    if name in RENDERERS:
        return name, "chosen by name"
    if ":" in name:
        return name, "a custom renderer, by import path"
    raise ValueError(
        f"--renderer {name}: there is none; choose auto, {', '.join(RENDERERS)}, or an import path "
        "(module:Class or path/to/file.py:Class)"
    )


def make_renderer(name: str, tokenizer: Any, model_type: str | None = None, **options: Any) -> "Renderer":
    """The renderer that `name` chooses: `auto`, a key of RENDERERS, or an import path (which may also be given as
    `custom` with the option `import_path`). Raises ValueError for an unknown name, an option that the family lacks, and a
    tokenizer that it cannot work with."""
    if name == "custom":
        name = options.pop("import_path", "")
        if ":" not in name:
            raise ValueError("--renderer custom needs import_path=module:Class or import_path=path/to/file.py:Class")
    name, _ = resolve_name(name, tokenizer, model_type)
    return _load(RENDERERS.get(name, name))(tokenizer, **options)


def _load(path: str) -> type["Renderer"]:
    """The class at `module:Class` or `path/to/file.py:Class`. Raises ValueError where there is none."""
    module_name, _, class_name = path.rpartition(":")
    try:
        if module_name.endswith(".py"):
            spec = importlib.util.spec_from_file_location(f"custom_renderer_{Path(module_name).stem}", module_name)
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module  # dataclasses look their module up
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(module_name)
        return getattr(module, class_name)
    except (ImportError, OSError, AttributeError) as error:
        raise ValueError(f"--renderer {path}: {error}") from error
