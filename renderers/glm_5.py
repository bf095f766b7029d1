"""GLM-5, and GLM-4.7 that writes the same.

    [gMASK]<sop><|system|>You are ...<|user|>Weather?<|assistant|><think>A tool knows.</think>Let me see.<tool_call>weather
    <arg_key>city</arg_key><arg_value>Oslo</arg_value></tool_call><|observation|><tool_response>9 C</tool_response><|assistant|>

(without a line break anywhere). As in GLM-4.5 the stop token opens the next turn, reasoning and content are stripped, and
tools stand in a system turn of their own. What is different: there is no newline between the pieces; a turn without
reasoning, or whose reasoning is dropped, begins with a lone </think>; the generation prompt opens the reasoning, or with
thinking off writes that lone </think> too; /nothink is not known. Past reasoning is dropped at the next user message unless
`clear_thinking` is off.
"""

from collections.abc import Sequence
from typing import ClassVar

from renderers.base import Body, Message, Writer
from renderers.glm_4_5 import GLM45
from renderers.turns import thinks_nothing


class GLM5(GLM45):
    """GLM-5 and 4.7. `clear_thinking=False` keeps the reasoning of all turns."""

    name = "glm-5"
    options: ClassVar = GLM45.options | {"clear_thinking": True}
    choices: ClassVar = GLM45.choices | {"clear_thinking": (True, False)}
    model_types = ("glm_moe_dsa", "glm4_moe_lite", "glm4_moe")  # GLM-5, GLM-4.7-Flash, GLM-4.7
    newline = ""

    @classmethod
    def fits_template(cls, template: str) -> bool:
        return all(mark in template for mark in ("clear_thinking", "<arg_key>", "else '<think>'"))

    def user_suffix(self, text: str) -> str:
        return ""

    def thinking_block(self, reasoning: str, past: bool) -> list[str]:
        if not reasoning or (past and self.clear_thinking):
            return ["</think>"]
        return ["<think>", Body(reasoning.strip()), "</think>"]

    def write_generation_prompt(self, writer: Writer) -> None:
        writer.write(-1, "assistant", "<|assistant|>" + ("</think>" if self.thinking is False else "<think>"))

    def strips_history(self, prompt: Sequence[int], completion: Sequence[int], new_messages: Sequence[Message]) -> bool:
        # The opening tag goes with the reasoning: at a user message from all turns, otherwise from one that is empty.
        opening, closing = map(self.token_id, self.thinking_tags)
        if self.clear_thinking and any(message["role"] == "user" for message in new_messages):
            return opening in prompt or opening in completion or closing in completion
        return thinks_nothing(self, prompt, completion)
