"""A system message that joins a token stream which is already there.

A rollout is [BOS, default system block, user, ...], with BOS and default block only where the model's format has them. The
format would write a conversation that begins with the hint as [BOS, default block, hint, user, ...], or with the hint
inside the default block. So the hint is an *insertion*: ids, and the position in the rollout before which they stand.
Nothing of the rollout is rendered again or left out, and what begins every conversation stands once.
"""

from collections.abc import Sequence
from typing import Any

from renderers import make_renderer
from traces import Branch

PROBE = {"role": "user", "content": "?"}


class HintWriter:
    """Renders hints with the policy's tokenizer. Raises ValueError where the format takes no system message."""

    def __init__(self, name: str, policy_renderer: Any) -> None:
        self.renderer = policy_renderer if name == "auto" else make_renderer(name, policy_renderer.tokenizer)
        self.plain = self.renderer.render_ids([PROBE])
        try:
            self.renderer.render([{"role": "system", "content": "?"}, PROBE])
        except ValueError as error:
            raise ValueError(f"--hint-renderer {name}: opsd's hint is a system message, and {error}") from error

    def insertion(self, text: str, branch: Branch) -> tuple[int, list[int]]:
        """(at, ids): the hint's ids, to be read before position `at` of the branch."""
        rendered = self.renderer.render([{"role": "system", "content": text}, PROBE])
        plain, hinted, ids = self.plain, rendered.token_ids, branch.token_ids
        at = _common(plain, hinted)
        behind = _common(plain[at:][::-1], hinted[at:][::-1])
        if at + behind == len(plain) and ids[:at].tolist() == plain[:at]:
            return at, hinted[at : len(hinted) - behind]
        # The format puts a system message in place of its default block: the hint's turn goes in front, behind the BOS.
        bos = getattr(self.renderer.tokenizer, "bos_token_id", None)
        at = int(bos is not None and hinted[0] == bos and ids[0] == bos)
        return at, hinted[at : rendered.message_index.index(1)]


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
