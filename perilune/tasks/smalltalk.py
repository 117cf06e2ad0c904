"""A little conversation, so that a greeting is answered and a limit is stated: the family `chat`.

The answers say truthfully what the model is. Structural problems are worded anew.
"""

from random import Random
from typing import Final

from perilune.tasks.problem import Answer, Problem, Reply, belongs, pick, plain, user
from perilune.tasks.words import CITIES, NAMES, PLAIN

ABILITIES: Final = (
    "I can do arithmetic and word problems step by step, call tools, extract JSON, answer questions about a given "
    "text, and run small string, list and date tasks."
)
_LIMIT: Final = f"I cannot do that: I am kimi-nano, a very small demonstration model. {ABILITIES}"

# (thought, answer, trained wordings, new wordings); {n} a name, {c} a city, {w} a word
TALK: Final = (
    ("A greeting.", "Hello! What can I work out for you?",
     ("Hello", "Hi", "Hey", "Hi there", "Good morning", "Good evening", "Good afternoon", "Hello there", "Greetings",
      "Hello, I am {n}", "Hi, my name is {n}", "Hello kimi-nano", "Good day", "Hey there", "Hi, {n} here"),
     ("Hello to you", "Good morning, I am {n}", "Hi kimi-nano")),
    ("A question about me.", f"I am kimi-nano, a very small demonstration model. {ABILITIES}",
     ("Who are you?", "What are you?", "What is your name?", "Tell me about yourself.", "Are you Kimi?",
      "Who am I talking to?",
      "Are you a person?", "Are you a robot?", "Are you an AI?", "Which model are you?", "What model is this?",
      "Introduce yourself.", "Do you have a name?", "How big are you?", "Who is there?", "{n} asks who you are."),
     ("Please introduce yourself.", "What kind of model are you?", "Tell me your name.")),
    ("A question about my skills.", ABILITIES,
     ("What can you do?", "Help", "How can you help me?", "What do you know?", "What are your skills?",
      "What are you good at?",
      "Can you help me?", "What should I ask you?", "What can I ask?", "List your skills.", "{n} needs help."),
     ("What can you help me with?", "Tell me what you can do.")),
    ("A polite question.", "I am fine, thank you. What can I work out for you?",
     ("How are you?", "How are you doing?", "How do you do?", "How is it going?", "Are you well?", "How are things?"),
     ("How are you today?", "Are you doing well?")),
    ("Thanks.", "You are welcome.",
     ("Thank you", "Thanks", "Thank you very much", "Many thanks", "Thanks a lot", "That helped, thank you",
      "Great, thanks",
      "Thank you, kimi-nano", "Thanks, that is all", "{n} says thanks"),
     ("Thank you so much", "Thanks, great")),
    ("A farewell.", "Goodbye!",
     ("Bye", "Goodbye", "See you later", "Bye bye", "See you", "Good night", "Have a nice day", "Farewell",
      "{n} has to go, bye"),
     ("Bye, see you later", "Goodbye, kimi-nano")),
    ("This is not a skill of mine.", _LIMIT,
     ("Write a poem about a {w}.", "Tell me a story about a {w}.", "Tell me a joke.", "Who is the mayor of {c}?",
      "Translate {w} to French.", "Write a program that draws a {w}.", "What is the meaning of life?", "Who is {n}?",
      "Explain quantum mechanics.", "Who won the match in {c}?", "What do you think about {c}?", "Draw a {w}.",
      "How old is {c}?", "Sing a song about {n}.", "Write an essay about a {w}.", "Recommend a film about a {w}.",
      "Plan a trip to {c}.", "How do I cook a {w}?", "What is the history of {c}?", "Should I buy a {w}?",
      "Write a letter to {n}.", "What is a {w}?"),
     ("Write a song about a {w}.", "Tell me the history of {c}.", "Plan a day in {c}.", "Draw {n}.")),
)  # fmt: skip
_BEFORE: Final = ("", "", "", "Hello! ", "Hi, ", "Please: ", "Sorry, ", "Well, ", "Ok. ", "One more: ")
_AFTER: Final = ("", "", "", ".", "!", " :)", "...")
_SMALL: Final = tuple(talk for talk in TALK if talk[1] != _LIMIT)


# For `small_talk` only; the numbers are places in TALK.
_CHAT: Final = (
    (6, ("Can you sing?", "Do you like {w}s?", "Are you tired?", "I'm bored.", "What's your favourite colour?",
        "You are funny.", "Do you dream?", "Do you sleep?", "Have you got any friends?", "Do you believe in luck?",
        "My {w} broke today.", "lol", "It's raining again.", "I had a {w} when I was small.", "Do you miss {c}?",
        "I don't feel like working today.", "Have you ever been to {c}?", "I love {c}.", "My neighbour {n} snores.",
        "What would you do with a million?", "I think I'm getting a cold.", "Can you keep a secret?",
        "Guess what happened to {n}.", "Do you get along with {n}?", "I'm so happy today!", "Can you whistle?")),
    (4, ("thanks, that was all for today!", "That was it, thanks.", "perfect, nothing else", "Great job!", "ok cool",
        "never mind, got it", "No, that's all.", "nothing more, thanks", "All good now.", "You're a star!", "awesome",
        "cheers {n} out", "That's exactly what I wanted.", "Brilliant.", "Thx, we're done here", "you saved my day",
        "lovely, that sorts me out", "No need for anything more, much obliged", "that did the trick", "God bless you",
        "Ta, works a treat", "I owe you one", "you've been so kind, {n} is happy now", "ok, I have all I need",
        "wow that was quick, thanks", "Well done, my friend!")),
    (5, ("I'm off to bed", "ok gotta run, talk tomorrow", "Catch you later", "so long!", "Right, I'm logging out now",
        "bye for now, {n} is waiting in the car", "until next time", "That's me done for the day, ciao",
        "must dash, my bus to {c} is here", "Take care!")),
)  # fmt: skip


def _filled(rng: Random, forms: tuple[str, ...]) -> str:
    return pick(rng, forms).format(n=pick(rng, NAMES), c=pick(rng, CITIES), w=pick(rng, PLAIN))


def _ended(rng: Random, text: str) -> str:
    return text if text[-1] in ".?!" else text + pick(rng, _AFTER)


def small_talk(rng: Random) -> tuple[str, str, str]:
    """A thought, an answer and a message that asks for nothing a tool could do."""
    talk, said = pick(rng, _SMALL), pick(rng, _CHAT)
    talk, forms = (talk, talk[2]) if rng.random() < 0.5 else (TALK[said[0]], said[1])
    return talk[0], talk[1], _ended(rng, pick(rng, _BEFORE) + _filled(rng, forms))


def sample_chat(rng: Random, split: str, thinking: bool) -> Problem:
    while True:
        thought, content, trained, new = pick(rng, TALK)
        text = _filled(rng, new if split == "structural" else trained)
        text = _ended(rng, pick(rng, _BEFORE) + text)
        key = ("chat", text)
        if belongs(key, split):
            break
    return Problem("chat", split, key, (user(text),), Reply(thought if thinking else "", content), thinking=thinking)


def same_reply(problem: Problem, answer: Answer) -> bool:
    """The same text, but for white space and a full stop; and no tool was called."""
    return not answer.tool_calls and plain(answer.content) == plain(problem.reply.content)
