"""The chat formats that the recipes' models are trained in, as text and as Jinja templates that render the same."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Chat:
    """Marks of one format. Every content stands after its role's header and a space, and before `end`.

    With `newline_before_header` the template writes a newline between turns, which the tokenizer makes part of the
    header that follows: a header is one token, so that an answer starts as near to its question as in any format.
    """

    pad: str
    begin: str  # at the start of every chat; may be empty
    end: str
    system: str
    user: str
    assistant: str
    template: str
    newline_before_header: bool = False

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """Each once, in the order of their ids."""
        marks = (self.pad, self.begin, self.end, self.system, self.user, self.assistant)
        return tuple(mark for mark in marks if mark)

    def system_turn(self, content: str) -> str:
        """Text of a system turn."""
        return f"{self.system} {content}{self.end}"

    def question_turn(self, content: str) -> str:
        """Text of a user turn and the header of its answer."""
        return f"{self.user} {content}{self.end}{self.assistant}"

    def answer_turn(self, content: str) -> str:
        """Text that follows the header of an answer."""
        return f" {content}{self.end}"


CHATS: dict[str, Chat] = {
    "plain": Chat(
        pad="<|pad|>",
        begin="<|begin|>",
        end="<|end|>",
        system="<|system|>",
        user="<|user|>",
        assistant="<|assistant|>",
        template="{{ bos_token }}"
        "{% for message in messages %}"
        "{{ '<|' + message['role'] + '|> ' + message['content'] | trim + eos_token }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}",
    ),
    "chatml": Chat(
        pad="<|endoftext|>",
        begin="",
        end="<|im_end|>",
        system="<|im_start|>system\n",
        user="<|im_start|>user\n",
        assistant="<|im_start|>assistant\n",
        template="{% for message in messages %}"
        "{{ '<|im_start|>' + message['role'] + '\\n ' + message['content'] | trim + '<|im_end|>\\n' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
        newline_before_header=True,
    ),
}
