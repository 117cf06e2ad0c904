"""Problems as token ids, by the tokenizer and the chat template that serve the model: the two can never disagree."""

from pathlib import Path

from perilune.text.chat import ChatTemplate, Special
from perilune.text.tokenizer import Tokenizer
from perilune.text.tools import parse_tools
from runs.nano.tasks import Problem, assistant_turn


class Codec:
    """The vocabulary in `directory`, and prompts and expected answers in it."""

    def __init__(self, directory: Path) -> None:
        self.tokenizer = Tokenizer.from_directory(directory)
        self.template = ChatTemplate()
        self.end = self.tokenizer.special("<|im_end|>")

    def prompt(self, problem: Problem) -> list[int]:
        """Everything before the answer: it ends with an open `<think>`, or with an empty thought."""
        tools = parse_tools(list(problem.tools))
        return self.template.render_ids(self.tokenizer, problem.messages, tools=tools, thinking=problem.thinking)

    def target(self, problem: Problem) -> list[int]:
        """`{reasoning}</think>{content}{tool calls}<|im_end|>`; without thinking, from the content on.

        The template renders the turn as one of the past. With tool calls it keeps the reasoning; a final answer loses
        it there, so the reasoning is spliced in here.
        """
        turn = assistant_turn(problem.reply)
        pieces = self.template.pieces([turn], thinking=False, add_generation_prompt=False)
        answer = pieces[pieces.index(Special("</think>")) + 1 :]
        ids = [] if not problem.thinking else [*self.tokenizer.encode(problem.reply.reasoning), self._id("</think>")]
        for piece in answer:
            ids += [self._id(piece.name)] if isinstance(piece, Special) else self.tokenizer.encode(piece)
        return ids

    def _id(self, name: str) -> int:
        return self.tokenizer.special(name)
