"""Prompts for models with general knowledge: code, science, other languages, tools and reasoning, made from parts.

They have no expected answers: a drafter learns the target's own. Every prompt is a function of its random numbers;
each domain has tens of thousands of them or more, some with a system prompt, an earlier turn, or thinking off.
"""

from collections.abc import Callable, Mapping
from random import Random
from typing import Any, Final

Message = dict[str, Any]
Asked = tuple[str, tuple[Mapping[str, Any], ...]]  # what the user says, and the tools that are declared

LANGUAGES: Final = (
    "Python",
    "Rust",
    "Go",
    "TypeScript",
    "C++",
    "Java",
    "SQL",
    "Bash",
    "Kotlin",
    "Swift",
    "Haskell",
    "C",
)
STRUCTURES: Final = (
    "an LRU cache", "a thread-safe queue", "a trie", "a rate limiter", "a CSV parser", "a JSON tokenizer",
    "a binary search tree", "a bloom filter", "a retry wrapper with backoff", "an event emitter", "a matrix class",
    "a token bucket", "a Dijkstra shortest path", "a topological sort", "an interval tree", "a circular buffer",
    "a command-line argument parser", "a small HTTP client", "a diff of two texts", "a Levenshtein distance",
)  # fmt: skip
CODE_TASKS: Final = (
    "Write {what} in {lang}. {limit}", "Implement {what} in {lang} and show how it is used. {limit}",
    "Explain how {what} works, then give an implementation in {lang}. {limit}",
    "Write unit tests in {lang} for {what}, then the code that passes them. {limit}",
    "My {lang} implementation of {what} is too slow for a million items. What are the usual causes? {limit}",
    "Compare two designs of {what} in {lang} and implement the better one. {limit}",
    "Translate {what} from {other} to {lang}, idiomatically. {limit}",
)  # fmt: skip
CODE_LIMITS: Final = (
    "Do not use any library.", "Handle errors explicitly.", "Add comments where the reason is not obvious.",
    "Give the complexity of every operation.", "Keep it below forty lines.", "Use types throughout.", "",
    "Mention two edge cases.", "Return only code.",
)  # fmt: skip
FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    "physics": ("superconductivity", "the Doppler effect", "entropy", "tidal locking", "quantum tunnelling", "lasers"),
    "chemistry": ("buffer solutions", "catalysis", "chirality", "electrolysis", "hydrogen bonds", "oxidation states"),
    "biology": ("photosynthesis", "CRISPR", "mitosis", "the immune system", "symbiosis", "protein folding"),
    "mathematics": ("eigenvalues", "Bayes' theorem", "modular arithmetic", "the Fourier transform", "graph colouring"),
    "earth science": ("plate tectonics", "ocean currents", "the carbon cycle", "monsoons", "permafrost"),
    "astronomy": (
        "neutron stars",
        "the cosmic microwave background",
        "exoplanet transits",
        "comets",
        "galaxy rotation",
    ),
    "medicine": ("vaccines", "antibiotic resistance", "blood pressure", "clinical trials", "insulin"),
    "economics": ("inflation", "comparative advantage", "auctions", "public goods", "interest rates"),
}
READERS: Final = ("a child of ten", "a high-school student", "an engineer", "a colleague in the field", "a journalist")
SCIENCE_TASKS: Final = (
    "Explain {what} to {who}.", "What are three common misconceptions about {what}? Address {who}.",
    "Describe an experiment in {field} that shows {what}, for {who}.", "Write a short quiz on {what} with answers.",
    "How was {what} discovered, and what is still open?", "Give a worked numerical example about {what} for {who}.",
    "Summarise the key equations or mechanisms behind {what} as a table.",
    "How do {what} and {more} relate? Answer for {who}.",
)  # fmt: skip
# In each language: ways to ask, and things to ask about.
TONGUES: Final[Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "zh": (
        ("请简单介绍{x}。", "{x}有哪些优点和缺点？", "请写一段关于{x}的短文。", "怎样向孩子解释{x}？"),
        ("春节", "高铁", "人工智能", "茶文化", "可再生能源", "城市交通", "量子计算", "健康饮食"),
    ),
    "es": (
        ("Explica {x} en pocas palabras.", "¿Cuáles son las ventajas y desventajas de {x}?",
         "Escribe un párrafo sobre {x}."),
        ("la energía solar", "el turismo", "la inteligencia artificial", "el reciclaje", "la dieta mediterránea"),
    ),
    "fr": (
        ("Explique simplement {x}.", "Quels sont les avantages et les limites de {x} ?",
         "Rédige un court texte sur {x}."),
        ("la photosynthèse", "le télétravail", "le changement climatique", "la Révolution française",
         "l'énergie nucléaire"),
    ),
    "de": (
        ("Erkläre {x} in einfachen Worten.", "Was spricht für und was gegen {x}?",
         "Schreibe einen kurzen Text über {x}."),
        ("Windkraft", "das Homeoffice", "maschinelles Lernen", "die Kreislaufwirtschaft", "Datenschutz", "den Wald"),
    ),
    "ja": (
        ("{x}について簡単に説明してください。", "{x}の長所と短所は何ですか。",
         "{x}を紹介する短い文章を書いてください。"),
        ("再生可能エネルギー", "和食", "人工知能", "新幹線", "四季", "リモートワーク"),
    ),
    "ko": (
        ("{x}에 대해 쉽게 설명해 주세요.", "{x}의 장점과 단점은 무엇인가요?", "{x}에 관한 짧은 글을 써 주세요."),
        ("한글", "인공지능", "대중교통", "김치", "재생 에너지", "원격 근무"),
    ),
    "ru": (
        ("Объясни простыми словами, что такое {x}.", "Напиши короткий текст на тему: {x}.",
         "Какие вопросы ставит тема «{x}»?"),
        ("искусственный интеллект", "фотосинтез", "общественный транспорт", "инфляция", "солнечная энергия"),
    ),
    "pt": (
        ("Explique {x} de forma simples.", "Quais são as vantagens e desvantagens de {x}?",
         "Escreva um texto curto sobre {x}."),
        ("a energia eólica", "o ensino a distância", "a Amazônia", "a inteligência artificial", "o transporte público"),
    ),
    "ar": (
        ("اشرح {x} بكلمات بسيطة.", "ما مزايا وعيوب {x}؟", "اكتب فقرة قصيرة عن {x}."),
        ("الطاقة الشمسية", "الذكاء الاصطناعي", "التعلم عن بعد", "السياحة", "الخط العربي"),
    ),
    "hi": (
        ("{x} को सरल शब्दों में समझाइए।", "{x} के फायदे और नुकसान क्या हैं?", "{x} पर एक छोटा अनुच्छेद लिखिए।"),
        ("सौर ऊर्जा", "कृत्रिम बुद्धिमत्ता", "ऑनलाइन शिक्षा", "योग", "सार्वजनिक परिवहन"),
    ),
    "it": (
        ("Spiega {x} in parole semplici.", "Quali sono i pro e i contro di {x}?", "Scrivi un breve testo su {x}."),
        ("l'energia solare", "il Rinascimento", "lo smart working", "l'intelligenza artificiale",
         "la dieta mediterranea"),
    ),
    "vi": (
        ("Hãy giải thích ngắn gọn về {x}.", "Ưu điểm và nhược điểm của {x} là gì?", "Viết một đoạn văn ngắn về {x}."),
        ("năng lượng mặt trời", "trí tuệ nhân tạo", "giao thông công cộng", "học trực tuyến"),
    ),
}  # fmt: skip
TOOLS: Final[tuple[tuple[str, str, Mapping[str, str]], ...]] = (
    ("get_weather", "Current weather of a place.", {"city": "string", "unit": "string"}),
    (
        "search_flights",
        "Flights between two airports.",
        {"origin": "string", "destination": "string", "date": "string"},
    ),
    ("convert_currency", "Converts an amount.", {"amount": "number", "from": "string", "to": "string"}),
    ("create_event", "Puts an event into the calendar.", {"title": "string", "start": "string", "minutes": "integer"}),
    ("send_email", "Sends an e-mail.", {"to": "string", "subject": "string", "body": "string"}),
    ("query_database", "Runs a read-only SQL query.", {"sql": "string", "limit": "integer"}),
    ("read_file", "Text of a file.", {"path": "string", "first_line": "integer", "last_line": "integer"}),
    ("run_tests", "Runs a project's tests.", {"pattern": "string", "verbose": "boolean"}),
    ("book_table", "Reserves a table.", {"restaurant": "string", "people": "integer", "time": "string"}),
    ("track_parcel", "Where a parcel is.", {"number": "string"}),
    ("translate", "Translates a text.", {"text": "string", "language": "string"}),
    ("get_stock_price", "Latest price of a share.", {"symbol": "string"}),
)
CITIES: Final = (
    "Oslo",
    "Lima",
    "Nairobi",
    "Kyoto",
    "Toronto",
    "Seville",
    "Hanoi",
    "Accra",
    "Tallinn",
    "Perth",
    "Quito",
)
REQUESTS: Final = (
    "What is the weather in {a}, and should I take an umbrella?", "Find me a flight from {a} to {b} on {date}.",
    "How much is {n} euros in the currency of {a}'s country?", "Put a {m} minute call with the {b} team on {date}.",
    "Write to ops@example.com that the release of {date} is moved by {m} minutes.",
    "Which {m} customers in {a} ordered most last month?",
    "Look at lines {m} to {n} of src/main.py and say what fails.",
    "Run the tests that mention {b} and summarise the failures.",
    "Book a table for {m} in {a} for {date}, then mail me.",
    "Where is parcel {n}-{m}? If it is in {a}, tell me the weather there too.",
    "Compare the weather of {a}, {b} and {c} and plan my route.", "Translate 'see you in {a}' into three languages.",
)  # fmt: skip
STORIES: Final = (
    "A shop in {a} sells {n} boxes of {m} pens. {k} boxes are returned half empty. How many pens were sold for good?",
    "A train leaves {a} at {h}:{q} at {n} km/h, another leaves {b}, {m}0 km away, {k} minutes later at {o} "
    "km/h. When do they meet?",
    "{n} people shake hands with each other once, except {k} who arrived late and greet only half. How many "
    "handshakes?",
    "From the digits of {n}{m}, how many numbers divisible by {k} can be made? Show each step.",
    "A tank fills in {n} minutes by one pipe and in {m} by another, and loses {k} litres a minute of {o}00. When is it "
    "full?",
    "Prove or refute: among any {k} whole numbers, two differ by a multiple of {j}.",
    "{k} friends from {a}, {b} and {c} sit in a row; nobody from {a} sits at an end. Count the orders if {j} are from "
    "{a}.",
    "A password has {k} letters and {j} digits, no two digits adjacent. How many are there, and how long do "
    "{n}0 guesses "
    "a second take?",
    "Plan the cheapest way to carry {n} kg over {m} km with vans of {o} kg at {k} euros per trip and a truck "
    "of {n}0 kg "
    "at {m} euros.",
)  # fmt: skip
SYSTEM: Final = (
    "You are a helpful assistant.", "Answer briefly.", "Think carefully and check your result.", "You are an expert.",
    "Answer in the language of the question.",
)  # fmt: skip


def _code(rng: Random) -> Asked:
    lang, other = rng.sample(LANGUAGES, 2)
    task, limit = rng.choice(CODE_TASKS), rng.choice(CODE_LIMITS)
    return task.format(what=rng.choice(STRUCTURES), lang=lang, other=other, limit=limit).strip(), ()


def _science(rng: Random) -> Asked:
    field = rng.choice(list(FIELDS))
    what, more = rng.sample(FIELDS[field], 2)
    task = rng.choice(SCIENCE_TASKS)
    words = f" Use about {rng.randrange(5, 60) * 10} words." if rng.random() < 0.6 else ""
    return task.format(what=what, more=more, field=field, who=rng.choice(READERS)) + words, ()


def _multilingual(rng: Random) -> Asked:
    ways, things = TONGUES[rng.choice(list(TONGUES))]
    asked = [rng.choice(ways).format(x=thing) for thing in rng.sample(things, rng.choice((1, 1, 2, 3)))]
    return " ".join(asked), ()


def _tools(rng: Random) -> Asked:
    declared = []
    for name, about, fields in rng.sample(TOOLS, rng.randrange(2, 7)):
        properties = {field: {"type": kind} for field, kind in fields.items()}
        required = [field for field in fields if rng.random() < 0.7]
        parameters = {"type": "object", "properties": properties, "required": required}
        function = {"name": name, "description": about, "parameters": parameters}
        declared.append({"type": "function", "function": function})
    return _filled(rng, rng.choice(REQUESTS)), tuple(declared)


def _reasoning(rng: Random) -> Asked:
    return _filled(rng, rng.choice(STORIES)), ()


def _filled(rng: Random, text: str) -> str:
    a, b, c = rng.sample(CITIES, 3)
    date = f"2027-{rng.randrange(1, 13):02d}-{rng.randrange(1, 29):02d}"
    return text.format(
        a=a, b=b, c=c, date=date, n=rng.randrange(12, 400), m=rng.randrange(3, 60), k=rng.randrange(3, 12),
        j=rng.randrange(2, 6), o=rng.randrange(20, 160), h=rng.randrange(5, 22), q=f"{rng.randrange(60):02d}",
    )  # fmt: skip


DOMAINS: Final[Mapping[str, Callable[[Random], Asked]]] = {
    "code": _code,
    "science": _science,
    "multilingual": _multilingual,
    "tools": _tools,
    "reasoning": _reasoning,
}
THINKING_SHARE: Final = 0.75
SYSTEM_SHARE: Final = 0.25
LATER_SHARE: Final = 0.15


def ask(domain: str, rng: Random) -> tuple[list[Message], tuple[Mapping[str, Any], ...], bool]:
    """(messages, tools, thinking) of a prompt of one of DOMAINS.

    Some have an earlier question. Its answer is a placeholder, because the target has not answered it when prompts are
    made.
    """
    text, tools = DOMAINS[domain](rng)
    messages: list[Message] = [{"role": "user", "content": text}]
    if rng.random() < LATER_SHARE:
        before, _ = DOMAINS["science" if domain == "tools" else domain](rng)
        messages = [
            {"role": "user", "content": before},
            {"role": "assistant", "content": "Done."},
            *messages,
        ]
    if rng.random() < SYSTEM_SHARE:
        messages.insert(0, {"role": "system", "content": rng.choice(SYSTEM)})
    return messages, tools, rng.random() < THINKING_SHARE
